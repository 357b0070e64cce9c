"""Exchange of a refit: trainer ranks send packed boxes, so that each unit's exchange memory holds what the engine workers there lack.

Also takes the checksums that those workers verify against, always from the settled weights of the rank that owns the box. A message arrives
where the workers read it: boxes at aligned offsets, their checksums behind them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from conversion.boxes import Box, Slot, lengths
from conversion.schedule import CHECKSUM_BYTES, LocalCopies, Message, RankPart, Route, Transfer
from conversion.tensors import box_view, torch_dtype
from mrl.refit.checksum import Checksums
from mrl.refit.copies import Copies, Copy
from mrl.refit.group import ExchangeGroup, Incoming, Outgoing
from mrl.refit.memory import create_memory
from mrl.refit.transforms import Value
from mrl.refit.unit import NO_ROUND, ArenaHandle, ExchangeMemory, UnitHandles, bytes_as, reads_arena, wait_for


class _Source(NamedTuple):
    """A box of this rank's weights, and what the engine makes of it."""

    slot: Slot
    box: Box
    transform: str | None
    target_dtype: str


class _Sums:
    """Checksums of boxes of this rank's weights: each is taken once a refit, however many workers read the box."""

    def __init__(self, weights: Mapping[Slot, Tensor]) -> None:
        self._weights = weights
        self.seconds = 0.0
        self._rows: dict[_Source, int] = {}
        self._values: list[int] = []

    def prepare(self, sources: Sequence[_Source], out: Tensor) -> Callable[[], None]:
        """A function that writes the checksums of `sources` to `out` (int64). Those prepared earlier must have run earlier."""
        new = [source for source in dict.fromkeys(sources) if source not in self._rows]
        first = len(self._rows)
        self._rows |= {source: first + index for index, source in enumerate(new)}
        self._values += [0] * len(new)
        rows = [self._rows[source] for source in sources]
        taken = Checksums(
            [Value(box_view(self._weights[item.slot], item.box), item.transform, torch_dtype(item.target_dtype)) for item in new]
        )

        def write() -> None:
            start = time.perf_counter()
            self._values[first : first + len(new)] = taken.take().tolist()
            out.copy_(torch.tensor([self._values[row] for row in rows], dtype=torch.int64))
            self.seconds += time.perf_counter() - start

        return write


@dataclass(frozen=True)
class _Packing:
    """A message that leaves."""

    copies: Copies
    write_checksums: Callable[[], None]

    def run(self) -> None:
        self.copies.run()
        self.write_checksums()


class Exchange:
    """The exchange of one unit. Owns the unit's exchange memory."""

    def __init__(
        self,
        part: RankPart,
        weights: Mapping[Slot, Tensor],
        arena: ArenaHandle | None,
        *,
        group: ExchangeGroup | None,
    ) -> None:
        """Every trainer rank makes one, and every worker of a dedicated engine, of the parts of one schedule.

        `weights` are the live tensors of this rank, in its arena; they are read at each `run`. A dedicated worker has none and no arena.
        `group` is None where one unit is all there is.
        """
        self.rank = part.rank
        self._group = group
        self._arena = arena
        self._weights = weights
        self._sums = _Sums(weights)
        self._device = group.device if group else next(iter(weights.values())).device
        self.memory = create_memory(ExchangeMemory.num_bytes(part.body_bytes), f"mrl-exchange-{part.rank}", self._device)
        self._parts = ExchangeMemory.split(self.memory.tensor)
        self._parts.stamps[0] = NO_ROUND
        # One buffer serves all rounds: a round ends before the next one begins.
        buffer = torch.empty(part.packed_bytes(), dtype=torch.uint8, device=self.memory.tensor.device)
        # In the order in which they run, because a checksum that two of them need is taken by the first.
        self._outgoing = [self._pack_of(part, 0, buffer)]
        self._locals = [self._local(local) for local in part.locals]
        self._outgoing += [self._pack_of(part, round_index, buffer) for round_index in range(1, part.num_rounds)]
        self._incoming = [
            [
                Incoming(route.peer, self._traveling(route, message, self._arrival(route, message)))
                for route, message in part.incoming(round_index)
            ]
            for round_index in range(part.num_rounds)
        ]
        assert group is not None or not any(self._outgoing + self._incoming), "messages need a group"

    def handles(self) -> UnitHandles:
        """What the engine workers of this unit need to pull."""
        return UnitHandles(self.rank, self._arena, self.memory.handle() if self._arena else None)

    def close(self) -> None:
        """Leaves the group. Not collective; the exchange cannot be used afterwards."""
        if self._group is not None:
            self._group.close()

    @property
    def checksum_seconds(self) -> float:
        """Time that checksums have taken in all rounds so far: the source's part of verification."""
        return self._sums.seconds

    def run(self, round_index: int) -> None:
        """Fills the exchange memory with the messages and checksums of one round.

        Every participant calls it, in the same order of rounds, with settled weights; not before all engine workers have verified the
        round before. One with nothing to send or receive returns at once.

        Raises:
            RefitError: a peer did not send or receive in time.
        """
        outgoing, incoming = self._outgoing[round_index], self._incoming[round_index]
        self._parts.stamps[0] = NO_ROUND
        if self._group is not None and (outgoing or incoming):
            self._group.run(outgoing, incoming, what=f"round {round_index}", meanwhile=lambda: self._write_local_checksums(round_index))
        else:
            self._write_local_checksums(round_index)
        wait_for(self._device)
        self._parts.stamps[1] += 1
        # Last: it is what tells the workers that the rest is there.
        self._parts.stamps[0] = round_index
        wait_for(self._device)

    def _write_local_checksums(self, round_index: int) -> None:
        # All local boxes are read in round 0.
        for write in self._locals if round_index == 0 else ():
            write()

    def _pack_of(self, part: RankPart, round_index: int, buffer: Tensor) -> list[Outgoing]:
        outgoing, start = [], 0
        for route, message in part.outgoing(round_index):
            view = buffer[start : start + message.num_bytes]
            start += message.num_bytes
            outgoing.append(Outgoing(route.peer, self._traveling(route, message, view), self._packing(route, message, view).run))
        return outgoing

    def _packing(self, route: Route, message: Message, buffer: Tensor) -> _Packing:
        transfers = [copy.transfer(route.source_class) for copy in message.copies]
        packed = [] if reads_arena(route, self._device) else transfers
        copies = [
            Copy(bytes_as(buffer, item.offset, lengths(item.box), torch_dtype(item.dtype)), box_view(self._weights[item.slot], item.box))
            for item in packed
        ]
        checksums = bytes_as(buffer, message.checksums_offset, (len(transfers),), torch.int64)
        return _Packing(Copies(copies), self._sums.prepare([_source(item) for item in transfers], checksums))

    def _traveling(self, route: Route, message: Message, buffer: Tensor) -> Tensor:
        return buffer[message.checksums_offset :] if reads_arena(route, self._device) else buffer

    def _arrival(self, route: Route, message: Message) -> Tensor:
        start = route.base + message.offset
        return self._parts.body[start : start + message.num_bytes]

    def _local(self, local: LocalCopies) -> Callable[[], None]:
        sources = [_source(copy.transfer(local.source_class)) for copy in local.copies.copies()]
        end = local.checksums_base + CHECKSUM_BYTES * len(sources)
        return self._sums.prepare(sources, self._parts.body[local.checksums_base : end].view(torch.int64))


def _source(item: Transfer) -> _Source:
    return _Source(item.slot, item.box, item.transform, item.target_dtype)
