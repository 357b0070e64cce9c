"""Exchange of a refit: trainer ranks send packed boxes, so that each unit's exchange memory holds what the engine workers there lack.

Also takes the checksums that those workers verify against, always from the settled weights of the rank that owns the box. A message arrives
where the workers read it: boxes at aligned offsets, their checksums behind them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from conversion.boxes import Slot, lengths
from conversion.schedule import CHECKSUM_BYTES, LocalCopies, Message, RankPart, Route, Transfer
from conversion.tensors import torch_dtype
from mrl.refit.checksum import checksum
from mrl.refit.group import ExchangeGroup, Incoming, Outgoing
from mrl.refit.memory import SharedMemory
from mrl.refit.transforms import apply
from mrl.refit.unit import NO_ROUND, ArenaHandle, ExchangeMemory, UnitHandles, box_view, bytes_as


@dataclass(frozen=True)
class _Source:
    """A box of this rank's weights, and what the engine makes of it."""

    view: Tensor
    transform: str | None
    target_dtype: torch.dtype

    def checksum(self) -> int:
        return checksum(apply(self.view, self.transform, self.target_dtype))


@dataclass(frozen=True)
class _Packing:
    """A message that leaves, as views of its buffer."""

    boxes: list[Tensor]
    sources: list[_Source]
    checksums: Tensor

    def run(self) -> None:
        for box, source in zip(self.boxes, self.sources, strict=True):
            box.copy_(source.view)
        self.checksums.copy_(torch.tensor([source.checksum() for source in self.sources]))


@dataclass(frozen=True)
class _Local:
    """Boxes that workers read out of this rank's arena, and where their checksums go."""

    sources: list[_Source]
    checksums: Tensor


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
        self.memory = SharedMemory.create(ExchangeMemory.num_bytes(part.body_bytes), f"mrl-exchange-{part.rank}")
        self._parts = ExchangeMemory.split(self.memory.tensor)
        self._parts.stamps[0] = NO_ROUND
        # One buffer serves all rounds: a round ends before the next one begins.
        buffer = torch.empty(part.packed_bytes(), dtype=torch.uint8, device=self.memory.tensor.device)
        self._outgoing = [self._pack_of(part, round_index, buffer) for round_index in range(part.num_rounds)]
        self._incoming = [
            [Incoming(route.peer, self._arrival(route, message)) for route, message in part.incoming(round_index)]
            for round_index in range(part.num_rounds)
        ]
        self._locals = [self._local(local) for local in part.locals]
        assert group is not None or not any(self._outgoing + self._incoming), "messages need a group"

    def handles(self) -> UnitHandles:
        """What the engine workers of this unit need to pull."""
        return UnitHandles(self.rank, self._arena, self.memory.handle())

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
            self._group.run(outgoing, incoming, what=f"round {round_index}")
        for local in self._locals if round_index == 0 else ():
            local.checksums.copy_(torch.tensor([source.checksum() for source in local.sources]))
        self._parts.stamps[1] += 1
        # Last: it is what tells the workers that the rest is there.
        self._parts.stamps[0] = round_index

    def _pack_of(self, part: RankPart, round_index: int, buffer: Tensor) -> list[Outgoing]:
        outgoing, start = [], 0
        for route, message in part.outgoing(round_index):
            view = buffer[start : start + message.num_bytes]
            start += message.num_bytes
            outgoing.append(Outgoing(route.peer, view, self._packing(message, route.source_class, view).run))
        return outgoing

    def _packing(self, message: Message, source_class: int, buffer: Tensor) -> _Packing:
        transfers = [copy.transfer(source_class) for copy in message.copies]
        boxes = [bytes_as(buffer, item.offset, lengths(item.box), torch_dtype(item.dtype)) for item in transfers]
        checksums = bytes_as(buffer, message.checksums_offset, (len(transfers),), torch.int64)
        return _Packing(boxes, [self._source(item) for item in transfers], checksums)

    def _arrival(self, route: Route, message: Message) -> Tensor:
        start = route.base + message.offset
        return self._parts.body[start : start + message.num_bytes]

    def _local(self, local: LocalCopies) -> _Local:
        sources = [self._source(copy.transfer(local.source_class)) for copy in local.copies.copies()]
        end = local.checksums_base + CHECKSUM_BYTES * len(sources)
        return _Local(sources, self._parts.body[local.checksums_base : end].view(torch.int64))

    def _source(self, item: Transfer) -> _Source:
        return _Source(box_view(self._weights[item.slot], item.box), item.transform, torch_dtype(item.target_dtype))
