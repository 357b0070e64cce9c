# SPDX-License-Identifier: Apache-2.0
"""Order of prompts: over a run, from the config alone; within a step, longest rollouts first. A run's steps.

The curriculum by difficulty (difficulty_pools) leaves prompts out of an epoch by the rewards that they have had.
"""

from __future__ import annotations

import logging
import math
import os
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from heapq import heapify, heapreplace
from itertools import accumulate, islice

import numpy as np

from mrl.config.errors import NotKnown
from mrl.config.schema.data import DatasetConfig, DifficultyPoolConfig, TrainDatasetConfig
from mrl.config.schema.run import RunConfig
from mrl.data.records import records
from mrl.types import Prompt, PromptKey


def epoch_order(num_prompts: int, *, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """The indices of all prompts in the order in which this epoch takes them, int64 [num_prompts]."""
    if not shuffle:
        return np.arange(num_prompts)
    # NumPy promises the raw stream of a bit generator across versions, not the order of its shuffles.
    return np.argsort(np.random.PCG64([seed, epoch]).random_raw(num_prompts), kind="stable")


class PromptOrder:
    """The order in which a run takes its prompts: of all data sets together, or of each by its weight.

    Without weights an epoch takes every prompt once. With weights every data set has epochs of its own, and the shares
    of the data sets hold for each number of prompts as nearly as whole prompts can (the divisor method of
    Sainte-Laguë): no step has more or less of one by chance.

    Args:
        sizes: number of prompts of each data set; a prompt's index counts through all of them.
        weights: positive, one for each data set, in any unit; empty for none.
    """

    def __init__(self, sizes: Sequence[int], *, seed: int, shuffle: bool = True, weights: Sequence[float] = ()) -> None:
        if min(sizes, default=0) < 1:
            raise ValueError("the data set has no prompts; check data.train.data_path")
        self._num_prompts, self._seed, self._shuffle = sum(sizes), seed, shuffle
        self.sizes = list(sizes) if weights else [self._num_prompts]
        """Numbers of prompts of what has epochs of its own."""
        self._weights = [weight / max(weights) for weight in weights] or [1.0]
        self._orders: dict[int, tuple[int, np.ndarray]] = {}

    def at(self, position: int, count: int) -> list[tuple[int, int]]:
        """The next `count` prompts after `position` prompts were taken since the run's start, as `(epoch, index)`.

        Continues with the next epoch where one ends: none is dropped, and within an epoch none is taken twice.
        """
        return list(islice(self._from(position), count))

    def left(
        self,
        consumed: Container[PromptKey],
        id_at: Callable[[int], str],
        *,
        num_epochs: int,
        leaves_out: Callable[[int, int], bool] | None = None,
    ) -> Iterator[tuple[int, int]]:
        """`(epoch, index)` left of as many prompts as `num_epochs` epochs have, in the order of an unbroken run."""
        for epoch, index in islice(self._from(0), num_epochs * self._num_prompts):
            if (epoch, id_at(index)) not in consumed and not (leaves_out and leaves_out(epoch, index)):
                yield epoch, index

    def _from(self, position: int) -> Iterator[tuple[int, int]]:
        taken = self._taken(position)
        turns = [
            (_turn(number, weight), part)
            for part, (number, weight) in enumerate(zip(taken, self._weights, strict=True))
        ]
        heapify(turns)
        while True:
            part = turns[0][1]
            yield self._prompt(part, taken[part])
            taken[part] += 1
            heapreplace(turns, (_turn(taken[part], self._weights[part]), part))

    def _taken(self, position: int) -> list[int]:
        # All turns up to this one are taken: each data set has then rounded its quota, by half a prompt at most.
        last = (position - len(self._weights) / 2 - 1) / sum(self._weights)
        taken = [max(0, int(last * weight) - 1) for weight in self._weights]
        for part, weight in enumerate(self._weights):
            while _turn(taken[part], weight) <= last:
                taken[part] += 1
        for _ in range(position - sum(taken)):
            part = min(range(len(taken)), key=lambda part: (_turn(taken[part], self._weights[part]), part))
            taken[part] += 1
        return taken

    def _prompt(self, part: int, number: int) -> tuple[int, int]:
        epoch, place = divmod(number, self.sizes[part])
        if part not in self._orders or self._orders[part][0] != epoch:
            order = epoch_order(self.sizes[part], seed=self._seed, epoch=epoch, shuffle=self._shuffle)
            self._orders[part] = epoch, order
        return epoch, sum(self.sizes[:part]) + int(self._orders[part][1][place])


def _turn(number: int, weight: float) -> float:
    """The place of a data set's prompt `number`, from 0, in the order: the smallest one is the next."""
    return (number + 0.5) / weight


def prompt_order(config: RunConfig, sizes: Sequence[int]) -> PromptOrder:
    """The order of a run whose training data sets have these numbers of prompts."""
    weights = [dataset.weight for dataset in config.data.train_sets.values() if dataset.weight is not None]
    return PromptOrder(sizes, seed=config.training.seed, shuffle=config.data.shuffle, weights=weights)


class LengthHints:
    """Expected lengths of rollouts: those of the prompt in an earlier epoch, else the mean of its environment.

    Longest first is the classic rule for short tails (Graham, 1969): a long rollout that begins last ends alone.
    """

    def __init__(self) -> None:
        self._of_prompt: dict[str, float] = {}
        self._of_environment: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))

    def note(self, prompt: Prompt, lengths: Sequence[int]) -> None:
        """Notes the lengths of a prompt's rollouts, in tokens."""
        self._of_prompt[prompt.prompt_id] = sum(lengths) / len(lengths)
        total, count = self._of_environment[prompt.env_name]
        self._of_environment[prompt.env_name] = (total + sum(lengths), count + len(lengths))

    def expected(self, prompt: Prompt) -> float:
        """Expected length of a rollout, in tokens; 0 where nothing is known."""
        if prompt.prompt_id in self._of_prompt:
            return self._of_prompt[prompt.prompt_id]
        total, count = self._of_environment.get(prompt.env_name, (0, 0))
        return total / count if count else 0.0

    def longest_first(self, asked: Sequence[tuple[int, Prompt]]) -> list[tuple[int, Prompt]]:
        """Sorts (epoch, prompt) pairs by expected length of their rollouts, then by prompt length, longest first."""
        return sorted(asked, key=lambda pair: (-self.expected(pair[1]), -len(pair[1].token_ids)))


def num_steps_of(config: RunConfig, num_rows: int) -> int:
    """Number of steps in all epochs over `num_rows` training rows. ValueError: they do not fill one step."""
    training, algorithm = config.training, config.algorithm
    key = f"{algorithm}.num_prompts_per_step" if config.has_engines else "policy.train_global_batch_size"
    size = config.rollouts.num_prompts_per_step if config.has_engines else config.policy.train_global_batch_size
    num_steps = training.max_num_epochs * num_rows // size
    if num_steps == 0:
        raise ValueError(
            f"{key}={size}: more than all rows ({num_rows} times "
            f"{algorithm}.max_num_epochs={training.max_num_epochs}), and no step would be trained; lower it, raise "
            "the latter or give more rows"
        )
    return num_steps


def find_few_rows(config: RunConfig) -> list[str]:
    """Complains if the local data sets have fewer rows than one step takes. Reads no more rows than needed."""
    try:
        count_steps(config, most_rows=1)
    except NotKnown:
        return []
    except ValueError as error:
        return [str(error)]
    return []


def count_steps(config: RunConfig, *, most_rows: int) -> int | None:
    """Steps that local data sets fill, counted to the first beyond `most_rows`; None: more, or not all sets are here.

    Raises:
        NotKnown: a value of the config is not known.
        ValueError: the rows do not fill one step.
    """
    size = config.rollouts.num_prompts_per_step if config.has_engines else config.policy.train_global_batch_size
    sets = config.data.train_sets
    if not all(os.path.exists(dataset.source) for dataset in sets.values()):
        return None
    enough = max(size, most_rows)
    num_rows = sum(_num_kept(key, dataset, enough) for key, dataset in sets.items())
    num_steps = num_steps_of(config, num_rows)
    return num_steps if num_rows < enough else None


def _num_kept(key: str, dataset: TrainDatasetConfig, enough: int) -> int:
    """Rows of a data set that are not held out; where it has more than `enough`, perhaps fewer than it has."""
    held_out = dataset.held_out
    most = enough + held_out if held_out >= 1 else enough / (1 - held_out) + 1
    num_rows = min(_num_rows(key, dataset, math.ceil(most)) * dataset.repeat, dataset.max_samples or 2**62)
    return max(0, num_rows - (int(held_out) if held_out >= 1 else math.ceil(held_out * num_rows)))


def _num_rows(key: str, dataset: DatasetConfig, most: int) -> int:
    from mrl.data.files import find_data_files  # imports the client of the Hub, which checks of other files do without

    files = find_data_files(dataset, setting=key)
    return sum(1 for _ in islice((record for path in files for record in records(path)), most))


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
        name, pool = next((one for one in self._pools if reward <= one[1].threshold), self._pools[-1])
        return name, pool.weight
