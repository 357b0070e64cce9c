# SPDX-License-Identifier: Apache-2.0
"""Order of prompts: over a run, from seed and epoch alone; within a step, longest rollouts first. A run's steps."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import islice

import numpy as np

from mrl.config.errors import NotKnown
from mrl.config.schema.data import DatasetConfig, TrainDatasetConfig
from mrl.config.schema.run import RunConfig
from mrl.data.records import records
from mrl.types import Prompt, PromptKey


def epoch_order(num_prompts: int, *, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """The indices of all prompts in the order in which this epoch takes them, int64 [num_prompts]."""
    if not shuffle:
        return np.arange(num_prompts)
    # NumPy promises the raw stream of a bit generator across versions, not the order of its shuffles.
    return np.argsort(np.random.PCG64([seed, epoch]).random_raw(num_prompts), kind="stable")


def prompts_at(
    position: int, count: int, *, num_prompts: int, seed: int, shuffle: bool = True
) -> list[tuple[int, int]]:
    """The next `count` prompts after `position` prompts were taken since the run's start, as `(epoch, prompt_index)`.

    Continues with the next epoch where one ends: no prompt is dropped, and within an epoch none is taken twice.
    """
    if num_prompts < 1:
        raise ValueError("the data set has no prompts; check data.train.data_path")
    picked: list[tuple[int, int]] = []
    end = position + count
    while position < end:
        epoch, start = divmod(position, num_prompts)
        order = epoch_order(num_prompts, seed=seed, epoch=epoch, shuffle=shuffle)[start : start + end - position]
        picked += [(epoch, int(index)) for index in order]
        position += len(order)
    return picked


def prompts_of_step(
    step: int, *, prompts_per_step: int, num_prompts: int, seed: int, shuffle: bool = True
) -> list[tuple[int, int]]:
    """The prompts of step `step` (from 0) of an unbroken run, as `(epoch, prompt_index)`."""
    return prompts_at(step * prompts_per_step, prompts_per_step, num_prompts=num_prompts, seed=seed, shuffle=shuffle)


def prompts_left(
    consumed: Container[PromptKey],
    num_prompts: int,
    id_at: Callable[[int], str],
    *,
    num_epochs: int,
    seed: int,
    shuffle: bool = True,
) -> Iterator[tuple[int, int]]:
    """`(epoch, prompt_index)` left of `num_epochs` passes over the prompts, in the order of an unbroken run."""
    for epoch in range(num_epochs):
        for index in epoch_order(num_prompts, seed=seed, epoch=epoch, shuffle=shuffle).tolist():
            if (epoch, id_at(index)) not in consumed:
                yield epoch, index


class LengthHints:
    """Expected lengths of rollouts: those of the prompt in an earlier epoch, else the mean of its environment.

    Longest first is the classic rule for short tails (Graham, 1969): a long rollout that begins last is alone on its
    engine at the end.
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
