# SPDX-License-Identifier: Apache-2.0
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.algo.losses import LOSS, BatchSize, clipped_surrogate, loss_weights, policy_loss
from mrl.algo.ratios import Segments
from mrl.config.schema.algo import LossConfig
from mrl.metrics import extreme_of
from tests.unit.algo.loss_batches import Batch, fast_loss, random_batch

CONFIG = LossConfig(
    reference_policy_kl_penalty=0.0, ratio_clip_min=0.2, ratio_clip_max=0.3, use_importance_sampling_correction=True
)
KL = replace(CONFIG, reference_policy_kl_penalty=0.3)
GSPO = replace(
    CONFIG, sequence_level_importance_ratios=True, token_level_loss=False, ratio_clip_min=0.02, ratio_clip_max=0.05
)
BOUNDS = dict(truncated_importance_sampling_ratio=1.1, truncated_importance_sampling_ratio_min=0.9)

VARIANTS = {
    "grpo": CONFIG,
    "no correction": replace(CONFIG, use_importance_sampling_correction=False),
    "mean over sequences": replace(CONFIG, token_level_loss=False),
    "dr grpo": replace(CONFIG, token_level_loss=False, constant_length_normalizer=16),
    "dual clip": replace(CONFIG, ratio_clip_c=1.35),
    "gspo": GSPO,
    "gspo, truncated": replace(GSPO, truncated_importance_sampling_ratio=1.02),
    "gspo, icepop": replace(GSPO, truncated_importance_sampling_type="icepop", **BOUNDS),
    "cispo": replace(CONFIG, use_cispo=True, ratio_clip_min=1.0 - 1e-9),
    "reinforce": replace(CONFIG, disable_ppo_ratio=True),
    "on policy": replace(CONFIG, force_on_policy_ratio=True),
    "on policy, reinforce": replace(CONFIG, force_on_policy_ratio=True, disable_ppo_ratio=True),
    "on policy, gspo": replace(GSPO, force_on_policy_ratio=True),
    "a bound alone": replace(CONFIG, truncated_importance_sampling_ratio=1.02),
    "tis": replace(CONFIG, truncated_importance_sampling_type="tis", **BOUNDS),
    "icepop": replace(CONFIG, truncated_importance_sampling_type="icepop", **BOUNDS),
    "seq-mask-tis": replace(CONFIG, truncated_importance_sampling_type="seq-mask-tis", **BOUNDS),
    "k1": replace(KL, reference_policy_kl_type="k1"),
    "k2": replace(KL, reference_policy_kl_type="k2"),
    "k3": replace(KL, reference_policy_kl_type="k3"),
    "kl, clamped": replace(KL, kl_input_clamp_value=0.4, kl_output_clamp_value=0.07),
    "kl of the generator's tokens": replace(KL, use_on_policy_kl_approximation=True, kl_input_clamp_value=0.4),
    "kl, mean over sequences": replace(
        KL, token_level_loss=False, kl_input_clamp_value=None, kl_output_clamp_value=None
    ),
    "kl in reward": replace(KL, use_kl_in_reward=True),
    "positive examples": replace(CONFIG, positive_example_nll_weight=0.2),
}
each_variant = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())


@each_variant
@settings(max_examples=5, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), rng=st.randoms(use_true_random=False))
def test_however_a_batch_is_cut_loss_gradient_and_metrics_are_those_of_one_row(
    config: LossConfig, lengths: list[int], rng: random.Random
):
    """Ranks, micro-batches and packed rows are one to the loss: other sets of sequences, with whole-batch counts."""
    whole = random_batch(rng.randrange(1000), lengths)
    order = list(range(len(lengths)))
    rng.shuffle(order)
    cuts = sorted(rng.sample(range(len(lengths) + 1), k=min(2, len(lengths))))
    rows = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(lengths)], strict=True) if a < b]
    loss, gradient, metrics = fast_loss(whole, config)
    parts = [fast_loss(whole.part(members), config, whole.counts) for members in rows]
    assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-9, abs=1e-12)
    joined = torch.empty_like(gradient)
    for members, part in zip(rows, parts, strict=True):
        joined[whole.index(members)] = part[1]
    assert torch.allclose(joined, gradient, rtol=1e-9, atol=1e-14)
    for name, value in metrics.items():
        combine = {"min": min, "max": max}.get(extreme_of(name) or "", sum)
        assert combine(part[2][name] for part in parts) == pytest.approx(value, rel=1e-6, abs=1e-9), name
    assert metrics[LOSS] == loss


