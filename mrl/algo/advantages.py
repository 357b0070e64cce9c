# SPDX-License-Identifier: Apache-2.0
"""Advantages from rewards, and judged rollouts as sequences to train on.

G rollouts of one prompt, N valid rollouts of a batch, T packed tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from mrl.algo.rewards import num_out_of_range, shaped, shaped_rewards, shaped_rewards_of
from mrl.config.own import ESTIMATOR, find_fitting
from mrl.types import FixedAdvantage, FlawKind, RolloutGroup, RolloutInfo, TrainSequence, Verdict

if TYPE_CHECKING:
    from mrl.config.schema.algo import GrpoConfig

# NeMo RL adds this to the standard deviation: rewards that are 1e-8 apart differ, and give small advantages.
STD_EPSILON = 1e-6
MIN_VARIANCE = 1e-8
# Sums of advantages in float64 that are closer than this are equal and differ by rounding.
ROUNDING = 1e-12


def train_sequences(
    groups: Sequence[RolloutGroup], config: GrpoConfig, *, compares_rollouts: bool = True
) -> tuple[list[TrainSequence], dict[str, float]]:
    """Every rollout of a step as a sequence to train on, in the order of the groups; and metrics of rewards and masks.

    Further sequences of an agent's rollout follow the first one, and share its advantage. Advantages are 0 where
    rollouts are not compared, until a critic or a teacher has judged the tokens, and for rollouts that do not count.
    What needs logprobs comes later: see `mrl.algo.token_advantages`.
    """
    # Malformed thinking first, so that in a turn with both flaws the invalid tool call wins.
    fixed: dict[FlawKind, float | None] = {
        "malformed_thinking": config.malformed_thinking_advantage,
        "invalid_tool_call": config.invalid_tool_call_advantage,
    }
    advantage_of: dict[FlawKind, float] = {
        kind: advantage for kind, advantage in fixed.items() if advantage is not None
    }
    sequences, judged, num_overlong = list[TrainSequence](), list[tuple[RolloutInfo, Verdict]](), 0
    by_group = (
        batch_advantages(groups, config) if compares_rollouts else [[0.0] * len(group.rollouts) for group in groups]
    )
    for group, advantages in zip(groups, by_group, strict=True):
        rewards = shaped_rewards(group, config)
        for rollout, verdict, reward, advantage in zip(
            group.rollouts, group.verdicts, rewards, advantages, strict=True
        ):
            judged.append((rollout, verdict))
            is_overlong = config.overlong_filtering and rollout.finish_reason == "length"
            num_overlong += verdict.is_valid and is_overlong
            if verdict.is_valid and not is_overlong:
                flaws = [
                    (flaw, value) for kind, value in advantage_of.items() for flaw in verdict.flaws if flaw.kind == kind
                ]
                for place, sequence in enumerate(rollout.sequences):
                    own = tuple(
                        FixedAdvantage(flaw.start, flaw.stop, value) for flaw, value in flaws if flaw.sequence == place
                    )
                    sequences.append(TrainSequence(sequence, advantage, True, reward, own))
            else:
                sequences += [TrainSequence(sequence, 0.0, False, reward, ()) for sequence in rollout.sequences]
    metrics = {}
    if config.use_dynamic_sampling:
        shaped = shaped_rewards_of(groups, config)
        metrics["train/filtered_reward"] = sum(shaped) / max(1, len(shaped))
    if config.overlong_filtering:
        metrics["train/num_overlong_filtered"] = float(num_overlong)
    if config.reward_scaling.enabled:
        metrics["train/num_rewards_out_of_range"] = float(
            sum(num_out_of_range(group, config.reward_scaling) for group in groups)
        )
    return sequences, metrics | (_flaw_metrics(judged, advantage_of) if advantage_of else {})


def _flaw_metrics(
    judged: Sequence[tuple[RolloutInfo, Verdict]], advantage_of: dict[FlawKind, float]
) -> dict[str, float]:
    num_invalid = num_malformed = 0
    for _, verdict in judged:
        spans = [
            (flaw.kind, (flaw.sequence, flaw.start, flaw.stop)) for flaw in verdict.flaws if flaw.kind in advantage_of
        ]
        invalid = {span for kind, span in spans if kind == "invalid_tool_call"}
        num_invalid += len(invalid)
        num_malformed += len({span for kind, span in spans if kind == "malformed_thinking"} - invalid)
    num_turns = sum(rollout.num_turns for rollout, _ in judged)
    return {
        "train/num_invalid_tool_calls": float(num_invalid),
        "train/invalid_tool_call_rate": num_invalid / max(1, num_turns),
        "train/num_malformed_thinking": float(num_malformed),
        "train/malformed_thinking_rate": num_malformed / max(1, num_turns),
        "train/num_assistant_messages": float(num_turns),
    }


def group_advantages(
    rewards_G: Tensor,
    has_reward_G: Tensor | None = None,
    *,
    normalize: bool,
    use_leave_one_out_baseline: bool = True,
    normalize_by_whole_group: bool = False,
) -> Tensor:
    """Advantage of each rollout against the others of its prompt, shape [G], float64, from rewards rounded to float32.

    The baseline of rollout i is the mean of the other rewards (leave-one-out, arXiv:2402.14740), or the mean of all.
    `normalize` divides by the unbiased standard deviation of the rewards in the baseline, plus STD_EPSILON, unless it
    is 0, as NeMo RL does. `normalize_by_whole_group` divides by that of all rewards, without epsilon: no advantage
    exceeds sqrt(G). A group of equal rewards gives zeros. Rollouts without a reward take no part and get 0, as does the
    only one that has a reward.
    """
    if len(rewards_G) < 2:
        raise ValueError(
            f"a group of {len(rewards_G)} rollout has no baseline; set grpo.num_generations_per_prompt to 2 or more"
        )
    advantages_G = torch.zeros(len(rewards_G), dtype=torch.float64)
    has_reward_G = torch.ones(len(rewards_G), dtype=torch.bool) if has_reward_G is None else has_reward_G
    # float64 sums of this many float32 numbers are exact, so equal rewards deviate by exactly 0 from their mean.
    rewards_N = rewards_G[has_reward_G].float().double()
    count = len(rewards_N)
    if count < 2:
        return advantages_G
    whole_NN = rewards_N.expand(count, count)
    compared = whole_NN[~torch.eye(count, dtype=torch.bool)].view(count, -1) if use_leave_one_out_baseline else whole_NN
    advantages_N = rewards_N - compared.mean(dim=1)
    if normalize:
        std_N, epsilon = (_std(whole_NN), 0.0) if normalize_by_whole_group else (_std(compared), STD_EPSILON)
        advantages_N = torch.where(std_N > 0, advantages_N / (std_N + epsilon), advantages_N)
    advantages_G[has_reward_G] = advantages_N
    return advantages_G


def _std(values: Tensor) -> Tensor:
    deviations = values - values.mean(dim=-1, keepdim=True)
    return (deviations.square().sum(dim=-1) / max(1, values.shape[-1] - 1)).sqrt()


def batch_advantages(groups: Sequence[RolloutGroup], config: GrpoConfig) -> list[list[float]]:
    """Advantages of each group of a step, in rollout order, by the config's estimator; 0 for those without a reward."""
    match config.adv_estimator.name:
        case "grpo" | "opd":
            advantages = [_against_group(group, shaped_rewards(group, config), config) for group in groups]
        case "gdpo":
            advantages = _gdpo(groups, config)
        case "reinforce_plus_plus":
            advantages = _reinforce_plus_plus(groups, config)
        case path:
            return _by_own_estimator(path, groups, config)
    return [advantages_G.tolist() for advantages_G in advantages]


