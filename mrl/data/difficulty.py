# SPDX-License-Identifier: Apache-2.0
"""Curriculum by difficulty: prompts that an epoch leaves out, by the rewards that they have had (difficulty_pools)."""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from mrl.config.schema.data import DifficultyPoolConfig

logger = logging.getLogger(__name__)
# Its multiples lie in the unit interval as evenly as any number's, however many of them in a row.
GOLDEN = (5**0.5 - 1) / 2
BeginEpoch = Callable[[int, int], tuple[Mapping[str, float], bool]]
"""Mean reward of prompts, by id, when this epoch of this data set began; and whether it begins now."""


class DifficultyPools:
    """Tells which prompts an epoch leaves out. All of an epoch is decided when its first prompt comes up.

    A prompt of a pool of weight w is asked in epoch e if a whole number lies in ((e - 1) w + p, e w + p]: with w = 1/5
    in every fifth epoch. p in [0, 1) spreads the prompts of any part of a file, so that a fifth of them is in each.
    """

    def __init__(
        self,
        pools: Mapping[str, DifficultyPoolConfig],
        sizes: Sequence[int],
        id_at: Callable[[int], str],
        begin: BeginEpoch,
    ) -> None:
        """`sizes` are the numbers of prompts of data sets with epochs of their own; `id_at` counts through all."""
        self._pools = sorted(pools.items(), key=lambda pool: pool[1].threshold)
        self._starts, self._sizes = [0, *accumulate(sizes)][:-1], sizes
        self._id_at, self._begin = id_at, begin
        self._left_out: dict[int, tuple[int, set[int]]] = {}

    def leaves_out(self, epoch: int, index: int) -> bool:
        """True for a prompt that this epoch does not ask."""
        part = bisect_right(self._starts, index) - 1
        if self._left_out.get(part, (-1,))[0] != epoch:
            self._left_out[part] = epoch, self._decide(part, epoch)
        return index in self._left_out[part][1]

    def _decide(self, part: int, epoch: int) -> set[int]:
        rewards, is_new = self._begin(part, epoch)
        start = self._starts[part]
        left_out, total, asked = set[int](), Counter[str](), Counter[str]()
        for index in range(start, start + self._sizes[part]):
            reward = rewards.get(self._id_at(index))
            if reward is None:
                continue
            name, weight = self._pool_of(reward)
            place = (index - start) * GOLDEN % 1
            is_asked = math.floor(epoch * weight + place) > math.floor((epoch - 1) * weight + place)
            total[name] += 1
            asked[name] += is_asked
            left_out |= set() if is_asked else {index}
        if is_new and total:
            told = ", ".join(f"{name} {asked[name]} of {total[name]}" for name, _ in self._pools)
            logger.info("Epoch %d asks %s prompts, and all without a reward (data.difficulty_pools)", epoch, told)
        return left_out

    def _pool_of(self, reward: float) -> tuple[str, float]:
        """Name and weight of the first pool whose threshold the reward does not exceed, else of the last pool."""
        name, pool = next((one for one in self._pools if reward <= one[1].threshold), self._pools[-1])
        return name, pool.weight
