# SPDX-License-Identifier: Apache-2.0
"""Schedules with something taken out of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from conversion.boxes import Box, Slot
from conversion.schedule import Copy, Schedule, WorkerClass
from mrl.refit.inputs import RefitInputs


def drop_copies(schedule: Schedule, is_dropped: Callable[[Copy], bool]) -> Schedule:
    """The schedule without some of its copies."""

    def kept(copies: tuple[Copy, ...]) -> tuple[Copy, ...]:
        return tuple(copy for copy in copies if not is_dropped(copy))

    def without(found: WorkerClass) -> WorkerClass:
        sources = tuple(
            source._replace(
                messages=tuple(message._replace(copies=kept(message.copies)) for message in source.messages)
            )
            for source in found.sources
        )
        return replace(found, own=kept(found.own), sources=sources)

    return replace(schedule, classes=tuple(map(without, schedule.classes)))


@dataclass(frozen=True)
class IncompleteInputs(RefitInputs):
    """Inputs whose schedule lacks what fills one box."""

    dropped: tuple[Slot, Box] | None = None

    def schedule(self) -> Schedule:
        return drop_copies(super().schedule(), lambda copy: (copy.target, copy.box) == self.dropped)


def without_box(inputs: RefitInputs, slot: Slot, box: Box) -> IncompleteInputs:
    """The inputs, but for what fills `box` of `slot`."""
    return IncompleteInputs(**vars(inputs), dropped=(slot, box))