def one_token(log_ratio: float, advantage: float, config: LossConfig) -> tuple[float, float, dict[str, float]]:
    """Loss, gradient and metrics of a token that has become likelier by `log_ratio`."""
    old = torch.tensor([-30.0], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    batch = Batch([1], old + log_ratio, old, old, old, advantage * one, one, [1.0])
    loss, gradient, metrics = fast_loss(batch, config)
    return loss, float(gradient), metrics


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "gradient"),
    [
        (0.0, 1.0, -1.0, -1.0),
        (math.log(1.25), 1.0, -1.25, -1.25),
        (math.log(2.0), 1.0, -1.3, 0.0),  # good token, already likely enough: clipped above at 1 + 0.3
        (math.log(2.0), -1.0, 2.0, 2.0),  # bad token that got likelier: never clipped
        (math.log(0.5), -1.0, 0.8, 0.0),  # bad token, already unlikely enough: clipped below at 1 - 0.2
        (math.log(0.5), 1.0, -0.5, -0.5),
        (25.0, -1.0, math.exp(25.0), math.exp(25.0)),  # however far
    ],
)
def test_clipped_surrogate_by_hand(log_ratio: float, advantage: float, loss: float, gradient: float):
    found = one_token(log_ratio, advantage, CONFIG)
    assert found[:2] == pytest.approx((loss, gradient))
    assert found[2]["clip_fraction"] == float(gradient == 0.0)
    assert found[2]["bounded_fraction"] == 0.0
    held = one_token(log_ratio, advantage, replace(CONFIG, max_log_ratio=10.0))
    assert held[:2] == pytest.approx((math.exp(10.0), 0.0) if log_ratio > 10.0 else (loss, gradient))
    assert held[2]["bounded_fraction"] == float(log_ratio > 10.0)


def test_a_correction_weight_that_overflows_is_0_unless_it_is_held():
    # Beside one of 2. exp(800) is no float64, and exp(-800) is 0.
    batch = drifting([math.log(2), 800.0, -800.0, 0.0], [4])
    loss, gradient, metrics = fast_loss(batch, CONFIG)
    assert loss == pytest.approx(-(2 + 0 + 0 + 1) / 4)
    assert gradient.tolist() == pytest.approx([-2 / 4, 0.0, 0.0, -1 / 4])
    assert metrics["bounded_fraction"] == 1 / 4
    loss, gradient, metrics = fast_loss(batch, replace(CONFIG, max_log_ratio=3.0))
    assert gradient.tolist() == pytest.approx([-2 / 4, -math.exp(3) / 4, -math.exp(-3) / 4, -1 / 4])
    assert metrics["bounded_fraction"] == 2 / 4


def test_the_weight_of_a_sequence_overflows_as_a_whole():
    # 400 + 400 of the first sequence; with tis its weight of 0 is within the bounds, as in NeMo RL.
    batch = drifting([400.0, 400.0, math.log(3)], [2, 1])
    config = replace(GSPO, truncated_importance_sampling_ratio=2.0)
    loss, gradient, metrics = fast_loss(batch, config)
    assert loss == pytest.approx(-(0 + 2) / 2)
    assert gradient.tolist() == pytest.approx([0.0, 0.0, -2 / 2])
    assert (metrics["bounded_fraction"], metrics["is_oob_ratio"]) == pytest.approx((2 / 3, 1 / 3))


