# SPDX-License-Identifier: Apache-2.0
"""Comparisons with NeMo RL: what scripts/record_nemo_rl.py records and tests/unit/algo/test_nemo_rl.py compares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from mrl.config.schema.algo import (
    AdvantageEstimatorConfig,
    Estimator,
    GrpoConfig,
    LossConfig,
    RewardScalingConfig,
    RewardShapingConfig,
)
from mrl.config.schema.ppo import GaeConfig, ValueLossConfig
from tests.sources import ROOT

ANSWERS = ROOT / "tests" / "data" / "nemo_rl" / "answers.json"
PROMPT = 2
"""Tokens of a rollout's prompt."""
Batch = dict[str, Tensor]
Divergence = Literal["forward", "reverse", "mixed"]


@dataclass(frozen=True)
class Case:
    """A comparison on random batches."""

    name: str
    answer: str
    """Function of the script that asks NeMo RL, and of the test that asks mrl."""
    batch: str
    """Function that makes the batches, and which kind of them."""
    configs: tuple
    deviation: str | None = None
    """The row of docs/algorithms.md that tells why ours differs; None where it must not."""
    but: tuple[str, ...] = ()
    """First letters of metrics that are left out."""


def _cases() -> Iterator[Case]:
    yield from _losses()
    yield from _advantages()
    yield from _ppo()
    divergences: list[tuple[Divergence, float]] = [
        ("forward", 0.5),
        ("reverse", 0.5),
        ("mixed", 0.3),
        ("mixed", 1.0),
        ("mixed", 0.0),
    ]
    for kind, weight in divergences:
        for is_whole in (False, True):
            config = LossConfig(kl_type=kind, mixed_kl_weight=weight, zero_outside_topk=is_whole)
            for batch, is_parallel in (
                ("", False),
                *((("", True), ("one", False), ("all", False)) if weight == 0.3 else ()),
            ):
                name = (
                    f"distillation, {kind} {weight}{', whole vocabulary' * is_whole}; {batch or 'any'} "
                    f"k{', parallel' * is_parallel}"
                )
                yield Case(name, "distillation", f"logit_batch:{batch}", (config, is_parallel))


def _losses() -> Iterator[Case]:
    def bounds(kind: str, low: float | None, high: float) -> dict[str, object]:
        prefix = "truncated_importance_sampling"
        return {f"{prefix}_type": kind, f"{prefix}_ratio_min": low, f"{prefix}_ratio": high}

    off, corrected = (
        dict(reference_policy_kl_penalty=0.0),
        dict(reference_policy_kl_penalty=0.0, use_importance_sampling_correction=True),
    )
    sequences, kl = off | dict(token_level_loss=False), dict(reference_policy_kl_penalty=0.1)
    gspo = sequences | dict(sequence_level_importance_ratios=True, ratio_clip_min=3e-3, ratio_clip_max=4e-3)
    corrected_gspo = gspo | corrected
    table: dict[str, dict] = {
        "GRPO clip": off,
        "GRPO clip, mean over sequences": sequences,
        "DAPO clip": off | dict(ratio_clip_max=0.28),
        "dual clip": off | dict(ratio_clip_c=3.0),
        "GSPO": gspo,
        "CISPO": off | dict(use_cispo=True, ratio_clip_max=5.0),
        "REINFORCE": off | dict(disable_ppo_ratio=True),
        "REINFORCE, mean over sequences": sequences | dict(disable_ppo_ratio=True),
        "force_on_policy_ratio": corrected | dict(force_on_policy_ratio=True),
        "force_on_policy_ratio, GSPO": gspo | dict(force_on_policy_ratio=True),
        "force_on_policy_ratio, REINFORCE": corrected | dict(force_on_policy_ratio=True, disable_ppo_ratio=True),
        "importance sampling correction": corrected,
        "correction of sequences": corrected_gspo,
        "TIS": corrected | bounds("tis", None, 2.0),
        "TIS, both bounds": corrected | bounds("tis", 0.5, 1.5),
        "TIS of sequences": corrected_gspo | bounds("tis", None, 2.0),
        "IcePop": corrected | bounds("icepop", 0.5, 1.5),
        "IcePop of sequences": corrected_gspo | bounds("icepop", 0.5, 1.5),
        "seq-mask-TIS": corrected | bounds("seq-mask-tis", 0.9, 1.1),
        "KL k1": kl | dict(reference_policy_kl_type="k1"),
        "KL k2": kl | dict(reference_policy_kl_type="k2"),
        "KL k3": kl,
        "KL k3, mean over sequences": kl | dict(token_level_loss=False),
        "KL k3, clamps that hold": kl | dict(kl_input_clamp_value=0.5, kl_output_clamp_value=0.05),
        "KL k1, no clamps": kl
        | dict(reference_policy_kl_type="k1", kl_input_clamp_value=None, kl_output_clamp_value=None),
        "KL k2, on-policy approximation": kl | dict(reference_policy_kl_type="k2", use_on_policy_kl_approximation=True),
        "KL k3, on-policy approximation": kl | dict(use_on_policy_kl_approximation=True),
        "KL in reward": kl | dict(use_kl_in_reward=True),
        "positive NLL": off | dict(positive_example_nll_weight=0.3),
    }
    losses = {name: LossConfig(**settings) for name, settings in table.items()}
    # Metrics of log-ratios of 1000 are infinite, or their difference is.
    infinite = ("gen_kl", "policy_kl", "js_", "token_mult", "sampling_importance_ratio", "approx_entropy")
    for name, loss in losses.items():
        but = ("probs_ratio",) * loss.disable_ppo_ratio + (
            "sampling_importance_ratio",
        ) * loss.sequence_level_importance_ratios
        yield Case(name, "policy_loss", "token_batch:", (loss,), but=but)
        if name in ("GRPO clip", "GSPO", "CISPO", "KL k3", "KL k3, on-policy approximation"):
            yield Case(
                f"{name}; far policy",
                "policy_loss",
                "token_batch:far policy",
                (loss,),
                but=("js_divergence", *infinite[4:5]),
            )
        if name in (
            "importance sampling correction",
            "correction of sequences",
            "TIS",
            "TIS of sequences",
            "IcePop",
            "seq-mask-TIS",
        ):
            yield Case(f"{name}; weights that overflow", "policy_loss", "token_batch:far", (loss,), but=infinite)
    yield Case("GRPO clip; an empty response", "policy_loss", "token_batch:empty", (losses["GRPO clip"],))
    for name, batch, deviation in (
        ("GRPO clip, mean over sequences", "token_batch:empty", "Mean over sequences"),
        ("REINFORCE", "token_batch:", "`train/probs_ratio*`"),
        ("correction of sequences", "token_batch:", "`train/sampling_importance_ratio`"),
    ):
        yield Case(f"{name}; {deviation}", "policy_loss", batch, (losses[name],), deviation)
    for threshold in (None, 1.5):
        config = GrpoConfig(seq_logprob_error_threshold=threshold)
        yield Case(f"errors of sequences, threshold {threshold}", "errors", "token_batch:drifting", (config,))


