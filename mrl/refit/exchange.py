# SPDX-License-Identifier: Apache-2.0
"""Exchange of a refit: trainer ranks send packed boxes into the memory of each GPU whose engine workers need them.

It also takes the checksums that those workers verify against, always from the settled weights of the rank that owns the
box. A message arrives where the workers read it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from conversion.boxes import Box, Slot, lengths
from conversion.schedule import NUM_BUFFERS, Copy, Delivery, Schedule
from conversion.tensors import box_view, torch_dtype
from mrl.refit.checksum import Checksums, Summed
from mrl.refit.copies import Copies, TensorCopy
from mrl.refit.group import ExchangeGroup, Incoming, Outgoing
from mrl.refit.memory import ArenaHandle, MemoryHandle, SharedMemory, bytes_as, wait_for
from mrl.refit.pace import Pace

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class GpuHandles:
    """Handles by which an engine worker pulls on its GPU. Pickles."""

    gpu: int
    arena: ArenaHandle | None
    """Arena of the GPU's trainer rank; None on the GPU of a dedicated engine."""
    exchange: MemoryHandle | None
    """Checksums of own copies, and received messages. None on the GPU of a dedicated engine, whose worker owns this
    memory.
    """
    pace: MemoryHandle | None = None
    peers: Mapping[int, ArenaHandle] = field(default_factory=dict)
    """Arenas of other ranks on the node that the worker reads, by rank."""


def reads_arena(delivery: Delivery, device: torch.device) -> bool:
    """True if the worker reads a message's boxes from the sender's arena, so that only their checksums travel.

    Host memory can be mapped by every process of its node, memory of a GPU only by processes on that GPU.
    """
    return delivery.can_map and device.type == "cpu"


def handles_for(schedule: Schedule, worker: int, handles: Mapping[int, GpuHandles]) -> GpuHandles:
    """The handles an engine worker needs: those of its own GPU, and the arenas that it may read on its node."""
    own = handles[schedule.workers[worker].gpu]
    if own.exchange is None or own.exchange.gpu is not None:
        return own
    near = schedule.mappable_ranks(worker)
    return replace(own, peers={rank: arena for rank in near if (arena := handles[rank].arena) is not None})


class _Sums:
    """Checksums of boxes of this rank's weights: each is taken once a refit, however many workers read the box."""

    def __init__(self, weights: Mapping[Slot, Tensor]) -> None:
        self._weights = weights
        self._rows: dict[tuple[Slot, Box, str | None, str], int] = {}
        """Row of each read box, by slot, box, and transform and dtype of the engine's copy."""
        self._values: list[int] = []

    def prepare(self, copies: Sequence[Copy], source_class: int, out: Tensor) -> Callable[[], None]:
        """A function that writes checksums of `copies` to `out` (int64). Earlier functions must run earlier."""
        holdings = [copy.holders[source_class] for copy in copies]
        boxes = [(held.slot, held.box, copy.transform, copy.dtype) for copy, held in zip(copies, holdings, strict=True)]
        new = [box for box in dict.fromkeys(boxes) if box not in self._rows]
        first = len(self._rows)
        self._rows |= {box: first + index for index, box in enumerate(new)}
        self._values += [0] * len(new)
        rows = [self._rows[box] for box in boxes]
        sums = Checksums(
            [
                Summed(box_view(self._weights[slot], box), transform, torch_dtype(dtype))
                for slot, box, transform, dtype in new
            ]
        )

        def write() -> None:
            self._values[first : first + len(new)] = sums.take().tolist()
            out.copy_(torch.tensor([self._values[row] for row in rows], dtype=torch.int64))

        return write


