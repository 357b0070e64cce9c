"""Numbers of a step's rollouts, from what the driver knows of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mrl.types import RolloutGroup


def rollout_metrics(groups: Sequence[RolloutGroup], *, seconds: float, num_engine_restarts: int) -> dict[str, float]:
    """Rewards over valid rollouts, lengths and rates. `seconds` is the time that generation took, restarts count since the run's start."""
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = np.array([verdict.reward for verdict in verdicts if verdict.is_valid] or [0.0])
    lengths = np.array([rollout.length for rollout in rollouts])
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
    }


def validation_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Mean reward over held-out rollouts; an invalid rollout counts as wrong, and is counted."""
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    return {
        "val/accuracy": float(np.mean([verdict.reward if verdict.is_valid else 0.0 for verdict in verdicts])),
        "val/mean_length": float(np.mean([rollout.length for group in groups for rollout in group.rollouts])),
        "val/failed": float(sum(not verdict.is_valid for verdict in verdicts)),
        "val/num_samples": float(len(verdicts)),
    }
