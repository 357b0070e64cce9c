# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrl.algo.token_advantages import error_metrics, finish_error_metrics, kl_penalty, sequence_errors, token_advantages
from mrl.config.schema.algo import AdvantageEstimatorConfig, GrpoConfig, LossConfig

NAN = math.nan


def alone(total: torch.Tensor) -> torch.Tensor:
    """The sum over one rank."""
    return total


@given(st.lists(st.lists(st.tuples(st.floats(-2, 2), st.booleans()), max_size=5), min_size=1, max_size=4))
def test_errors_of_sequences_equal_the_slow_loop(sequences: list[list[tuple[float, bool]]]):
    flat = [token for sequence in sequences for token in sequence]
    drift, mask = (torch.tensor([float(token[i]) for token in flat]) for i in (0, 1))
    bounds = torch.tensor([0, *torch.tensor([len(sequence) for sequence in sequences]).cumsum(0).tolist()])
    old = torch.where(mask > 0, -3.0 + drift, NAN)
    found = sequence_errors(old, torch.full_like(old, -3.0), mask, bounds).tolist()
    for value, sequence in zip(found, sequences, strict=True):
        errors = [math.exp(abs(d)) for d, counts in sequence if counts]
        assert math.isnan(value) if not errors else value == pytest.approx(sum(errors) / len(errors), rel=1e-4)


def test_tokens_outside_of_the_trainers_nucleus_are_no_error():
    old = torch.tensor([-1.0, -math.inf, -2.0, -math.inf, -1.0])
    mask, generator = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]), torch.tensor([-1.0, -1.0, -2.5, -1.0, -1.0])
    found = sequence_errors(old, generator, mask, torch.tensor([0, 3, 4, 5])).tolist()
    assert found[:2] == [pytest.approx((1 + math.exp(0.5)) / 2), 0] and math.isnan(found[2])


def test_metrics_of_errors_by_hand():
    errors, is_kept = torch.tensor([1.0, 4.0, 1.5, 3.0]), torch.tensor([True, False, True, False])
    totals = {
        name: float(value) for name, value in error_metrics(errors, is_kept, torch.tensor([1.0, 1.0, 0.0, 0.0])).items()
    }
    assert finish_error_metrics(totals) == {
        "mean_seq_mult_prob_error": 2.375,
        "min_seq_mult_prob_error": 1.0,
        "max_seq_mult_prob_error": 4.0,
        "mean_seq_mult_prob_error_after_mask": 1.25,
        "min_seq_mult_prob_error_after_mask": 1.0,
        "max_seq_mult_prob_error_after_mask": 1.5,
        "num_masked_seqs_by_logprob_error": 2.0,
        "masked_correct_pct": 0.5,
    }


def test_metrics_of_no_sequence_are_zero():
    empty = torch.zeros(0)
    totals = {name: float(value) for name, value in error_metrics(empty, empty.bool(), empty).items()}
    assert set(finish_error_metrics(totals).values()) == {0.0}


def advantages_of(
    config: GrpoConfig, values: list[float], mask: list[float], fixed: list[float], kl: list[float] | None = None
):
    tensors = [torch.tensor(row) for row in (values, fixed, mask)]
    penalties = None if kl is None else [torch.tensor(kl)]
    (found,) = token_advantages(tensors[:1], tensors[1:2], tensors[2:], penalties, config, alone)
    return found.tolist()


def test_bounds_and_fixed_advantages_by_hand():
    config = GrpoConfig(advantage_clip_low=-1.0, advantage_clip_high=2.0)
    values, mask, fixed = [-3.0, 0.5, 7.0, 7.0, NAN], [1.0, 1.0, 1.0, 1.0, 0.0], [NAN, NAN, NAN, -5.0, -5.0]
    # As in NeMo RL, the bounds hold for fixed advantages too.
    assert advantages_of(config, values, mask, fixed) == [-1.0, 0.5, 2.0, -1.0, 0.0]
    assert advantages_of(GrpoConfig(), values, mask, fixed) == [-3.0, 0.5, 7.0, -5.0, 0.0]


def test_reinforce_plus_plus_is_normalised_with_its_kl_before_it_is_clipped():
    config = GrpoConfig(adv_estimator=AdvantageEstimatorConfig("reinforce_plus_plus"), advantage_clip_high=1.0)
    values, mask, fixed = [1.0, 1.0, 3.0, 9.0], [1.0, 1.0, 1.0, 0.0], [NAN] * 4
    # 1, 0 and 2 after the penalty: mean 1, variance 2/3.
    found = advantages_of(config, values, mask, fixed, kl=[0.0, 1.0, 1.0, 9.0])
    assert found == pytest.approx([0.0, -math.sqrt(1.5), 1.0, 0.0])


def test_the_penalty_of_a_token_by_hand():
    config = LossConfig(reference_policy_kl_penalty=0.5, reference_policy_kl_type="k2", kl_output_clamp_value=1.0)
    old, reference = torch.tensor([-1.0, -1.0, NAN]), torch.tensor([-2.0, -9.0, NAN])
    assert kl_penalty(old, reference, torch.tensor([1.0, 1.0, 0.0]), config).tolist() == [0.25, 0.5, 0.0]
