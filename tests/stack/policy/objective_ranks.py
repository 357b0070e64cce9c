# SPDX-License-Identifier: Apache-2.0
"""Rank functions of tests/stack/policy/test_objectives.py: steps of every objective, from the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mrl.config.schema.run import RunConfig
from tests.stack.policy import policy_ranks
from tests.stack.ranks import Rank

if TYPE_CHECKING:
    from mrl.policy.policy import PolicyRank

OBJECTIVES: dict[str, tuple[str, ...]] = {
    "gspo": (
        "loss_fn.sequence_level_importance_ratios=true",
        "loss_fn.token_level_loss=false",
        "loss_fn.truncated_importance_sampling_ratio=2.0",
    ),
    "dr grpo": ("loss_fn.token_level_loss=false", "loss_fn.constant_length_normalizer=16"),
    "cispo": ("loss_fn.use_cispo=true", "loss_fn.reference_policy_kl_penalty=0.05"),
    "on policy": ("loss_fn.force_on_policy_ratio=true",),
    "dapo": ("loss_fn.ratio_clip_max=0.28", "grpo.seq_logprob_error_threshold=1.28", "grpo.advantage_clip_low=-0.5"),
    "reinforce++": (
        "grpo.adv_estimator.name=reinforce_plus_plus",
        "loss_fn.use_kl_in_reward=true",
        "loss_fn.reference_policy_kl_penalty=0.05",
    ),
}
"""Overrides by name."""


def run_configs(
    folder: Path, layout: str, objectives: Mapping[str, tuple[str, ...]] = OBJECTIVES
) -> dict[str, RunConfig]:
    """The config of each objective at a layout."""
    return {name: policy_ranks.run_config(folder, layout, *overrides) for name, overrides in objectives.items()}


# What follows runs on a rank.


def steps_of_objectives(
    rank: Rank, configs: Mapping[str, RunConfig], num_steps: int, algorithm: str
) -> dict[str, list[dict[str, float]]]:
    """Metrics of steps with made-up old logprobs, by objective; the rows are packed by `algorithm`."""
    metrics: dict[str, list[dict[str, float]]] = {}
    with policy_ranks.open_policy(rank, next(iter(configs.values()))) as policy:
        for name, config in configs.items():
            # The layout is the same, and with it all that was built.
            policy._config, policy._section = config, config.policy
            policy.load_hf(config.policy.model_name)
            forget_steps(policy)
            metrics[name] = []
            for _ in range(num_steps):
                policy.enter("logprob")
                policy_ranks.set_batch(policy, algorithm)
                if config.keeps_reference:
                    policy.compute_reference_logprobs()
                if config.needs_old_logprobs:
                    policy_ranks.set_old_logprobs(policy)
                policy.enter("train")
                metrics[name].append(policy.train_step())
    return metrics


def forget_steps(policy: PolicyRank) -> None:
    """Brings the optimizers to where they are before the first step."""
    for optimizer in policy_ranks.optimizers(policy):
        optimizer.optimizer.state.clear()
        for group in optimizer.optimizer.param_groups:
            group.pop("step", None)