def test_forced_on_policy_every_token_has_its_own_gradient():
    # With GSPO's ratio of the sequence both would get the mean of the advantages.
    zeros, ones = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    batch = Batch([2], zeros - 1, zeros - 1, zeros - 1, zeros - 1, torch.tensor([3.0, -1.0]).double(), ones, [1.0])
    _, gradient, _ = fast_loss(batch, replace(GSPO, force_on_policy_ratio=True))
    assert gradient.tolist() == pytest.approx([-1.5, 0.5])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [(4.0, -1.0, 3.0, 0.0), (2.0, -1.0, 2.0, 2.0), (4.0, 1.0, -1.3, 0.0), (0.5, -1.0, 0.8, 0.0)],
)
def test_dual_clip_by_hand(ratio: float, advantage: float, loss: float, gradient: float):
    """A bad token that got four times as likely counts three times, and teaches nothing more."""
    found = one_token(math.log(ratio), advantage, replace(CONFIG, ratio_clip_c=3.0))
    assert found[:2] == pytest.approx((loss, gradient))
    assert found[2]["clip_fraction"] == float(gradient == 0.0)


@pytest.mark.parametrize("lower", [1.0, 1.5])
def test_a_ratio_is_not_below_0_and_so_not_clipped_there(lower: float):
    """NeMo RL's high off-policy recipe of CISPO says 1.0."""
    loss, gradient, _ = one_token(math.log(0.5), -1.0, replace(CONFIG, ratio_clip_min=lower))
    assert (loss, gradient) == pytest.approx((0.5, 0.5))
    _, gradient, metrics = one_token(math.log(0.5), 2.0, replace(CONFIG, use_cispo=True, ratio_clip_min=lower))
    assert (gradient, metrics["clip_fraction"]) == (pytest.approx(-1.0), 0.0)


@pytest.mark.parametrize(("ratio", "weight"), [(2.0, 1.3), (0.5, 0.8), (1.1, 1.1)])
def test_cispo_keeps_the_gradient_of_clipped_tokens(ratio: float, weight: float):
    loss, gradient, metrics = one_token(math.log(ratio), 2.0, replace(CONFIG, use_cispo=True))
    assert (loss, gradient) == pytest.approx((-2.0 * weight * (math.log(ratio) - 30.0), -2.0 * weight))
    assert metrics["clip_fraction"] == float(ratio != weight)


def test_a_gspo_ratio_is_the_geometric_mean():
    # Ratios 2 and 1/2 cancel; every token of the sequence gets half of the gradient of a ratio of 1.
    log2 = math.log(2.0)
    zeros, ones = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    batch = Batch(
        [3],
        torch.tensor([9.0, log2, -log2]).double(),
        zeros,
        zeros,
        zeros,
        ones,
        torch.tensor([0.0, 1.0, 1.0]).double(),
        [1.0],
    )
    loss, gradient, metrics = fast_loss(batch, GSPO)
    assert loss == pytest.approx(-1.0)
    assert gradient.tolist() == pytest.approx([0.0, -0.5, -0.5])
    assert metrics["probs_ratio_min"] == metrics["probs_ratio_max"] == pytest.approx(1.0)


def test_on_policy_needs_no_old_logprobs():
    batch = random_batch(1)
    config = replace(CONFIG, force_on_policy_ratio=True)
    tokens = replace(batch.tokens(batch.logprobs, config), reference_logprobs_T=None)
    loss, metrics = policy_loss(tokens, config, batch.counts)
    assert float(loss) == fast_loss(batch, config)[0]
    assert float(metrics["probs_ratio_min"]) == float(metrics["probs_ratio_max"]) == 1.0


def drifting(drift: list[float], lengths: list[int]) -> Batch:
    """Tokens that the generator drew with probabilities exp(-drift) times those of the trainer."""
    ones = torch.ones(sum(lengths), dtype=torch.float64)
    old = -3.0 * ones
    return Batch(
        lengths, old, old, old - torch.tensor(drift, dtype=torch.float64), old, ones, ones, [1.0] * len(lengths)
    )


# Weights 2 and 1/2 in the first sequence, 1.5 twice in the second.
DRIFTING = drifting([math.log(2), -math.log(2), math.log(1.5), math.log(1.5)], [2, 2])


