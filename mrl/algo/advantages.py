"""Advantages from rewards. G rollouts of one prompt, N valid rollouts of a batch, T packed tokens of a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mrl.algo.rewards import scale_reward, shaped_rewards
from mrl.types import RolloutGroup

if TYPE_CHECKING:
    from mrl.config.schema.algo import GrpoConfig

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


def batch_advantages(groups: Sequence[RolloutGroup], config: GrpoConfig) -> list[list[float]]:
    """Advantages of every group, in the order of its rollouts, by the estimator of the config; 0 for rollouts that are not valid.

    Those of reinforce_plus_plus are still to be normalised over the tokens of the batch: `normalize_over_tokens`.

    Raises:
        ValueError: gdpo, and a verdict has less than two components, or another number than there are weights.
    """
    return [advantages_G.tolist() for advantages_G in _ESTIMATORS[config.adv_estimator.name](groups, config)]


def _grpo(groups: Sequence[RolloutGroup], config: GrpoConfig) -> list[Tensor]:
    return [_against_group(group, shaped_rewards(group, config), config) for group in groups]


def _gdpo(groups: Sequence[RolloutGroup], config: GrpoConfig) -> list[Tensor]:
    """Each component of the reward against the group, weighted and added, then over the batch (arXiv:2601.05242)."""
    names = sorted({name for group in groups for verdict in group.verdicts if verdict.is_valid for name in verdict.components})
    weights = config.adv_estimator.reward_weights or [1.0] * len(names)
    for group in groups:
        for verdict in group.verdicts:
            if verdict.is_valid and (len(verdict.components) < 2 or sorted(verdict.components) != names):
                raise ValueError(
                    f"grpo.adv_estimator.name=gdpo, but a reward for {group.prompt.prompt_id} has the components "
                    f"{sorted(verdict.components)}, others {names}: all need the same two or more; use grpo for rewards without components"
                )
    if len(weights) != len(names):
        raise ValueError(
            f"grpo.adv_estimator.reward_weights={weights} has {len(weights)} numbers for the components {names} of the reward; "
            "give one for each"
        )
    totals = []
    for group in groups:
        total_G = torch.zeros(len(group.verdicts))
        for name, weight in zip(names, weights, strict=True):
            rewards = [scale_reward(verdict.components.get(name, 0.0), config.reward_scaling) for verdict in group.verdicts]
            total_G += weight * _against_group(group, rewards, config)
        totals.append(total_G)
    return _over_batch(totals, [_is_valid(group) for group in groups])


def _reinforce_plus_plus(groups: Sequence[RolloutGroup], config: GrpoConfig) -> list[Tensor]:
    """Rewards, or with `minus_baseline` their distance from the group's mean (arXiv:2501.03262, section 3)."""
    advantages = []
    for group in groups:
        rewards_G, is_valid_G = torch.tensor(shaped_rewards(group, config), dtype=torch.float64), _is_valid(group)
        if config.adv_estimator.minus_baseline:
            advantages.append(group_advantages(rewards_G, is_valid_G, normalize=False, use_leave_one_out_baseline=False))
        else:
            advantages.append(torch.where(is_valid_G, rewards_G, 0.0).float())
    return advantages


_ESTIMATORS: dict[str, Callable[[Sequence[RolloutGroup], GrpoConfig], list[Tensor]]] = {
    "grpo": _grpo,
    "gdpo": _gdpo,
    "reinforce_plus_plus": _reinforce_plus_plus,
}


def _against_group(group: RolloutGroup, rewards: Sequence[float], config: GrpoConfig) -> Tensor:
    return group_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        _is_valid(group),
        normalize=config.adv_estimator.normalize_rewards,
        use_leave_one_out_baseline=config.adv_estimator.use_leave_one_out_baseline,
    )


def _is_valid(group: RolloutGroup) -> Tensor:
    return torch.tensor([verdict.is_valid for verdict in group.verdicts])


def _over_batch(advantages: list[Tensor], is_valid: list[Tensor]) -> list[Tensor]:
    """Valid ones shifted and scaled to mean 0 and unbiased variance 1 over the batch; 0 if they are all equal."""
    flat_N = torch.cat([advantages_G[is_valid_G] for advantages_G, is_valid_G in zip(advantages, is_valid, strict=True)]).double()
    if len(flat_N) < 2 or flat_N.max() - flat_N.min() <= MIN_REWARD_SPREAD:
        return [torch.zeros_like(advantages_G) for advantages_G in advantages]
    mean, std = flat_N.mean(), flat_N.std()
    return [
        torch.where(is_valid_G, (advantages_G.double() - mean) / std, 0.0).float()
        for advantages_G, is_valid_G in zip(advantages, is_valid, strict=True)
    ]


def normalize_over_tokens(advantages: list[Tensor], masks: list[Tensor], add_over_ranks: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Advantages of rows, float32 [T] each, shifted and scaled to mean 0 and variance 1 over the valid tokens of the global batch.

    Two passes in float64; all 0 if they are equal there. `masks` [T] are 1 on valid tokens. `add_over_ranks` adds a tensor over the
    data-parallel ranks, which all call this (arXiv:2501.03262, eq. 9).
    """
    values = [advantages_T.double() for advantages_T in advantages]
    device = values[0].device if values else None

    def total(parts: list[Tensor]) -> Tensor:
        return add_over_ranks(torch.stack([torch.zeros((), dtype=torch.float64, device=device), *parts]).sum())

    count = total([mask_T.sum().double() for mask_T in masks]).clamp(min=1.0)
    mean = total([values_T[mask_T > 0].sum() for values_T, mask_T in zip(values, masks, strict=True)]) / count
    variance = total([(values_T - mean)[mask_T > 0].square().sum() for values_T, mask_T in zip(values, masks, strict=True)]) / count
    scale = 0.0 if float(variance) <= MIN_REWARD_SPREAD**2 else variance.rsqrt()
    return [torch.where(mask_T > 0, (values_T - mean) * scale, 0.0).float() for values_T, mask_T in zip(values, masks, strict=True)]
