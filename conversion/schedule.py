# SPDX-License-Identifier: Apache-2.0
"""A reshard's schedule as plain data: for each class of equal engine workers, the copies that fill it, and messages.

A source is a trainer rank. A copy fills one box of an engine worker from a box of a source. A message carries copies
from one source to one worker in one round. A GPU has the number of the trainer rank on it; GPUs of dedicated engines
are numbered behind the last rank. (On hosts without GPUs, read "process" for GPU.) Standard library only:
`conversion.reshard` makes schedules, `mrl.refit` carries them out.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from conversion.boxes import DTYPE_BYTES, Box, Slot, align, volume
from conversion.texts import listed

CHECKSUM_BYTES = 8

NUM_BUFFERS = 2
"""Rounds whose messages have room in an exchange memory at the same time: one arrives while workers read the one
before.
"""


Link = Literal["gpu", "node", "network"]
"""Distance of a copy: from memory of the worker's own GPU, from another GPU of its node, from another node."""


class Holding(NamedTuple):
    """Place of a box of a canonical tensor in a source."""

    slot: Slot
    box: Box
    dtype: str


class Copy(NamedTuple):
    """One box of an engine worker, and the places of its values in the sources; the same for all workers of a class."""

    target: Slot
    box: Box
    dtype: str
    transform: str | None
    holders: Mapping[int, Holding]
    """Place of the box on its ranks, by source class."""
    num_bytes: int


class Message(NamedTuple):
    """Data from one source to one worker in one round: boxes at aligned offsets, then their checksums (int64)."""

    round: int
    offset: int
    copies: tuple[Copy, ...]

    @property
    def copy_offsets(self) -> list[int]:
        """The start of each copy, in bytes from the start of the message."""
        return list(accumulate((align(copy.num_bytes) for copy in self.copies[:-1]), initial=0))

    @property
    def checksums_offset(self) -> int:
        """The start of the checksums, in bytes from the start of the message."""
        return sum(align(copy.num_bytes) for copy in self.copies)

    @property
    def num_bytes(self) -> int:
        return self.checksums_offset + align(CHECKSUM_BYTES * len(self.copies))


class Source(NamedTuple):
    """Messages from one source to workers of a class. Any rank that holds all of it may send it."""

    link: Link
    messages: tuple[Message, ...]
    """Messages by round; rounds without one are absent."""


@dataclass(frozen=True)
class WorkerClass:
    """Copies of all workers with one layout, one source class on their GPU, and equal source classes on their node."""

    own: tuple[Copy, ...]
    """Copied in round 0 out of the arena of the rank on the worker's GPU, which takes their checksums."""
    sources: tuple[Source, ...]
    padding: Mapping[Slot, tuple[Box, ...]]
    """Boxes that no copy writes; they are zero."""
    num_rounds: int
    region_bytes: int
    """Exchange memory that its messages need, in the largest round."""

    def copies(self) -> Iterator[Copy]:
        yield from self.own
        for source in self.sources:
            for message in source.messages:
                yield from message.copies

    @cached_property
    def written_bytes(self) -> int:
        """Bytes that a worker writes over all rounds, without padding."""
        return sum(volume(copy.box) * DTYPE_BYTES[copy.dtype] for copy in self.copies())

    @cached_property
    def own_bytes(self) -> int:
        """Bytes of its own copies, in the sources' dtypes."""
        return sum(copy.num_bytes for copy in self.own)

    @cached_property
    def sent_bytes(self) -> tuple[int, ...]:
        """Bytes that each source sends over all rounds, without checksums."""
        return tuple(
            sum(copy.num_bytes for message in source.messages for copy in message.copies) for source in self.sources
        )


@dataclass(frozen=True)
class EngineWorker:
    """One engine worker: its GPU, its class, and the rank behind each source of the class."""

    gpu: int
    class_index: int
    ranks: tuple[int, ...]
    turn: int
    """Workers that one rank cannot serve at the same time take turns: message round `i` travels in round
    `i * num_turns + turn`.
    """
    num_turns: int
    checksums_base: int
    """Start of the checksums of its own copies in the body of its GPU's exchange memory, in bytes."""
    region_base: int
    """Start of its messages' regions there: one for each of `NUM_BUFFERS` rounds, used in turn."""


class Delivery(NamedTuple):
    """One message from its sender to its receiver."""

    round: int
    rank: int
    source_class: int
    gpu: int
    offset: int
    can_map: bool
    """Rank and GPU are on one node and the GPU has a trainer rank, so a worker may read the sender's arena where
    processes can map it.
    """
    message: Message


class Pull(NamedTuple):
    """One copy as its worker executes it."""

    copy: Copy
    rank: int
    holding: Holding
    offset: int | None
    """Bytes from the start of the exchange memory's body; None: the worker reads the arena of the rank on its
    own GPU.
    """
    checksum_offset: int
    """Bytes from the start of the exchange memory's body."""


