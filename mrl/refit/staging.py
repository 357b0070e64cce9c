# SPDX-License-Identifier: Apache-2.0
"""Layers that an engine keeps in another form than it loads, such as FP8: a refit brings their weights to a staging
memory, verifies them there, and has the engine's own code make the live tensors of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from conversion.boxes import Slot, align
from conversion.schedule import Pull, Schedule
from mrl.refit import RefitError
from mrl.refit.device_checksum import bytes_of
from mrl.refit.memory import bytes_as


@dataclass(frozen=True)
class Quantiser:
    """A live layer, and the engine's way to make its tensors."""

    loaded: Mapping[Slot, Tensor]
    """Weights that the engine makes them of, as it loads them; on the meta device."""
    made: Sequence[Slot]
    """Live tensors that it makes: values and scales."""
    make: Callable[[Mapping[Slot, Tensor]], Mapping[Slot, Tensor]]
    """Makes new tensors of the weights. May be collective over the engine's workers, in one order of layers."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(align(tensor.nbytes) for tensor in self.loaded.values())

    def write(self, weights: Mapping[Slot, Tensor], live: Mapping[Slot, Tensor]) -> list[Slot]:
        """Makes the live tensors of the weights; then makes them anew, and returns those with other bytes.

        Raises RefitError if the engine makes other tensors than it has.
        """
        for slot, tensor in self._made(weights, live).items():
            live[slot].copy_(tensor)
        again = self._made(weights, live)
        return [slot for slot in self.made if not torch.equal(bytes_of(again[slot]), bytes_of(live[slot]))]

    def _made(self, weights: Mapping[Slot, Tensor], live: Mapping[Slot, Tensor]) -> Mapping[Slot, Tensor]:
        made = self.make(weights)
        has = {slot: _kind(live[slot]) for slot in self.made}
        makes = {slot: _kind(tensor) for slot, tensor in made.items()}
        if has != makes:
            raise RefitError(
                f"of new weights the engine makes other tensors than it has: {set(has.items()) ^ set(makes.items())}"
            )
        return made


class PullGroup(NamedTuple):
    """Pulls that run together in a round; with a quantiser, its layer's last ones."""

    pulls: Sequence[Pull]
    quantiser: Quantiser | None


class StagingPlan(NamedTuple):
    """Order in which the pulls of a worker run, and places of the staged weights."""

    rounds: Sequence[Sequence[PullGroup]]
    offsets: Mapping[Slot, int]
    """Bytes from the start of the staging memory."""
    num_bytes: int


def plan_turns(
    quantisers: Sequence[Quantiser], rounds: Sequence[Sequence[Pull]], completed: Mapping[Slot, int]
) -> StagingPlan:
    """Plans the pulls of one worker. `completed` is the round with which the last worker of the engine has a weight.

    A layer is made in the round in which all workers have all of it, as its scales may be agreed among them. Until then
    its weights stay in the staging memory. Boxes of the worker's own GPU wait for that round, so that layers whose
    other boxes all come in it need room one after the other.
    """
    layer_of = {slot: index for index, quantiser in enumerate(quantisers) for slot in quantiser.loaded}
    last = [max(completed[slot] for slot in quantiser.loaded) for quantiser in quantisers]
    heads: list[list[Pull]] = [[] for _ in rounds]
    ends: list[list[Pull]] = [[] for _ in quantisers]
    first = list(last)
    for number, pulls in enumerate(rounds):
        for pull in pulls:
            index = layer_of.get(pull.copy.target)
            if index is None:
                heads[number].append(pull)
            elif pull.offset is None or number == last[index]:
                ends[index].append(pull)
            else:
                heads[number].append(pull)
                first[index] = min(first[index], number)
    turns = [[PullGroup(head, None)] for head in heads]
    spans: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for index, quantiser in enumerate(quantisers):
        place = (last[index], len(turns[last[index]]))
        turns[last[index]].append(PullGroup(ends[index], quantiser))
        spans.append(((first[index], 0) if first[index] < last[index] else place, place))
    starts, num_bytes = _places([quantiser.num_bytes for quantiser in quantisers], spans)
    offsets: dict[Slot, int] = {}
    for start, quantiser in zip(starts, quantisers, strict=True):
        for slot, tensor in quantiser.loaded.items():
            offsets[slot] = start
            start += align(tensor.nbytes)
    return StagingPlan(turns, offsets, num_bytes)


def completed_rounds(schedule: Schedule, workers: Iterable[int]) -> dict[Slot, int]:
    """Round with which the last of these workers has all boxes of a tensor."""
    found: dict[Slot, int] = {}
    for worker in workers:
        for number, pulls in enumerate(schedule.pulls(worker)):
            for pull in pulls:
                found[pull.copy.target] = max(found.get(pull.copy.target, 0), number)
    return found


def staged_tensors(plan: StagingPlan, quantisers: Sequence[Quantiser], device: torch.device) -> dict[Slot, Tensor]:
    """Tensors of the weights in a new staging memory."""
    memory = torch.empty(plan.num_bytes, dtype=torch.uint8, device=device)
    return {
        slot: bytes_as(memory, plan.offsets[slot], tuple(tensor.shape), tensor.dtype)
        for quantiser in quantisers
        for slot, tensor in quantiser.loaded.items()
    }


def _places(sizes: Sequence[int], spans: Sequence[tuple[tuple[int, int], tuple[int, int]]]) -> tuple[list[int], int]:
    """Lowest free start of each, those that begin first first; and the bytes of all."""
    starts = [0] * len(sizes)
    placed: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda index: (spans[index][0], -sizes[index])):
        taken = sorted(
            (starts[other], starts[other] + sizes[other]) for other in placed if spans[other][1] >= spans[index][0]
        )
        start = 0
        for begin, end in taken:
            if begin - start >= sizes[index]:
                break
            start = max(start, end)
        starts[index] = start
        placed.append(index)
    return starts, max((start + size for start, size in zip(starts, sizes, strict=True)), default=0)


def _kind(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype
