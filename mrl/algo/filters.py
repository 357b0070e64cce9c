"""Which groups of rollouts are worth training on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mrl.algo.rewards import scaled_rewards

if TYPE_CHECKING:
    from mrl.config.schema.algo import GrpoConfig
    from mrl.types import RolloutGroup


def has_signal(group: RolloutGroup, config: GrpoConfig) -> bool:
    """Whether the rollouts of a group differ in what the task is worth: their rewards, as float32, after scaling, before shaping by length.

    Without such a difference every advantage is 0, or comes from lengths alone (dynamic sampling, arXiv:2503.14476).
    """
    rewards = [reward for reward, verdict in zip(scaled_rewards(group, config), group.verdicts, strict=True) if verdict.has_reward]
    return len(torch.tensor(rewards, dtype=torch.float32).unique()) > 1