@dataclass(frozen=True)
class Schedule:
    """All copies of a reshard. Made by `conversion.reshard.reshard`."""

    num_rounds: int
    classes: tuple[WorkerClass, ...]
    source_class: Mapping[int, int]
    """Class of each source rank: ranks of one class hold the same."""
    workers: Mapping[int, EngineWorker]
    body_bytes: Mapping[int, int]
    """Body of the exchange memory of each GPU that has workers: checksums of own copies, then the regions of each
    worker.
    """

    def class_of(self, worker: int) -> WorkerClass:
        return self.classes[self.workers[worker].class_index]

    def sent_by(self, rank: int) -> list[list[Delivery]]:
        """Lists messages that leave a rank, by round. Both ends list the messages between them in the same order."""
        return self._by_round(
            self._deliveries(worker, rank) for worker in self.workers.values() if rank in worker.ranks
        )

    def received_on(self, gpu: int) -> list[list[Delivery]]:
        """Lists the messages that arrive on a GPU, by round; see `sent_by`."""
        return self._by_round(self._deliveries(worker) for worker in self.workers_on(gpu))

    def workers_on(self, gpu: int) -> list[EngineWorker]:
        return [worker for worker in self.workers.values() if worker.gpu == gpu]

    def mappable_ranks(self, worker: int) -> set[int]:
        """Ranks of other GPUs whose arenas a worker may read; see `Delivery.can_map`."""
        return {delivery.rank for delivery in self._deliveries(self.workers[worker]) if delivery.can_map}

    def pulls(self, worker: int) -> list[list[Pull]]:
        """Lists the copies of an engine worker, by round."""
        found, own = self.workers[worker], self.class_of(worker).own
        pulls: list[list[Pull]] = [[] for _ in range(self.num_rounds)]
        for row, copy in enumerate(own):
            holding = copy.holders[self.source_class[found.gpu]]
            pulls[0].append(Pull(copy, found.gpu, holding, None, found.checksums_base + CHECKSUM_BYTES * row))
        for item in self._deliveries(found):
            message, checksums = item.message, item.offset + item.message.checksums_offset
            for row, (copy, offset) in enumerate(zip(message.copies, message.copy_offsets, strict=True)):
                holding = copy.holders[item.source_class]
                pulls[item.round].append(
                    Pull(copy, item.rank, holding, item.offset + offset, checksums + CHECKSUM_BYTES * row)
                )
        return pulls

    def link_bytes(self) -> dict[Link, int]:
        """Bytes that move over each kind of link in a refit, over all workers, in the sources' dtypes."""
        moved: dict[Link, int] = {"gpu": 0, "node": 0, "network": 0}
        for worker in self.workers.values():
            found = self.classes[worker.class_index]
            moved["gpu"] += found.own_bytes
            for source, num_bytes in zip(found.sources, found.sent_bytes, strict=True):
                moved[source.link] += num_bytes
        return moved

    def sent_bytes(self) -> dict[int, int]:
        """Bytes that each source rank sends to other GPUs in a refit."""
        sent = dict.fromkeys(self.source_class, 0)
        for worker in self.workers.values():
            for rank, num_bytes in zip(worker.ranks, self.classes[worker.class_index].sent_bytes, strict=True):
                sent[rank] += num_bytes
        return sent

    @property
    def summary(self) -> str:
        """One line for the log."""
        copies_of = [sum(1 for _ in found.copies()) for found in self.classes]
        num_copies = sum(copies_of[worker.class_index] for worker in self.workers.values())
        moved = {link: f"{num_bytes / 2**20:.1f} MiB" for link, num_bytes in self.link_bytes().items()}
        memory = max(self.body_bytes.values(), default=0) / 2**20
        workers, rounds = len(self.workers), self.num_rounds
        return (
            f"{num_copies} copies to {workers} engine worker{'s' * (workers != 1)} in {rounds} "
            f"round{'s' * (rounds != 1)}: {moved['gpu']} from their own GPUs, {moved['node']} within nodes, "
            f"{moved['network']} between nodes, exchange memory {memory:.1f} MiB"
        )

    def casts(self) -> list[str]:
        """Lines for the log: tensors that engines keep in another dtype than the trainer, and those that they round."""
        names: dict[tuple[str, str], set[str]] = defaultdict(set)
        for found in self.classes:
            for copy in found.copies():
                source = next(iter(copy.holders.values())).dtype
                if source != copy.dtype:
                    names[source, copy.dtype].add(re.sub(r"\d+", "*", copy.target.name, count=1))
        lines = []
        for (source, target), kinds in sorted(names.items()):
            verb = "round to" if DTYPE_BYTES[target] < DTYPE_BYTES[source] else "keep as"
            lines.append(f"Engines {verb} {target} what the trainer holds as {source}: {listed(sorted(kinds))}")
        return lines

    def fingerprint(self) -> str:
        """Digest of the whole schedule: processes with equal digests send and read the same messages."""
        digest = hashlib.sha256(repr((self.num_rounds, self.source_class, self.workers, self.body_bytes)).encode())
        # Classes share most of their copies: each object is written out once, and named by its number from then on.
        numbers: dict[int, int] = {}
        for found in self.classes:
            messages = [(source.link, *message) for source in found.sources for message in source.messages]
            for *head, copies in [(found.padding, found.own), *messages]:
                new = [copy for copy in copies if id(copy) not in numbers]
                numbers |= {id(copy): len(numbers) + index for index, copy in enumerate(new)}
                digest.update(repr((head, [numbers[id(copy)] for copy in copies], new)).encode())
        return digest.hexdigest()

    def _deliveries(self, worker: EngineWorker, rank: int | None = None) -> Iterator[Delivery]:
        found = self.classes[worker.class_index]
        for source, sender in zip(found.sources, worker.ranks, strict=True):
            if rank in (None, sender):
                can_map = source.link == "node" and worker.gpu in self.source_class
                for message in source.messages:
                    round = message.round * worker.num_turns + worker.turn
                    region = worker.region_base + message.round % NUM_BUFFERS * align(found.region_bytes)
                    yield Delivery(
                        round, sender, self.source_class[sender], worker.gpu, region + message.offset, can_map, message
                    )

    def _by_round(self, deliveries: Iterable[Iterable[Delivery]]) -> list[list[Delivery]]:
        rounds: list[list[Delivery]] = [[] for _ in range(self.num_rounds)]
        for of_worker in deliveries:
            for item in of_worker:
                rounds[item.round].append(item)
        return rounds