class Exchange:
    """One participant's part of the exchange. Owns the exchange memory of its GPU."""

    def __init__(
        self,
        schedule: Schedule,
        gpu: int,
        weights: Mapping[Slot, Tensor],
        arena: ArenaHandle | None,
        *,
        group: ExchangeGroup | None,
    ) -> None:
        """Every trainer rank and dedicated engine worker makes one of the same schedule; `gpu` is its number there.

        `weights` are the live tensors of this rank, in its arena; they are read at each `run`. A dedicated worker has
        none and no arena. `group` is None on a single GPU.
        """
        self.gpu = gpu
        self._group = group
        self._arena = arena
        self._weights = weights
        self._sums = _Sums(weights)
        self._device = group.device if group else next(iter(weights.values())).device
        # A stream of its own: waiting for it does not wait for the dedicated worker's other work.
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._readers = [number for number, worker in schedule.workers.items() if worker.gpu == gpu]
        self.memory = SharedMemory(schedule.body_bytes.get(gpu, 0), f"mrl-exchange-{gpu}", self._device)
        self.pace = Pace(SharedMemory(Pace.num_bytes(len(self._readers)), f"mrl-pace-{gpu}", _HOST), gpu)
        sent = schedule.sent_by(gpu)
        most = max(sum(delivery.message.num_bytes for delivery in deliveries) for deliveries in sent)
        buffer = torch.empty(most, dtype=torch.uint8, device=self.memory.tensor.device)
        self._outgoing = [self._pack(sent[0], buffer)]
        own_class = schedule.source_class.get(gpu, -1)
        self._own: list[Callable[[], None]] = []
        for worker in schedule.workers_on(gpu):
            copies = schedule.classes[worker.class_index].own
            out = bytes_as(self.memory.tensor, worker.checksums_base, (len(copies),), torch.int64)
            self._own.append(self._sums.prepare(copies, own_class, out))
        self._outgoing += [self._pack(deliveries, buffer) for deliveries in sent[1:]]
        self._incoming: list[list[Incoming]] = []
        for deliveries in schedule.received_on(gpu):
            views = [self.memory.tensor[item.offset : item.offset + item.message.num_bytes] for item in deliveries]
            self._incoming.append(
                [Incoming(item.rank, self._traveling(item, view)) for item, view in zip(deliveries, views, strict=True)]
            )
        assert group is not None or not any(self._outgoing + self._incoming), "messages need a group"

    def handles(self) -> GpuHandles:
        """The handles by which this GPU's engine workers pull."""
        if self._arena is None:
            return GpuHandles(self.gpu, None, None, None)
        pace = self.pace.memory
        assert isinstance(pace, SharedMemory), "the exchange owns its words"
        return GpuHandles(self.gpu, self._arena, self.memory.handle(), pace.handle())

    def leave(self, attempt: int) -> None:
        """Leaves the group and any attempt in another thread. Not collective; the exchange then needs another group."""
        self.pace.give_up(attempt)
        if self._group is not None:
            self._group.close()

    def join(self, group: ExchangeGroup | None) -> None:
        """Replaces its group, if any, by another of the same participants. Keeps memory and prepared copies."""
        if self._group is not None:
            self._group.close()
        self._group = group

    def run(self, attempt: int, readers: Collection[int], *, timeout_s: float) -> None:
        """Fills the exchange memory with all rounds of a refit attempt, each when the `readers` (workers) have room.

        Every participant calls it, with settled weights and a higher number than any earlier attempt. RefitError: a
        peer or a reader did not keep up within `timeout_s`, or the driver abandoned the attempt; this participant has
        then left its group.
        """
        deadline = time.monotonic() + timeout_s
        rows = {row: worker for row, worker in enumerate(self._readers) if worker in readers}
        self.begin(attempt)
        try:
            with self._group.watched(attempt, partial(self.leave, attempt)) if self._group else nullcontext():
                for round_index in range(len(self._incoming)):
                    for row, worker in rows.items() if round_index >= NUM_BUFFERS else ():
                        self.pace.wait_until_read(row, worker, round_index + 1 - NUM_BUFFERS, deadline)
                    self.fill(round_index, deadline)
        except BaseException:
            self.leave(attempt)
            raise

    def begin(self, attempt: int) -> None:
        """Begins an attempt: none of its rounds is ready yet, and workers may wake their weights."""
        if self._stream is not None:
            torch.cuda.synchronize(self._device)
        self.pace.begin(attempt)

    def fill(self, round_index: int, deadline: float) -> None:
        """Writes the messages and checksums of one round. Its workers must have read the buffer's earlier content."""
        outgoing, incoming = self._outgoing[round_index], self._incoming[round_index]
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            if self._group is not None and (outgoing or incoming):
                own = partial(self._write_own_checksums, round_index)
                self._group.run(outgoing, incoming, what=f"round {round_index}", meanwhile=own, deadline=deadline)
            else:
                self._write_own_checksums(round_index)
            wait_for(self._device)
        self.pace.filled(round_index + 1)

    def _write_own_checksums(self, round_index: int) -> None:
        for write in self._own if round_index == 0 else ():
            write()

    def _pack(self, deliveries: Sequence[Delivery], buffer: Tensor) -> list[Outgoing]:
        outgoing, start = [], 0
        for delivery in deliveries:
            message = delivery.message
            view = buffer[start : start + message.num_bytes]
            start += message.num_bytes
            packing = []
            if not reads_arena(delivery, self._device):
                for copy, offset in zip(message.copies, message.copy_offsets, strict=True):
                    slot, box, dtype = copy.holders[delivery.source_class]
                    target = bytes_as(view, offset, lengths(box), torch_dtype(dtype))
                    packing.append(TensorCopy(target, box_view(self._weights[slot], box)))
            checksums = bytes_as(view, message.checksums_offset, (len(message.copies),), torch.int64)
            steps = (Copies(packing).run, self._sums.prepare(message.copies, delivery.source_class, checksums))
            outgoing.append(Outgoing(delivery.gpu, self._traveling(delivery, view), partial(_run_all, steps)))
        return outgoing

    def _traveling(self, delivery: Delivery, view: Tensor) -> Tensor:
        return view[delivery.message.checksums_offset :] if reads_arena(delivery, self._device) else view


def _run_all(steps: Sequence[Callable[[], None]]) -> None:
    for step in steps:
        step()
