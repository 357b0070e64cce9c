# SPDX-License-Identifier: Apache-2.0
"""Advantages by rank: the best rollout of a group has 1, the worst -1, equal rewards have equal advantages."""

from collections.abc import Sequence

from mrl.api import RolloutGroup


def by_rank(rewards: list[list[float]], groups: Sequence[RolloutGroup]) -> list[list[float]]:
    return [[rank(reward, group) for reward in group] for group in rewards]


def rank(reward: float, rewards: list[float]) -> float:
    below, above = sum(other < reward for other in rewards), sum(other > reward for other in rewards)
    return (below - above) / (len(rewards) - 1)
