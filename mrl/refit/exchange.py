"""Trainer side of a refit: ranks send each other packed boxes, so that each unit's rank holds what the engine workers of that unit lack.

Also takes the checksums that those workers verify against, always from the settled weights of the rank that owns the box.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from conversion.boxes import Box, Slot, lengths
from conversion.reshard import Schedule, Transfer
from conversion.tensors import torch_dtype
from mrl.refit.checksum import checksum
from mrl.refit.errors import RefitError
from mrl.refit.memory import SharedMemory, align
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
class _Message:
    """The boxes of one (source, unit) pair in one round, packed: each at an aligned offset, their checksums (int64) behind them."""

    transfers: tuple[Transfer, ...]
    offsets: tuple[int, ...]
    checksums_offset: int

    @property
    def num_bytes(self) -> int:
        return align(self.checksums_offset + 8 * len(self.transfers))

    @classmethod
    def of(cls, transfers: Sequence[Transfer]) -> _Message:
        # Both ends compute the offsets, so the order must not depend on who asks the schedule.
        ordered = tuple(sorted(transfers, key=lambda transfer: transfer.copy_index))
        offsets, end = [], 0
        for transfer in ordered:
            offsets.append(end)
            end = align(end + transfer.num_bytes)
        return cls(ordered, tuple(offsets), end)

    def boxes(self, buffer: Tensor) -> list[Tensor]:
        """Each box in the packed message, in its source's dtype and shape."""
        return [
            bytes_as(buffer, offset, lengths(transfer.box), torch_dtype(transfer.dtype))
            for transfer, offset in zip(self.transfers, self.offsets, strict=True)
        ]

    def checksums(self, buffer: Tensor) -> Tensor:
        return bytes_as(buffer, self.checksums_offset, (len(self.transfers),), torch.int64)


@dataclass(frozen=True)
class _Outgoing:
    unit_rank: int
    buffer: Tensor
    boxes: list[Tensor]
    sources: list[_Source]
    checksums: Tensor

    def pack(self) -> None:
        for box, source in zip(self.boxes, self.sources, strict=True):
            box.copy_(source.view)
        self.checksums.copy_(torch.tensor([source.checksum() for source in self.sources]))


@dataclass(frozen=True)
class _Incoming:
    source_rank: int
    buffer: Tensor
    boxes: list[Tensor]
    destinations: list[Tensor]
    checksums: Tensor
    checksum_indices: Tensor

    def unpack(self, checksums: Tensor) -> None:
        for destination, box in zip(self.destinations, self.boxes, strict=True):
            destination.copy_(box)
        checksums[self.checksum_indices] = self.checksums


@dataclass(frozen=True)
class _Round:
    outgoing: list[_Outgoing]
    incoming: list[_Incoming]
    local_sources: list[_Source]
    local_indices: Tensor


_Messages = list[tuple[int, _Message]]


