# SPDX-License-Identifier: Apache-2.0
"""Rewards of the algorithm: the environments' rewards scaled, then shaped; and the groups that have a signal."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mrl.types import PENALTIES

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from mrl.config.schema.algo import GrpoConfig, RewardScalingConfig, RewardShapingConfig
    from mrl.config.schema.env import EffortConfig
    from mrl.types import RolloutGroup, RolloutInfo, Verdict


LONE = "fewer than two rollouts of its prompt have a reward"


def scale_reward(reward: float, scaling: RewardScalingConfig) -> float:
    """Maps the reward linearly from the source range to the target range, after clamping it to the source range."""
    if not scaling.enabled:
        return reward
    held = min(max(reward, scaling.source_min), scaling.source_max)
    share = (held - scaling.source_min) / (scaling.source_max - scaling.source_min)
    return scaling.target_min + share * (scaling.target_max - scaling.target_min)


def shape(verdict: Verdict, rollout: RolloutInfo, shaping: RewardShapingConfig) -> Verdict:
    """Lowers the reward of a rollout that is too long.

    With `stop_properly_penalty_coef`, a rollout that was cut off keeps that share of its reward. Otherwise DAPO's soft
    overlong punishment (arXiv:2503.14476, eq. 13) without its cap: nothing up to
    `max_response_length - overlong_buffer_length` tokens, then in proportion to the tokens beyond.
    """
    if shaping.stop_properly_penalty_coef is not None:
        return verdict.adjusted(shaping.stop_properly_penalty_coef) if rollout.finish_reason == "length" else verdict
    buffer = shaping.overlong_buffer_length
    penalty = shaping.overlong_buffer_penalty
    longest = shaping.max_response_length
    assert buffer is not None and penalty is not None and longest is not None
    excess = max(0, rollout.num_trained - (longest - buffer))
    return verdict.adjusted(1.0, -excess / buffer * penalty)


def shape_effort(group: RolloutGroup, effort: EffortConfig) -> RolloutGroup:
    """The group with rewards that depend on the length of the last answer, if its question asks for a short one.

    NeMo RL's `_apply_effort_shaping` (nemo_rl/experience/rollouts.py), which comes before the penalties: those stay at
    0.
    """
    if effort.low_weight <= 0 or not effort.low_string or effort.low_string not in group.prompt.text:
        return group

    def shaped(verdict: Verdict, rollout: RolloutInfo) -> Verdict:
        if not verdict.has_reward or not set(PENALTIES).isdisjoint(verdict.flags):
            return verdict
        bonus = min(1.0, effort.low_weight * (1 - (rollout.length - rollout.last_turn_start) / effort.low_ub))
        changed = verdict.adjusted(1 + max(bonus, 0.0), effort.low_penalty * min(bonus, 0.0))
        return replace(changed, metrics={**verdict.metrics, "effort_bonus": bonus})

    return replace(group, verdicts=tuple(map(shaped, group.verdicts, group.rollouts)))


def scaled(group: RolloutGroup, config: GrpoConfig) -> list[Verdict]:
    """The verdicts of a group after scaling, before shaping. Each component is scaled by itself, as in NeMo RL."""
    scaling = config.reward_scaling
    if not scaling.enabled:
        return list(group.verdicts)
    parts = [
        {name: scale_reward(value, scaling) for name, value in verdict.components.items()} for verdict in group.verdicts
    ]
    return [
        replace(v, reward=scale_reward(v.reward, scaling), components=own)
        for v, own in zip(group.verdicts, parts, strict=True)
    ]


def shaped(group: RolloutGroup, config: GrpoConfig) -> list[Verdict]:
    """The verdicts of a group after scaling and shaping, from which advantages are computed."""
    found, shaping = scaled(group, config), config.reward_shaping
    return [shape(*pair, shaping) for pair in zip(found, group.rollouts, strict=True)] if shaping.enabled else found


def shaped_rewards(group: RolloutGroup, config: GrpoConfig) -> list[float]:
    """The rewards of a group after scaling and shaping."""
    return [verdict.reward for verdict in shaped(group, config)]


def shaped_rewards_of(groups: Sequence[RolloutGroup], config: GrpoConfig) -> list[float]:
    """The shaped rewards of all rollouts that have a reward."""
    return [
        reward
        for group in groups
        for reward, verdict in zip(shaped_rewards(group, config), group.verdicts, strict=True)
        if verdict.has_reward
    ]


def num_out_of_range(group: RolloutGroup, scaling: RewardScalingConfig) -> int:
    """Counts the rewards of a group outside the source range, which scaling clamps."""
    if not scaling.enabled:
        return 0
    return sum(
        verdict.has_reward and not scaling.source_min <= verdict.reward <= scaling.source_max
        for verdict in group.verdicts
    )


def is_lone(group: RolloutGroup) -> bool:
    """True if nothing compares the rollouts of a group, as fewer than two have a reward."""
    return sum(verdict.has_reward for verdict in group.verdicts) < 2


def without_lone(groups: Sequence[RolloutGroup], agents: Container[str]) -> list[RolloutGroup]:
    """Masks groups of `agents` with one reward."""
    kept: list[RolloutGroup] = []
    for group in groups:
        masked = tuple(replace(v, is_valid=False, status="error", reason=v.reason or LONE) for v in group.verdicts)
        kept.append(replace(group, verdicts=masked) if group.prompt.env_name in agents and is_lone(group) else group)
    return kept


def has_signal(group: RolloutGroup, config: GrpoConfig) -> bool:
    """True if a group's rewards differ, as float32, after scaling, before length shaping; for GDPO a component.

    Without a difference every advantage is 0, or comes from lengths alone (dynamic sampling, arXiv:2503.14476).
    """
    judged = [verdict for verdict in scaled(group, config) if verdict.has_reward]
    rows = [[verdict.reward] for verdict in judged]
    if config.adv_estimator.name == "gdpo":
        weights = config.adv_estimator.reward_weights
        rows = [[value for _, value in sorted(verdict.components.items())] for verdict in judged]
        rows = (
            [[v for v, weight in zip(row, weights, strict=False) if weight] for row in rows]
            if weights is not None
            else rows
        )
    return len({tuple(np.float32(value).item() for value in row) for row in rows}) > 1