@pytest.mark.parametrize(
    ("kind", "weights", "oob_ratio"),
    [
        ("tis", [1.2, 0.8, 1.2, 1.2], 1.0),
        (None, [1.2, 0.8, 1.2, 1.2], 1.0),
        ("icepop", [0.0, 0.0, 0.0, 0.0], 1.0),
        ("seq-mask-tis", [2.0, 0.5, 0.0, 0.0], 0.5),  # of the two sequences, one
    ],
)
def test_truncated_importance_by_hand(kind, weights: list[float], oob_ratio: float):
    bounds = dict(truncated_importance_sampling_ratio=1.2, truncated_importance_sampling_ratio_min=0.8)
    config = replace(CONFIG, truncated_importance_sampling_type=kind, **bounds)
    loss, _, metrics = fast_loss(DRIFTING, config)
    assert loss == pytest.approx(-sum(weights) / 4)
    assert metrics["is_oob_ratio"] == pytest.approx(oob_ratio)
    assert metrics["sampling_importance_ratio"] == pytest.approx(sum(weights) / 4)


def test_a_bound_counts_what_it_holds():
    _, _, metrics = fast_loss(DRIFTING, replace(CONFIG, truncated_importance_sampling_ratio=1.6))
    assert metrics["is_oob_ratio"] == pytest.approx(0.25)
    assert "is_oob_ratio" not in fast_loss(DRIFTING, CONFIG)[2]
    # Products over sequences: 1 and 2.25.
    assert fast_loss(DRIFTING, GSPO)[2]["sampling_importance_ratio"] == pytest.approx((1 + 2.25) / 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
@each_variant
def test_what_is_outside_the_mask_has_no_effect(config: LossConfig, bad: float):
    batch = random_batch(5)
    outside = batch.mask == 0
    names = ("logprobs", "old", "generator", "reference", "advantages")
    poisoned = replace(batch, **{name: torch.where(outside, bad, getattr(batch, name)) for name in names})
    loss, gradient, metrics = fast_loss(poisoned, config)
    assert (loss, metrics) == (fast_loss(batch, config)[0], fast_loss(batch, config)[2])
    assert not gradient[outside].any()


def test_nan_inside_the_mask_is_not_hidden():
    batch = random_batch(5)
    batch.logprobs[batch.mask.argmax()] = math.nan
    assert math.isnan(fast_loss(batch, CONFIG)[0])


@each_variant
def test_a_row_without_valid_tokens_adds_nothing(config: LossConfig):
    batch = replace(random_batch(0), mask=torch.zeros(20, dtype=torch.float64))
    loss, gradient, metrics = fast_loss(batch, config, BatchSize(0.0, 0.0, 0.0))
    assert loss == 0.0 and not gradient.any()
    assert (metrics["probs_ratio_min"], metrics["probs_ratio_max"]) == (math.inf, -math.inf)
    assert all(value == 0.0 for name, value in metrics.items() if not extreme_of(name))


def test_on_policy_metrics():
    batch = random_batch(0)
    batch = replace(batch, logprobs=batch.old, generator=batch.old)
    _, _, metrics = fast_loss(batch, CONFIG)
    ones = (
        "token_mult_prob_error probs_ratio probs_ratio_clamped probs_ratio_min probs_ratio_max probs_ratio_clamped_min"
    )
    for name in (*ones.split(), "sampling_importance_ratio"):
        assert metrics[name] == pytest.approx(1.0), name
    for name in (
        "gen_kl_error",
        "policy_kl_error",
        "js_divergence_error",
        "mean_abs_dlogp",
        "clip_fraction",
        "kl_penalty",
    ):
        assert metrics[name] == pytest.approx(0.0, abs=1e-15), name
    assert metrics["approx_entropy"] == pytest.approx(float(-batch.old[batch.mask > 0].mean()))


def test_drift_metrics_by_hand():
    batch = random_batch(0)
    drift = torch.where(torch.arange(20) % 2 == 0, 0.5, -0.25).double()
    batch = replace(batch, generator=batch.old - drift)
    valid = batch.mask > 0
    old, generator, drift = batch.old[valid], batch.generator[valid], drift[valid]
    _, _, metrics = fast_loss(batch, CONFIG)
    assert metrics["mean_abs_dlogp"] == pytest.approx(float(drift.abs().mean()))
    assert metrics["token_mult_prob_error"] == pytest.approx(float(drift.abs().exp().mean()))
    assert metrics["gen_kl_error"] == pytest.approx(float((drift.exp() - 1 - drift).mean()))
    assert metrics["policy_kl_error"] == pytest.approx(float((torch.exp(-drift) - 1 + drift).mean()))
    mixture = ((old.exp() + generator.exp()) / 2).log()
    halves = [torch.exp(p - mixture) - 1 - (p - mixture) for p in (old, generator)]
    assert metrics["js_divergence_error"] == pytest.approx(float((halves[0] + halves[1]).mean() / 2))


@pytest.mark.parametrize(
    ("kind", "of_the_generator", "of_the_policy"),
    # Drifts of log 2 and -log 4, from the generator to the policy: k1 is their mean, k2 half the mean square, k3 exp(d)
    # - 1 - d.
    [
        ("k1", math.log(2) / 2, -math.log(2) / 2),
        ("k2", 5 * math.log(2) ** 2 / 4, 5 * math.log(2) ** 2 / 4),
        ("k3", (2 + 1 / 4 - 2 + math.log(2)) / 2, (1 / 2 + 4 - 2 - math.log(2)) / 2),
    ],
)
def test_errors_follow_the_estimator_of_the_kl_by_hand(kind, of_the_generator: float, of_the_policy: float):
    batch = drifting([math.log(2), -math.log(4)], [2])
    metrics = fast_loss(batch, replace(CONFIG, reference_policy_kl_type=kind))[2]
    assert (metrics["gen_kl_error"], metrics["policy_kl_error"]) == pytest.approx((of_the_generator, of_the_policy))


def test_errors_are_not_clamped():
    metrics = fast_loss(drifting([-20.0], [1]), CONFIG)[2]
    assert metrics["policy_kl_error"] == pytest.approx(math.exp(20.0) - 21.0)
    assert metrics["token_mult_prob_error"] == pytest.approx(math.exp(20.0))


@pytest.mark.parametrize(("token_level_loss", "penalty"), [(True, (8 + 2 + 2) / 3), (False, (8 + (2 + 2) / 2) / 2)])
def test_the_penalty_is_averaged_as_the_loss_is(token_level_loss: bool, penalty: float):
    # k2 of a distance of 4 in the first sequence, and twice of 2 in the second.
    zeros, ones = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    reference = torch.tensor([-4.0, -2.0, 2.0]).double()
    batch = Batch([1, 2], zeros, zeros, zeros, reference, zeros, ones, [0.0, 0.0])
    config = replace(KL, reference_policy_kl_type="k2", token_level_loss=token_level_loss)
    loss, _, metrics = fast_loss(batch, config)
    assert metrics["kl_penalty"] == pytest.approx(penalty)
    assert loss == pytest.approx(0.3 * penalty)


def test_the_likelihood_of_good_rollouts_is_measured_where_it_is_learned():
    batch = random_batch(0)
    assert fast_loss(batch, CONFIG)[2]["positive_nll_loss"] == 0.0
    assert fast_loss(batch, VARIANTS["positive examples"])[2]["positive_nll_loss"] > 0.0


def test_weights_of_tokens_and_sequences():
    mask, cu_seqlens, counts = (
        torch.tensor([0.0, 1, 1, 0, 1, 0]),
        torch.tensor([0, 3, 5, 6], dtype=torch.int32),
        BatchSize(6, 4, 0),
    )
    sequences = replace(CONFIG, token_level_loss=False)
    assert loss_weights(mask, cu_seqlens, CONFIG, counts).tolist() == pytest.approx([0, 1 / 6, 1 / 6, 0, 1 / 6, 0])
    assert loss_weights(mask, cu_seqlens, sequences, counts).tolist() == pytest.approx([0, 1 / 8, 1 / 8, 0, 1 / 4, 0])
    constant = replace(sequences, constant_length_normalizer=5)
    assert loss_weights(mask, cu_seqlens, constant, counts).tolist() == pytest.approx([0, 1 / 20, 1 / 20, 0, 1 / 20, 0])


def test_a_rollout_of_three_sequences_weighs_as_one():
    """One sequence of 4 tokens is a rollout, three of 2, 3 and 1 another; of all six each has a sixth of its weight."""
    mask, cu_seqlens = torch.ones(10), torch.tensor([0, 4, 6, 9, 10], dtype=torch.int32)
    size, rollout_tokens = BatchSize(10, 4, 0, num_valid_rollouts=2), torch.tensor([4.0, 6, 6, 6])
    sequences = replace(CONFIG, token_level_loss=False)
    weights = loss_weights(mask, cu_seqlens, sequences, size, rollout_tokens)
    assert weights.tolist() == pytest.approx([1 / 8] * 4 + [1 / 12] * 6)
    constant = replace(sequences, constant_length_normalizer=5)
    assert loss_weights(mask, cu_seqlens, constant, size, rollout_tokens).tolist() == pytest.approx([1 / 10] * 10)
    assert loss_weights(mask, cu_seqlens, CONFIG, size, rollout_tokens).tolist() == pytest.approx([1 / 10] * 10)


def test_segments_by_hand():
    segments = Segments.of(torch.tensor([0, 3, 5, 6]), torch.tensor([0.0, 1, 1, 1, 1, 0]))
    values = torch.tensor([9.0, 1, 2, 3, 5, 7])
    assert segments.sum(values).tolist() == [3, 8, 0]
    assert segments.mean(values).tolist() == [1.5, 4, 0]
    assert segments.spread(segments.mean(values)).tolist() == [1.5, 1.5, 1.5, 4, 4, 0]


def test_tokens_outside_the_truncation_are_masked_and_counted():
    batch = random_batch(3)
    position = int((batch.mask > 0).nonzero()[2])
    without = replace(batch, mask=batch.mask.clone())
    without.mask[position] = 0
    expected, _, _ = fast_loss(without, CONFIG, batch.counts)
    for name in ("logprobs", "old"):
        outside = replace(batch, **{name: getattr(batch, name).clone()})
        getattr(outside, name)[position] = -torch.inf
        loss, _, metrics = fast_loss(outside, CONFIG)
        assert loss == expected
        assert metrics["outside_truncation_fraction"] == pytest.approx(1 / batch.counts.num_valid_tokens)
        assert all(math.isfinite(number) for number in metrics.values())


def test_the_kl_penalty_compares_untruncated_logprobs():
    batch = random_batch(4)
    untruncated, valid = batch.logprobs - 0.3, batch.mask > 0
    _, _, metrics = fast_loss(batch, KL, untruncated_logprobs_T=untruncated)
    difference = (batch.reference - untruncated)[valid]
    assert metrics["kl_penalty"] == pytest.approx(float((difference.exp() - difference - 1).mean()), rel=1e-5)


def test_entropy_is_averaged_over_valid_tokens():
    batch = random_batch(5)
    entropy = torch.linspace(0.0, 3.0, 20)
    loss, _, metrics = fast_loss(batch, CONFIG, entropy_T=entropy)
    assert metrics["entropy"] == pytest.approx(float(entropy[batch.mask > 0].mean()))
    assert loss == fast_loss(batch, CONFIG)[0]


def doubled(tokens, ratio_T, clipped_ratio_T, config):
    loss_T, is_clipped_T = clipped_surrogate(tokens, ratio_T, clipped_ratio_T, config)
    return 2 * loss_T, is_clipped_T


def summed(tokens, ratio_T, clipped_ratio_T, config):
    return ratio_T.sum(), torch.zeros(())


def test_an_own_loss_takes_the_place_of_ppos_and_nothing_else_changes():
    batch = random_batch(3)
    loss, gradient, metrics = fast_loss(batch, CONFIG)
    assert fast_loss(batch, replace(CONFIG, token_loss="mrl.algo.losses:clipped_surrogate"))[2] == metrics
    twice, twice_gradient, others = fast_loss(batch, replace(CONFIG, token_loss=f"{__name__}:doubled"))
    assert twice == pytest.approx(2 * loss, rel=1e-12) and torch.allclose(twice_gradient, 2 * gradient)
    assert others | {LOSS: loss} == metrics


def test_what_an_own_loss_returns_is_checked():
    with pytest.raises(ValueError, match=r"summed returned \[\(\), \(\)\]; return two tensors of shape"):
        fast_loss(random_batch(3), replace(CONFIG, token_loss=f"{__name__}:summed"))
