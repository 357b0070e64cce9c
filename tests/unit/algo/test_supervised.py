# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.algo.supervised import bradley_terry_loss, dpo_loss, nll_loss, perplexity
from mrl.config.schema.algo import DpoConfig

CONFIG = DpoConfig(
    reference_policy_kl_penalty=0.5, sft_average_log_probs=False, preference_loss_weight=2.0, sft_loss_weight=0.25
)


def test_a_row_by_hand():
    logprobs = torch.tensor([-1.0, -2.0, float("nan"), -4.0], requires_grad=True)
    loss, metrics = nll_loss(logprobs, torch.tensor([0.25, 0.25, 0.0, 0.25]))
    assert loss.item() == metrics["loss"].item() == 1.75
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.25, -0.25, 0.0, -0.25]


def test_perplexity():
    assert math.isclose(perplexity(math.log(7.0)), 7.0, rel_tol=1e-12)
    assert perplexity(1e6) == math.inf
    assert math.isnan(perplexity(math.nan))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(-20.0, 0.0), st.booleans()), min_size=1, max_size=20), st.integers(0, 20))
def test_parts_of_a_batch_add_up_to_the_mean_over_its_tokens(tokens: list[tuple[float, bool]], cut: int):
    learned = [logprob for logprob, is_learned in tokens if is_learned]
    logprobs = torch.tensor([logprob for logprob, _ in tokens], dtype=torch.float64)
    weights = torch.tensor([float(is_learned) for _, is_learned in tokens], dtype=torch.float64) / max(len(learned), 1)
    parts = [nll_loss(logprobs[part], weights[part])[0].item() for part in (slice(0, cut), slice(cut, None))]
    assert math.isclose(sum(parts), -sum(learned) / max(len(learned), 1), abs_tol=1e-9)


def test_a_pair_by_hand():
    loss, metrics = bradley_terry_loss(torch.tensor([3.0, 0.0]), torch.tensor([1.0, 0.0]), beta=0.5, num_pairs=4)
    # sigmoid(0.5 * 2) and sigmoid(0); the batch has two more pairs in other rows.
    expected = (math.log(1 + math.exp(-1.0)) + math.log(2.0)) / 4
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {
            "loss": expected,
            "accuracy": 0.25,
            "rewards_chosen_mean": 0.75,
            "rewards_rejected_mean": 0.25,
            "rewards_margin_mean": 0.5,
        },
        rel=1e-6,
    )


def test_equal_rewards_pull_apart_by_half():
    chosen, rejected = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    loss, _ = bradley_terry_loss(chosen, rejected, num_pairs=1)
    loss.backward()
    assert chosen.grad is not None and rejected.grad is not None
    assert (chosen.grad.item(), rejected.grad.item()) == (-0.5, 0.5)


pairs = st.lists(st.tuples(*[st.floats(-30.0, 30.0)] * 3), min_size=1, max_size=8)


@settings(max_examples=50, deadline=None)
@given(pairs, st.integers(0, 8))
def test_rows_add_up_to_the_loss_of_a_loop_over_pairs(values: list[tuple[float, float, float]], cut: int):
    def row(part: list[tuple[float, float, float]]) -> float:
        ratios = torch.tensor(
            [ratio for chosen, rejected, _ in part for ratio in (chosen, rejected)], dtype=torch.float64
        )
        logprobs = torch.tensor([logprob for _, _, logprob in part], dtype=torch.float64)
        return dpo_loss(ratios, logprobs, num_pairs=len(values), config=CONFIG)[0].item()

    slow = 0.0
    for chosen, rejected, logprob in values:
        slow += 2.0 * math.log1p(math.exp(-0.5 * (chosen - rejected))) - 0.25 * logprob
    assert row(values[:cut]) + row(values[cut:]) == pytest.approx(slow / len(values), rel=1e-9, abs=1e-9)


def test_the_gradient_is_that_of_finite_differences():
    generator = torch.Generator().manual_seed(0)
    ratios = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    logprobs = torch.randn(3, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: dpo_loss(a, b, num_pairs=5.0, config=CONFIG)[0], (ratios, logprobs))


def test_a_row_without_pairs_has_a_loss_of_zero():
    ratios = torch.zeros(1, requires_grad=True)
    loss, metrics = dpo_loss(ratios[:0], ratios[:0], num_pairs=3, config=CONFIG)
    loss.backward()
    assert loss.item() == metrics["accuracy"].item() == 0.0
