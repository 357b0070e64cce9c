"""Metrics of a step's rollouts and of its updates, from what the driver knows of them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from mrl.algo.evaluation import mean_pass_at_k
from mrl.algo.rewards import shaped_rewards_of
from mrl.config.schema.algo import GrpoConfig
from mrl.types import RolloutGroup

logger = logging.getLogger(__name__)


def rollout_metrics(groups: Sequence[RolloutGroup], grpo: GrpoConfig, *, seconds: float, num_engine_restarts: int) -> dict[str, float]:
    """Rewards (scaled and shaped, of rollouts that have one), lengths and rates of a step.

    `seconds` is the time that generation took; restarts count from the run's start.
    """
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = np.array(shaped_rewards_of(groups, grpo) or [0.0])
    lengths = np.array([rollout.num_generated for rollout in rollouts])
    return {
        "train/reward": float(rewards.mean()),
        "train/reward_std": float(rewards.std()),
        "train/reward_min": float(rewards.min()),
        "train/reward_max": float(rewards.max()),
        "rollout/mean_length": float(lengths.mean()),
        "rollout/max_length": float(lengths.max()),
        "rollout/mean_prompt_length": float(np.mean([rollout.prompt_length for rollout in rollouts])),
        "rollout/truncated_fraction": float(np.mean([rollout.finish_reason == "length" for rollout in rollouts])),
        "rollout/failed": float(sum(not verdict.is_valid for verdict in verdicts)),
        "rollout/groups_without_signal": float(sum(len(set(group.rewards)) == 1 for group in groups)),
        "rollout/engine_restarts": float(num_engine_restarts),
        "rollout/tokens_per_s": float(lengths.sum() / seconds),
        **environment_metrics(groups, stage="rollout"),
    }


def environment_metrics(groups: Sequence[RolloutGroup], *, stage: Literal["rollout", "val"]) -> dict[str, float]:
    """Per environment, as `<stage>/<environment>/*`: mean reward and turns, and counts of failed and flagged rollouts, by kind."""
    metrics: dict[str, float] = {}
    for name in sorted({group.prompt.env_name for group in groups}):
        mine = [group for group in groups if group.prompt.env_name == name]
        verdicts = [verdict for group in mine for verdict in group.verdicts]
        judged = [verdict for verdict in verdicts if verdict.has_reward]
        counts = Counter(verdict.status for verdict in verdicts if not verdict.is_valid)
        counts.update(flag for verdict in verdicts for flag in verdict.flags)
        values = {
            "reward": float(np.mean([verdict.reward for verdict in judged])) if judged else 0.0,
            "num_rollouts": float(len(verdicts)),
            "turns": float(np.mean([rollout.num_turns for group in mine for rollout in group.rollouts])),
            "failed": float(sum(not verdict.is_valid for verdict in verdicts)),
        }
        values |= {kind: float(count) for kind, count in counts.items()}
        for part in sorted({part for verdict in judged for part in verdict.components}):
            values[f"reward_{part}"] = float(np.mean([verdict.components.get(part, 0.0) for verdict in judged]))
        metrics |= {f"{stage}/{name}/{quantity}": value for quantity, value in values.items()}
    return metrics


def validation_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Mean reward over held-out rollouts, and pass@k. A rollout without a reward counts as wrong, and as failed."""
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    solved = [[verdict.has_reward and verdict.reward > 0 for verdict in group.verdicts] for group in groups]
    num_rollouts = min(map(len, solved))
    fewer = (2**power for power in range(num_rollouts.bit_length()) if 2**power < num_rollouts)
    return {
        "val/accuracy": float(np.mean([verdict.reward if verdict.has_reward else 0.0 for verdict in verdicts])),
        "val/mean_length": float(np.mean([rollout.num_generated for group in groups for rollout in group.rollouts])),
        "val/failed": float(sum(not verdict.is_valid for verdict in verdicts)),
        "val/num_samples": float(len(verdicts)),
        **{f"val/pass_at_{k}": mean_pass_at_k(solved, k) for k in fewer},
        **({"val/pass_k": mean_pass_at_k(solved, num_rollouts)} if num_rollouts > 1 else {}),
        **environment_metrics(groups, stage="val"),
    }


def metrics_of_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a step from those of its updates: sums of counts (`num_...`), extremes of extremes, means of all others."""
    return {name: _of_updates(name, [update[name] for update in updates]) for name in updates[0]}


def warn_of_bounded_ratios(metrics: Mapping[str, float]) -> None:
    """Warns if the loss has bounded ratios or correction weights of a step."""
    share = metrics.get("train/bounded_fraction", 0.0)
    if share > 0:
        logger.warning(
            "train/bounded_fraction is %.3g: that share of the tokens has a log-ratio beyond loss_fn.max_log_ratio, or one that overflows, "
            "and no gradient by it. Policy and generator, or policy and old policy, are far apart: look at train/token_mult_prob_error and "
            "train/probs_ratio_max, lower the learning rate or the number of updates a step",
            share,
        )


def _of_updates(name: str, values: Sequence[float]) -> float:
    words = name.rpartition("/")[2].split("_")
    if words[0] == "num":
        return sum(values)
    if "min" in words:
        return min(values)
    return max(values) if "max" in words else sum(values) / len(values)


def is_good_enough(grpo: GrpoConfig, metrics: Mapping[str, float]) -> bool:
    """Whether a validation among the metrics reached `grpo.stop_at_validation_threshold`; logs it.

    Raises:
        ValueError: a validation lacks `grpo.stop_at_validation_metric`.
    """
    name, threshold = grpo.stop_at_validation_metric, grpo.stop_at_validation_threshold
    measured = {key.removeprefix("val/"): value for key, value in metrics.items() if key.startswith("val/")}
    if name is None or threshold is None or not measured:
        return False
    if name not in measured:
        raise ValueError(f"grpo.stop_at_validation_metric={name}: no metric of validations; use one of {', '.join(sorted(measured))}")
    if measured[name] >= threshold:
        logger.info("Validation %s of %.4f has reached grpo.stop_at_validation_threshold=%g", name, measured[name], threshold)
    return measured[name] >= threshold