def _advantages() -> Iterator[Case]:
    def grpo(
        name: Estimator, *, leave_one_out: bool = True, weights: list[float] | None = None, **rest: bool
    ) -> GrpoConfig:
        named = dict(use_leave_one_out_baseline=leave_one_out, reward_weights=weights)
        return GrpoConfig(adv_estimator=AdvantageEstimatorConfig(name, **{"normalize_rewards": True, **named, **rest}))

    bounded, plain = dict(advantage_clip_low=-0.5, advantage_clip_high=1.5), LossConfig()
    fixed = dict(invalid_tool_call_advantage=-5.0, malformed_thinking_advantage=-0.3)
    table = {
        "GRPO, leave one out, std": grpo("grpo"),
        "GRPO, leave one out (RLOO)": grpo("grpo", normalize_rewards=False),
        "GRPO, group mean, std": grpo("grpo", leave_one_out=False),
        "GRPO, group mean (Dr. GRPO)": grpo("grpo", leave_one_out=False, normalize_rewards=False),
        "REINFORCE++": grpo("reinforce_plus_plus", minus_baseline=False),
        "REINFORCE++, minus baseline": grpo("reinforce_plus_plus"),
        "GDPO, leave one out, std": grpo("gdpo"),
        "GDPO, group mean, weights": grpo("gdpo", leave_one_out=False, weights=[2.0, 0.5]),
        "On-policy distillation": grpo("opd"),
    }
    for name, estimator in table.items():
        for suffix, more in (
            ("", {}),
            ("; overlong filtering", dict(overlong_filtering=True)),
            ("; clipped", bounded),
            ("; fixed, then clipped", bounded | fixed),
        ):
            yield Case(name + suffix, "advantages", "rollout_batch:", (replace(estimator, **more), plain))
    kl = LossConfig(use_kl_in_reward=True, reference_policy_kl_penalty=0.1)
    yield Case("REINFORCE++, KL in reward", "advantages", "rollout_batch:", (grpo("reinforce_plus_plus"), kl))
    # In float32, as their runs compute it.
    yield Case(
        "GRPO, one reward differs", "advantages", "rollout_batch:spike", (grpo("grpo"), plain), "Variance of rewards"
    )
    scaled = RewardScalingConfig(enabled=True, source_min=-1.0, source_max=1.0, target_min=0.5, target_max=2.0)
    overlong = RewardShapingConfig(
        enabled=True, overlong_buffer_length=2, overlong_buffer_penalty=0.7, max_response_length=5
    )
    stopped = RewardShapingConfig(enabled=True, stop_properly_penalty_coef=0.3)
    for name, config in (
        ("scaled rewards", GrpoConfig(reward_scaling=scaled)),
        ("overlong penalty", GrpoConfig(reward_shaping=overlong)),
        ("overlong penalty of scaled rewards", GrpoConfig(reward_scaling=scaled, reward_shaping=overlong)),
        ("stop-properly penalty", GrpoConfig(reward_shaping=stopped)),
    ):
        yield Case(name, "rewards", "rollout_batch:", (config,))


def _ppo() -> Iterator[Case]:
    for name, config in {
        "GAE": GaeConfig(gae_gamma=0.97),
        "GAE, not normalised": GaeConfig(gae_lambda=0.8, gae_gamma=0.9, normalize_advantages=False),
        "GAE, lambda 1": GaeConfig(gae_lambda=1.0),
        "GAE, lambdas of their own": GaeConfig(gae_lambda_value=1.0, gae_lambda_policy=0.9),
        "GAE, lambda by length": GaeConfig(gae_lambda_value=1.0, length_adaptive_alpha=0.4),
    }.items():
        yield Case(name, "gae", "token_batch:", (config, LossConfig()))
    kl = LossConfig(use_kl_in_reward=True, reference_policy_kl_penalty=0.1)
    yield Case("GAE, KL in reward", "gae", "token_batch:", (GaeConfig(gae_gamma=0.97), kl))
    yield Case("value loss", "value_loss", "token_batch:", (ValueLossConfig(),))
    yield Case("value loss, clipped", "value_loss", "token_batch:", (ValueLossConfig(scale=0.4, cliprange=0.2),))


CASES = list(_cases())
