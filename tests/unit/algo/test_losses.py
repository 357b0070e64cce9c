import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.algo.losses import (
    LOSS,
    MAX_LOG_RATIO,
    MAX_METRICS,
    MIN_METRICS,
    finish_metrics,
    kl_divergence,
    loss_weights,
    policy_loss,
    sequence_mean_weights,
)
from mrl.config.schema_algo import LossConfig

CONFIG = LossConfig(reference_policy_kl_penalty=0.0, ratio_clip_min=0.2, ratio_clip_max=0.3, use_importance_sampling_correction=True)
LENGTHS = [5, 1, 7, 4]


def random_row(seed: int, lengths: list[int] = LENGTHS, spread: float = 0.4) -> dict[str, torch.Tensor]:
    """A row whose sequences are valid but the second, and whose first two tokens of each are prompt."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    base = -torch.rand(total, generator=generator, dtype=torch.float64) * 3 - 0.1
    mask = torch.cat([torch.tensor([0.0] * min(2, n) + [1.0] * max(0, n - 2)) for n in lengths])
    noise = [spread * torch.randn(total, generator=generator, dtype=torch.float64) for _ in range(3)]
    return {
        "logprobs_T": base + noise[0],
        "old_logprobs_T": base,
        "reference_logprobs_T": base + noise[1],
        "generator_logprobs_T": base + 0.1 * noise[2],
        "advantages_T": torch.randn(total, generator=generator, dtype=torch.float64),
        "loss_mask_T": mask.double(),
        "cu_seqlens": torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
    }


def compute(row: dict[str, torch.Tensor], config: LossConfig, num_valid_tokens: float = 10.0, num_valid_sequences: float = 3.0):
    rest = dict(row)
    weights_T = loss_weights(
        rest.pop("loss_mask_T"),
        rest.pop("cu_seqlens"),
        token_level=config.token_level_loss,
        num_valid_tokens=num_valid_tokens,
        num_valid_sequences=num_valid_sequences,
    )
    return policy_loss(**rest, weights_T=weights_T, config=config)


def slow_loss(row: dict[str, torch.Tensor], config: LossConfig, num_valid_tokens: float, num_valid_sequences: float) -> float:
    """The same loss, token by token with scalars."""
    bounds, total = row["cu_seqlens"].tolist(), 0.0
    for start, stop in zip(bounds, bounds[1:], strict=False):
        valid = [t for t in range(start, stop) if row["loss_mask_T"][t] > 0]
        for t in valid:
            new, old, generator, reference, advantage = (
                float(row[name][t])
                for name in ("logprobs_T", "old_logprobs_T", "generator_logprobs_T", "reference_logprobs_T", "advantages_T")
            )
            ratio = math.exp(new - old)
            clipped = min(max(ratio, 1 - config.ratio_clip_min), 1 + config.ratio_clip_max)
            loss = -min(ratio * advantage, clipped * advantage)
            if config.use_importance_sampling_correction:
                weight = math.exp(old - generator)
                loss *= min(weight, config.truncated_importance_sampling_ratio or math.inf)
            x = reference - new
            kl = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[config.reference_policy_kl_type]
            loss += config.reference_policy_kl_penalty * kl
            total += loss / (num_valid_tokens if config.token_level_loss else len(valid) * num_valid_sequences)
    return total


VARIANTS = [
    CONFIG,
    replace(CONFIG, use_importance_sampling_correction=False),
    replace(CONFIG, truncated_importance_sampling_ratio=1.02),
    replace(CONFIG, token_level_loss=False),
    *(replace(CONFIG, reference_policy_kl_penalty=0.3, reference_policy_kl_type=kind) for kind in ("k1", "k2", "k3")),
    replace(CONFIG, reference_policy_kl_penalty=0.3, token_level_loss=False, kl_input_clamp_value=None, kl_output_clamp_value=None),
]


@pytest.mark.parametrize("config", VARIANTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_equals_the_slow_loop(config: LossConfig, seed: int):
    row = random_row(seed)
    loss, _ = compute(row, config)
    assert float(loss) == pytest.approx(slow_loss(row, config, 10.0, 3.0), rel=1e-9)


@pytest.mark.parametrize("config", VARIANTS)
def test_gradient_equals_finite_differences(config: LossConfig):
    row = random_row(3)
    logprobs = row["logprobs_T"].clone().requires_grad_()
    loss, _ = compute({**row, "logprobs_T": logprobs}, config)
    loss.backward()
    assert logprobs.grad is not None
    for t in range(len(logprobs)):
        shifted = []
        for delta in (1e-6, -1e-6):
            moved = row["logprobs_T"].clone()
            moved[t] += delta
            shifted.append(slow_loss({**row, "logprobs_T": moved}, config, 10.0, 3.0))
        assert float(logprobs.grad[t]) == pytest.approx((shifted[0] - shifted[1]) / 2e-6, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "gradient"),
    [
        (0.0, 1.0, -1.0, -1.0),
        (math.log(1.25), 1.0, -1.25, -1.25),
        (math.log(2.0), 1.0, -1.3, 0.0),  # good token, already likely enough: clipped above at 1 + 0.3
        (math.log(2.0), -1.0, 2.0, 2.0),  # bad token that got likelier: never clipped
        (math.log(0.5), -1.0, 0.8, 0.0),  # bad token, already unlikely enough: clipped below at 1 - 0.2
        (math.log(0.5), 1.0, -0.5, -0.5),
        (25.0, -1.0, math.exp(MAX_LOG_RATIO), 0.0),  # past any honest update: held, and no gradient explodes
    ],
)
def test_clipped_surrogate_by_hand(log_ratio: float, advantage: float, loss: float, gradient: float):
    logprobs = torch.tensor([log_ratio - 30.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-30.0], dtype=torch.float64)
    value, metrics = policy_loss(
        logprobs,
        old,
        None,
        generator_logprobs_T=old,
        advantages_T=torch.tensor([advantage], dtype=torch.float64),
        weights_T=torch.ones(1),
        config=CONFIG,
    )
    value.backward()
    assert float(value.detach()) == pytest.approx(loss)
    assert logprobs.grad is not None and float(logprobs.grad) == pytest.approx(gradient)
    assert float(metrics["clip_fraction"]) == float(gradient == 0.0 and log_ratio < 20)
    assert float(metrics["bounded_fraction"]) == float(log_ratio > MAX_LOG_RATIO)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_gradient_equals_finite_differences(kind: str):
    reference = torch.zeros(9, dtype=torch.float64)
    logprobs = torch.tensor([-3.0, -1.5, -0.7, -0.01, 0.0, 0.01, 0.4, 1.5, 3.0], dtype=torch.float64, requires_grad=True)

    def kl(x: torch.Tensor) -> torch.Tensor:
        return kl_divergence(x, reference, kl_type=kind, input_clamp=2.0, output_clamp=1.7)  # type: ignore[arg-type]  # parametrized

    assert torch.autograd.gradcheck(kl, (logprobs,))
    kl(logprobs).sum().backward()
    outside = (logprobs.detach().abs() > 2.0) | (kl(logprobs).detach().abs() == 1.7)
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad[outside], torch.zeros(int(outside.sum())).double())
    assert (logprobs.grad[~outside & (logprobs.detach() != 0)] != 0).all()


def test_kl_clamps_hold_the_value():
    far = torch.tensor([-100.0, 100.0])
    assert kl_divergence(far, torch.zeros(2), kl_type="k3", input_clamp=20.0, output_clamp=10.0).tolist() == [10.0, 10.0]
    assert kl_divergence(far, torch.zeros(2), kl_type="k1", input_clamp=20.0).tolist() == [-20.0, 20.0]


def test_k3_is_an_unbiased_estimate():
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.5, 0.3]).double()
    exact = (policy * (policy / reference).log()).sum()
    for kind in ("k1", "k3"):
        assert torch.isclose((policy * kl_divergence(policy.log(), reference.log(), kl_type=kind)).sum(), exact)


def test_unknown_kl_type_is_refused():
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        kl_divergence(torch.zeros(1), torch.zeros(1), kl_type="k4")  # type: ignore[arg-type]  # what is refused


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_what_is_outside_the_mask_has_no_effect(bad: float):
    config = replace(CONFIG, reference_policy_kl_penalty=0.3)
    row = random_row(5)
    outside = row["loss_mask_T"] == 0
    poisoned = {name: torch.where(outside, bad, x) if name.endswith("s_T") else x for name, x in row.items()}
    logprobs = poisoned["logprobs_T"].clone().requires_grad_()
    loss, metrics = compute({**poisoned, "logprobs_T": logprobs}, config)
    loss.backward()
    clean_loss, clean_metrics = compute(row, config)
    assert torch.equal(loss.detach(), clean_loss)
    assert {name: float(value) for name, value in metrics.items()} == {name: float(value) for name, value in clean_metrics.items()}
    assert logprobs.grad is not None
    assert torch.equal(logprobs.grad[outside], torch.zeros(int(outside.sum())).double())


def test_nan_inside_the_mask_is_not_hidden():
    row = random_row(5)
    row["logprobs_T"][row["loss_mask_T"].argmax()] = math.nan
    assert math.isnan(compute(row, CONFIG)[0])


@pytest.mark.parametrize("token_level", [True, False])
def test_a_row_without_valid_tokens_adds_nothing(token_level: bool):
    row = random_row(0)
    row["loss_mask_T"] = torch.zeros_like(row["loss_mask_T"])
    logprobs = row["logprobs_T"].clone().requires_grad_()
    loss, metrics = compute({**row, "logprobs_T": logprobs}, replace(CONFIG, token_level_loss=token_level), 0.0, 0.0)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert logprobs.grad is not None and not logprobs.grad.any()
    assert (float(metrics["probs_ratio_min"]), float(metrics["probs_ratio_max"])) == (math.inf, -math.inf)
    assert all(float(value) == 0.0 for name, value in metrics.items() if name not in MIN_METRICS + MAX_METRICS)


def test_on_policy_metrics():
    row = random_row(0)
    row["logprobs_T"] = row["generator_logprobs_T"] = row["old_logprobs_T"]
    num_valid = float(row["loss_mask_T"].sum())
    _, sums = compute(row, CONFIG, num_valid)
    metrics = finish_metrics({name: float(value) for name, value in sums.items()}, num_valid_tokens=num_valid)
    for name in (
        "token_mult_prob_error",
        "probs_ratio",
        "probs_ratio_clamped",
        "probs_ratio_min",
        "probs_ratio_max",
        "sampling_importance_ratio",
    ):
        assert metrics[name] == pytest.approx(1.0)
    for name in ("gen_kl_error", "abs_dlogp", "clip_fraction", "bounded_fraction", "kl_penalty"):
        assert metrics[name] == 0.0
    valid = row["loss_mask_T"] > 0
    assert metrics["approx_entropy"] == pytest.approx(float(-row["old_logprobs_T"][valid].mean()))


def test_drift_metrics_by_hand():
    row = random_row(0)
    row["generator_logprobs_T"] = row["old_logprobs_T"] - torch.where(torch.arange(17) % 2 == 0, 0.5, -0.25)
    valid = row["loss_mask_T"] > 0
    drift = (row["old_logprobs_T"] - row["generator_logprobs_T"])[valid]
    _, metrics = compute(row, CONFIG)
    assert float(metrics["abs_dlogp"]) == pytest.approx(float(drift.abs().sum()))
    assert float(metrics["token_mult_prob_error"]) == pytest.approx(float(drift.abs().exp().sum()))
    assert float(metrics["gen_kl_error"]) == pytest.approx(float((drift.exp() - 1 - drift).sum()))


def test_sequence_weights_add_up_means():
    weights = sequence_mean_weights(torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 3, 5, 6]))
    assert weights.tolist() == [0.0, 0.5, 0.5, 0.0, 1.0, 0.0]


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.randoms(use_true_random=False), st.sampled_from(VARIANTS))
def test_any_split_into_rows_gives_the_same_loss_and_metrics(lengths: list[int], rng, config: LossConfig):
    whole = random_row(7, lengths)
    bounds = whole["cu_seqlens"].tolist()
    valid = [bool(whole["loss_mask_T"][start:stop].any()) for start, stop in zip(bounds, bounds[1:], strict=False)]
    counts = (float(whole["loss_mask_T"].sum()), float(sum(valid)))
    order = list(range(len(lengths)))
    rng.shuffle(order)
    cuts = sorted(rng.sample(range(len(lengths) + 1), k=min(2, len(lengths))))
    rows = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(lengths)], strict=True)]
    losses, parts = 0.0, []
    for members in rows:
        if not members:
            continue
        index = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in members])
        row = {name: x[index] for name, x in whole.items() if name != "cu_seqlens"}
        row["cu_seqlens"] = torch.tensor([0, *torch.tensor([lengths[i] for i in members]).cumsum(0).tolist()])
        loss, metrics = compute(row, config, *counts)
        losses += float(loss)
        parts.append(metrics)
    loss, metrics = compute(whole, config, *counts)
    assert losses == pytest.approx(float(loss), rel=1e-9, abs=1e-12)
    for name, value in metrics.items():
        combine = min if name in MIN_METRICS else max if name in MAX_METRICS else sum
        assert combine(float(part[name]) for part in parts) == pytest.approx(float(value), rel=1e-9, abs=1e-12), name
    assert float(metrics[LOSS]) == float(loss)


def test_tokens_outside_the_truncation_are_masked_and_counted():
    row = random_row(3)
    valid = row["loss_mask_T"] > 0
    position = int(valid.nonzero()[2])
    without = dict(row, loss_mask_T=row["loss_mask_T"].clone())
    without["loss_mask_T"][position] = 0
    count = float(valid.sum())
    expected, _ = compute(without, CONFIG, num_valid_tokens=count)
    for name in ("logprobs_T", "old_logprobs_T"):
        outside = dict(row, **{name: row[name].clone()})
        outside[name][position] = -torch.inf
        value, metrics = compute(outside, CONFIG, num_valid_tokens=count)
        assert torch.equal(value, expected)
        assert finish_metrics({key: float(number) for key, number in metrics.items()}, num_valid_tokens=count)[
            "outside_truncation_fraction"
        ] == pytest.approx(1 / count)
        assert all(torch.isfinite(number) for number in metrics.values())


def test_the_kl_penalty_compares_untruncated_logprobs():
    row = random_row(4)
    config = replace(CONFIG, reference_policy_kl_penalty=0.1)
    untruncated = row["logprobs_T"] - 0.3
    valid = row["loss_mask_T"] > 0
    _, metrics = compute(dict(row, untruncated_logprobs_T=untruncated), config)
    difference = (row["reference_logprobs_T"] - untruncated)[valid].double()
    assert float(metrics["kl_penalty"]) == pytest.approx(float((difference.exp() - difference - 1).sum()), rel=1e-5)


def test_entropy_is_averaged_over_valid_tokens():
    row = random_row(5)
    entropy = torch.linspace(0.0, 3.0, len(row["logprobs_T"]))
    value, metrics = compute(dict(row, entropy_T=entropy), CONFIG)
    assert float(metrics["entropy"]) == pytest.approx(float(entropy[row["loss_mask_T"] > 0].sum()))
    assert torch.equal(value, compute(row, CONFIG)[0])
