"""The order of prompts over a run: a pure function of seed, epoch and number of prompts, so that a position is one number."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

import numpy as np

from mrl.types import PromptKey


def epoch_order(num_prompts: int, *, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """The indices of all prompts in the order in which this epoch takes them, int64 [num_prompts]."""
    if not shuffle:
        return np.arange(num_prompts)
    # NumPy promises the raw stream of a bit generator across versions, not the order of its shuffles.
    return np.argsort(np.random.PCG64([seed, epoch]).random_raw(num_prompts), kind="stable")


def prompts_at(position: int, count: int, *, num_prompts: int, seed: int, shuffle: bool = True) -> list[tuple[int, int]]:
    """The next `count` prompts after `position` prompts were taken since the start of the run, as `(epoch, prompt_index)`.

    Crosses into the next epoch where one ends: no prompt is dropped, and within an epoch none is taken twice.

    Raises:
        ValueError: there are no prompts.
    """
    if num_prompts < 1:
        raise ValueError("the data set has no prompts; check data.train.data_path")
    picked: list[tuple[int, int]] = []
    for epoch, start, stop in _spans(position, count, num_prompts):
        order = epoch_order(num_prompts, seed=seed, epoch=epoch, shuffle=shuffle)
        picked += [(epoch, int(index)) for index in order[start:stop]]
    return picked


def prompts_of_step(step: int, *, prompts_per_step: int, num_prompts: int, seed: int, shuffle: bool = True) -> list[tuple[int, int]]:
    """The prompts of step `step` (from 0) of an unbroken run, as `(epoch, prompt_index)`."""
    return prompts_at(step * prompts_per_step, prompts_per_step, num_prompts=num_prompts, seed=seed, shuffle=shuffle)


def prompts_left(
    consumed: Container[PromptKey], num_prompts: int, id_at: Callable[[int], str], *, num_epochs: int, seed: int, shuffle: bool = True
) -> Iterator[tuple[int, int]]:
    """`(epoch, prompt_index)` of what `num_epochs` passes over the prompts have not consumed, in the order of an unbroken run.

    `id_at(prompt_index)` names a prompt.
    """
    for epoch in range(num_epochs):
        for index in epoch_order(num_prompts, seed=seed, epoch=epoch, shuffle=shuffle).tolist():
            if (epoch, id_at(index)) not in consumed:
                yield epoch, index


def _spans(position: int, count: int, num_prompts: int) -> Iterator[tuple[int, int, int]]:
    """`(epoch, start, stop)` for each epoch that positions [position, position + count) touch."""
    end = position + count
    while position < end:
        epoch, start = divmod(position, num_prompts)
        stop = min(num_prompts, start + end - position)
        yield epoch, start, stop
        position += stop - start