class Exchange:
    """The exchange of one trainer rank. Owns the rank's exchange memory."""

    def __init__(
        self,
        rank: int,
        schedule: Schedule,
        weights: Mapping[Slot, Tensor],
        arena: ArenaHandle,
        *,
        timeout_s: float,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Every rank of the trainer world makes one, of the same schedule.

        `weights` are the live tensors of this rank, in its arena; they are read at each `run`. Ranks of the schedule are global ranks of
        `group` (None: the default group). `timeout_s` bounds each wait for a peer.
        """
        self.rank = rank
        self._group = group
        self._timeout_s = timeout_s
        self._arena = arena
        self._num_checksums = schedule.num_checksums(rank)
        # A rank without engine workers on its unit only sends.
        box_bytes = schedule.exchange_bytes() if self._num_checksums else 0
        self._memory = SharedMemory.create(ExchangeMemory.num_bytes(self._num_checksums, box_bytes), f"mrl-exchange-{rank}")
        self._parts = ExchangeMemory.split(self._memory.tensor, self._num_checksums)
        self._parts.stamps[0] = NO_ROUND
        self._weights = weights
        plans = [_plan(rank, schedule, round_index) for round_index in range(schedule.num_rounds)]
        # One buffer serves all rounds: a round ends before the next one begins.
        buffer = torch.empty(max(sum(message.num_bytes for _, message in sent + received) for sent, received in plans), dtype=torch.uint8)
        self._rounds = [self._prepare(schedule, index, sent, received, buffer) for index, (sent, received) in enumerate(plans)]

    def handles(self) -> UnitHandles:
        """What the engine workers of this unit need to pull."""
        return UnitHandles(self.rank, self._arena, self._memory.handle(), self._num_checksums)

    def run(self, round_index: int) -> None:
        """Fills this rank's exchange memory with the boxes and checksums of one round.

        Every rank of the trainer world calls it, in the same order of rounds, with settled weights; not before all engine workers have
        verified the round before. A rank with nothing to send or receive returns at once.

        Raises:
            RefitError: a peer did not send or receive within `timeout_s`.
        """
        plan = self._rounds[round_index]
        self._parts.stamps[0] = NO_ROUND
        for message in plan.outgoing:
            message.pack()
        self._send_and_receive(plan, round_index)
        for message in plan.incoming:
            message.unpack(self._parts.checksums)
        if plan.local_sources:
            self._parts.checksums[plan.local_indices] = torch.tensor([source.checksum() for source in plan.local_sources])
        self._parts.stamps[1] += 1
        # Last: it is what tells the workers that the rest is there.
        self._parts.stamps[0] = round_index

    def _send_and_receive(self, plan: _Round, round_index: int) -> None:
        receives = [dist.P2POp(dist.irecv, message.buffer, message.source_rank, self._group) for message in plan.incoming]
        sends = [dist.P2POp(dist.isend, message.buffer, message.unit_rank, self._group) for message in plan.outgoing]
        if not receives and not sends:
            return
        deadline = time.monotonic() + self._timeout_s
        try:
            for work in dist.batch_isend_irecv(receives + sends):
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            sources, units = [message.source_rank for message in plan.incoming], [message.unit_rank for message in plan.outgoing]
            raise RefitError(
                f"refit exchange: rank {self.rank} did not finish round {round_index} within {self._timeout_s} s, "
                f"receiving from ranks {sources} and sending to ranks {units}: {error}"
            ) from error

    def _prepare(self, schedule: Schedule, round_index: int, sent: _Messages, received: _Messages, buffer: Tensor) -> _Round:
        sizes = [message.num_bytes for _, message in sent + received]
        buffers = iter(torch.split(buffer[: sum(sizes)], sizes))
        local = schedule.local_checksums(self.rank, round_index)
        return _Round(
            [self._outgoing(unit_rank, message, next(buffers)) for unit_rank, message in sent],
            [self._incoming(source_rank, message, next(buffers)) for source_rank, message in received],
            [self._source(pull.source_slot, pull.source_box, pull.transform, pull.target_dtype) for pull in local],
            torch.tensor([pull.checksum_index for pull in local], dtype=torch.int64),
        )

    def _outgoing(self, unit_rank: int, message: _Message, buffer: Tensor) -> _Outgoing:
        sources = [self._source(item.slot, item.box, item.transform, item.target_dtype) for item in message.transfers]
        return _Outgoing(unit_rank, buffer, message.boxes(buffer), sources, message.checksums(buffer))

    def _incoming(self, source_rank: int, message: _Message, buffer: Tensor) -> _Incoming:
        boxes = message.boxes(buffer)
        offsets = [transfer.offset for transfer in message.transfers]
        destinations = [bytes_as(self._parts.boxes, at, tuple(box.shape), box.dtype) for at, box in zip(offsets, boxes, strict=True)]
        indices = torch.tensor([item.checksum_index for item in message.transfers], dtype=torch.int64)
        return _Incoming(source_rank, buffer, boxes, destinations, message.checksums(buffer), indices)

    def _source(self, slot: Slot, box: Box, transform: str | None, target_dtype: str) -> _Source:
        return _Source(box_view(self._weights[slot], box), transform, torch_dtype(target_dtype))


def _plan(rank: int, schedule: Schedule, round_index: int) -> tuple[_Messages, _Messages]:
    """What `rank` sends and receives in one round, each with its peer, in order of peers."""
    sent, received = defaultdict(list), defaultdict(list)
    for transfer in schedule.transfers(rank, round_index):
        sent[transfer.unit_rank].append(transfer)
    for transfer in schedule.receives(rank, round_index):
        received[transfer.source_rank].append(transfer)
    return _messages(sent), _messages(received)


def _messages(transfers: Mapping[int, Sequence[Transfer]]) -> _Messages:
    return [(peer, _Message.of(transfers[peer])) for peer in sorted(transfers)]
