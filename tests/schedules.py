"""Parts of schedules with something taken out of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from conversion.schedule import Copy, Lane, WorkerPart


def drop_copies(part: WorkerPart, is_dropped: Callable[[Copy], bool]) -> WorkerPart:
    """The part without some of its copies."""

    def without(lane: Lane) -> Lane:
        kept = [message._replace(copies=tuple(copy for copy in message.copies if not is_dropped(copy))) for message in lane.messages]
        return Lane(tuple(kept))

    receives = tuple(replace(route, lane=without(route.lane)) for route in part.receives)
    return replace(part, receives=receives, local=replace(part.local, copies=without(part.local.copies)))