def _by_own_estimator(path: str, groups: Sequence[RolloutGroup], config: GrpoConfig) -> list[list[float]]:
    estimator, rows = find_fitting(path, ESTIMATOR), list[list[float]]()
    returned = estimator(rewards=[shaped_rewards(group, config) for group in groups], groups=groups)
    with suppress(TypeError, ValueError):
        rows = [[float(value) for value in row] for row in cast("Sequence[Sequence[float]]", returned)]
    are_finite = all(math.isfinite(value) for row in rows for value in row)
    if [len(row) for row in rows] != [len(group.rollouts) for group in groups] or not are_finite:
        sizes = sorted({len(group.rollouts) for group in groups})
        raise ValueError(
            f"grpo.adv_estimator.name={path} returned {returned!r:.200}; return a list for each of the "
            f"{len(groups)} groups, with a finite number for each of its rollouts ({', '.join(map(str, sizes))})"
        )
    return rows


def _gdpo(groups: Sequence[RolloutGroup], config: GrpoConfig) -> list[Tensor]:
    """Each component of the reward against the group, weighted and added, then over the batch (arXiv:2601.05242)."""
    names = sorted(
        {name for group in groups for verdict in group.verdicts if verdict.has_reward for name in verdict.components}
    )
    weights = config.adv_estimator.reward_weights or [1.0] * len(names)
    for group in groups:
        for verdict in group.verdicts:
            if verdict.has_reward and (len(verdict.components) < 2 or sorted(verdict.components) != names):
                raise ValueError(
                    f"grpo.adv_estimator.name=gdpo, but a reward for {group.prompt.prompt_id} has the components "
                    f"{sorted(verdict.components)}, others {names}: all need the same two or more; use grpo for "
                    "rewards without components"
                )
    if len(weights) != len(names):
        raise ValueError(
            f"grpo.adv_estimator.reward_weights={weights} has {len(weights)} numbers for the components {names} of "
            "the reward; give one for each"
        )
    totals = []
    for group in groups:
        total_G = torch.zeros(len(group.verdicts), dtype=torch.float64)
        verdicts = shaped(group, config)
        for name, weight in zip(names, weights, strict=True):
            rewards = [verdict.components.get(name, 0.0) for verdict in verdicts]
            total_G += weight * _against_group(group, rewards, config)
        totals.append(total_G)
    has_reward = [_has_reward(group) for group in groups]
    flat_N = torch.cat([total_G[has_reward_G] for total_G, has_reward_G in zip(totals, has_reward, strict=True)])
    if len(flat_N) < 2 or flat_N.max() - flat_N.min() <= ROUNDING:
        return [torch.zeros_like(total_G) for total_G in totals]
    mean, std = flat_N.mean(), flat_N.std()
    return [
        torch.where(has_reward_G, (total_G - mean) / std, 0.0)
        for total_G, has_reward_G in zip(totals, has_reward, strict=True)
    ]


def _reinforce_plus_plus(groups: Sequence[RolloutGroup], config: GrpoConfig) -> list[Tensor]:
    """Rewards, or with `minus_baseline` their distance from the group's mean (arXiv:2501.03262, section 3)."""
    advantages = []
    for group in groups:
        rewards_G, has_reward_G = torch.tensor(shaped_rewards(group, config), dtype=torch.float64), _has_reward(group)
        if config.adv_estimator.minus_baseline:
            advantages.append(
                group_advantages(rewards_G, has_reward_G, normalize=False, use_leave_one_out_baseline=False)
            )
        else:
            advantages.append(torch.where(has_reward_G, rewards_G, 0.0))
    return advantages


def _against_group(group: RolloutGroup, rewards: Sequence[float], config: GrpoConfig) -> Tensor:
    return group_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        _has_reward(group),
        normalize=config.adv_estimator.normalize_rewards,
        use_leave_one_out_baseline=config.adv_estimator.use_leave_one_out_baseline,
        normalize_by_whole_group=config.adv_estimator.normalize_by_whole_group,
    )


def _has_reward(group: RolloutGroup) -> Tensor:
    return torch.tensor([verdict.has_reward for verdict in group.verdicts])


def normalize_over_tokens(
    advantages: list[Tensor],
    masks: list[Tensor],
    add_over_ranks: Callable[[Tensor], Tensor],
    *,
    added_to_variance: float | None = None,
) -> list[Tensor]:
    """Advantages of rows, float32 [T] each, shifted and scaled to mean 0 and variance 1 over valid tokens of a step.

    Two passes in float64; the variance is at least MIN_VARIANCE, or with `added_to_variance` unbiased and that much
    larger. `masks` [T] are 1 on valid tokens. `add_over_ranks` adds a tensor over the data-parallel ranks, which all
    call this (arXiv:2501.03262, eq. 9).
    """
    values = [advantages_T.double() for advantages_T in advantages]
    device = values[0].device if values else None

    def total(parts: list[Tensor]) -> Tensor:
        return add_over_ranks(torch.stack([torch.zeros((), dtype=torch.float64, device=device), *parts]).sum())

    count = total([mask_T.sum().double() for mask_T in masks]).clamp(min=1.0)
    mean = total([values_T[mask_T > 0].sum() for values_T, mask_T in zip(values, masks, strict=True)]) / count
    squares = total(
        [(values_T - mean)[mask_T > 0].square().sum() for values_T, mask_T in zip(values, masks, strict=True)]
    )
    if added_to_variance is None:
        scale = (squares / count).clamp(min=MIN_VARIANCE).rsqrt()
    else:
        scale = (squares / (count - 1.0).clamp(min=1.0) + added_to_variance).rsqrt()
    return [
        torch.where(mask_T > 0, (values_T - mean) * scale, 0.0).float()
        for values_T, mask_T in zip(values, masks, strict=True)
    ]
