"""Advantages from the rewards of a group. G rollouts of one prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mrl.types import RolloutGroup

# Rewards are fractions and sums of fractions; closer than this they are equal and differ by rounding.
MIN_REWARD_SPREAD = 1e-6


def group_advantages(
    rewards_G: Tensor, is_valid_G: Tensor | None = None, *, normalize: bool, use_leave_one_out_baseline: bool = True
) -> Tensor:
    """Advantage of each rollout against the others of its prompt, shape [G], float32.

    The baseline of rollout i is the mean of the other rewards (leave-one-out, arXiv:2402.14740), or the mean of all.
    With `normalize`, divides by the unbiased standard deviation of the group, in float64 and two passes: no advantage exceeds sqrt(G).
    A group of equal rewards gives zeros. Rollouts that are not valid take no part and get 0, as does a single valid one.

    Raises:
        ValueError: G < 2, which leaves no baseline.
    """
    if len(rewards_G) < 2:
        raise ValueError(f"a group of {len(rewards_G)} rollout has no baseline; set grpo.num_generations_per_prompt to 2 or more")
    advantages_G = torch.zeros(len(rewards_G), dtype=torch.float32)
    is_valid_G = torch.ones(len(rewards_G), dtype=torch.bool) if is_valid_G is None else is_valid_G
    rewards = rewards_G[is_valid_G].double()
    if len(rewards) < 2 or rewards.max() - rewards.min() <= MIN_REWARD_SPREAD:
        return advantages_G
    num_valid = len(rewards)
    deviations = rewards - rewards.mean()
    # r_i minus the mean of the others is the deviation from the mean of all, times n / (n - 1).
    advantages = deviations * (num_valid / (num_valid - 1)) if use_leave_one_out_baseline else deviations
    if normalize:
        advantages = advantages / (deviations.square().sum() / (num_valid - 1)).sqrt()
    advantages_G[is_valid_G] = advantages.float()
    return advantages_G


def batch_advantages(groups: Sequence[RolloutGroup], *, normalize: bool, use_leave_one_out_baseline: bool) -> list[list[float]]:
    """`group_advantages` of every group, as lists in the order of the rollouts."""
    return [
        group_advantages(
            torch.tensor(group.rewards, dtype=torch.float64),
            torch.tensor([verdict.is_valid for verdict in group.verdicts]),
            normalize=normalize,
            use_leave_one_out_baseline=use_leave_one_out_baseline,
        ).tolist()
        for group in groups
    ]
