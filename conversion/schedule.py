"""What a reshard is made of, as plain data: lists of copies by class of equal engine workers, and the part of each participant.

Standard library only. `conversion.reshard` makes schedules; `mrl.refit` carries them out.
"""

from __future__ import annotations

import pickle
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from conversion.boxes import DTYPE_BYTES, Box, Slot, volume

ALIGNMENT = 64
"""Bytes to which every box in an exchange buffer is aligned: a cache line, and more than any dtype needs."""
CHECKSUM_BYTES = 8

# Tensors of a line of the log.
_MAX_NAMED = 6

Link = Literal["unit", "node", "network"]
"""How far a copy goes: out of memory of the worker's own unit, from another unit of its node, from another node."""


def align(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """`num_bytes` rounded up to a multiple of `alignment`."""
    return -(-num_bytes // alignment) * alignment


class Holding(NamedTuple):
    """Where a source keeps a box of a canonical tensor."""

    slot: Slot
    box: Box
    dtype: str


class Copy(NamedTuple):
    """One box of an engine worker; the same for all workers of a class."""

    target: Slot
    box: Box
    dtype: str
    transform: str | None
    holders: Mapping[int, Holding]
    """By source class: where its ranks keep the box."""
    num_bytes: int
    """In the source's dtype."""
    offset: int
    """In bytes from the start of its message."""
    row: int
    """In the checksums of its message."""

    def transfer(self, source_class: int) -> Transfer:
        """This copy as a rank of a source class sees it."""
        slot, box, dtype = self.holders[source_class]
        return Transfer(slot, box, dtype, self.offset, self.num_bytes, self.row, self.dtype, self.transform)


class Message(NamedTuple):
    """What one source sends to one worker in one round: boxes at aligned offsets, then their checksums (int64)."""

    round: int
    offset: int
    """In bytes from the start of the worker's region of the exchange buffer."""
    checksums_offset: int
    """In bytes from the start of the message."""
    num_bytes: int
    copies: tuple[Copy, ...]


@dataclass(frozen=True)
class Lane:
    """What one source sends to one worker of a class over all rounds."""

    messages: tuple[Message, ...]
    """By round; rounds in which nothing is sent are absent."""

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of its boxes."""
        return sum(copy.num_bytes for copy in self.copies())

    def copies(self) -> Iterator[Copy]:
        """Over all rounds."""
        return (copy for message in self.messages for copy in message.copies)

    # The driver pickles a lane for each rank and worker that takes part in it, thousands of times: once is enough.
    @cached_property
    def _pickled(self) -> bytes:
        return pickle.dumps(_PlainLane(self.messages), protocol=5)

    def __reduce__(self) -> tuple[object, tuple[bytes]]:
        return pickle.loads, (self._pickled,)


@dataclass(frozen=True)
class _PlainLane:
    """Unpickles as a Lane of these messages."""

    messages: tuple[Message, ...]

    def __reduce__(self) -> tuple[object, tuple[tuple[Message, ...]]]:
        return Lane, (self.messages,)


class Transfer(NamedTuple):
    """A box that a rank sends: raw bytes in its own dtype, C order. Its checksum is taken of what the worker makes of it."""

    slot: Slot
    box: Box
    dtype: str
    offset: int
    """In bytes from the start of the message."""
    num_bytes: int
    row: int
    """In the message's checksums."""
    target_dtype: str
    transform: str | None


class Pull(NamedTuple):
    """A box that an engine worker copies: out of the arena of the rank on its own unit, or out of its unit's exchange memory."""

    origin: Literal["arena", "exchange"]
    source_rank: int
    source_slot: Slot
    source_box: Box
    source_dtype: str
    offset: int
    """In bytes from the start of the exchange memory's body; 0 where the origin is the arena."""
    target: Slot
    target_box: Box
    target_dtype: str
    transform: str | None
    checksum_offset: int
    """In bytes from the start of the exchange memory's body."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it writes."""
        return volume(self.target_box) * DTYPE_BYTES[self.target_dtype]


@dataclass(frozen=True)
class Timetable:
    """When the messages of a worker travel: message round `i` in round `i * stride + phase` of the refit."""

    phase: int
    stride: int

    def round(self, message_round: int) -> int:
        """The round of the refit in which a message round travels."""
        return message_round * self.stride + self.phase

    def message_round(self, round: int) -> int | None:
        """The message round that travels in a round of the refit, or None."""
        index, rest = divmod(round - self.phase, self.stride)
        return index if rest == 0 and index >= 0 else None


@dataclass(frozen=True)
class Route:
    """A lane between two units. Both ends keep their routes in the same order, which is the order of messages between them."""

    lane: Lane
    peer: int
    """Unit at the other end."""
    can_map: bool
    """Both units are on one node and have trainer ranks, so a worker may read the sender's arena where processes of a node can map it."""
    source_class: int
    timetable: Timetable
    base: int
    """Start of the worker's region in the body of its unit's exchange memory, in bytes."""

    @cached_property
    def _by_round(self) -> dict[int, Message]:
        return {message.round: message for message in self.lane.messages}

    def message(self, round: int) -> Message | None:
        """What travels in a round of the refit."""
        index = self.timetable.message_round(round)
        return None if index is None else self._by_round.get(index)


@dataclass(frozen=True)
class LocalCopies:
    """What a worker reads straight out of the arena of its unit's rank, all in round 0; that rank takes the checksums."""

    copies: Lane
    source_class: int
    checksums_base: int
    """Start of their checksums in the body of the exchange memory, in bytes."""


@dataclass(frozen=True)
class RankPart:
    """All that the exchange of one unit needs: of a trainer rank, or of a dedicated engine worker, which only receives."""

    rank: int
    num_rounds: int
    sends: tuple[Route, ...]
    receives: tuple[Route, ...]
    locals: tuple[LocalCopies, ...]
    body_bytes: int
    """Size of the unit's exchange memory: checksums of local copies, then one region for each worker. 0 without workers."""

    def outgoing(self, round: int) -> list[tuple[Route, Message]]:
        """Messages that leave in a round."""
        return [(route, message) for route in self.sends if (message := route.message(round))]

    def incoming(self, round: int) -> list[tuple[Route, Message]]:
        """Messages that arrive in a round."""
        return [(route, message) for route in self.receives if (message := route.message(round))]

    def packed_bytes(self) -> int:
        """Most bytes that leave in one round."""
        sizes = [0] * self.num_rounds
        for route in self.sends:
            for message in route.lane.messages:
                sizes[route.timetable.round(message.round)] += message.num_bytes
        return max(sizes)


@dataclass(frozen=True)
class WorkerPart:
    """All that the pulls of one engine worker need."""

    unit: int
    num_rounds: int
    receives: tuple[Route, ...]
    local: LocalCopies
    padding: Mapping[Slot, tuple[Box, ...]]
    """Boxes that no copy writes; they are zero."""

    def pulls(self, round: int) -> list[Pull]:
        """What the worker copies in a round."""
        pulls = [self._local_pull(copy) for copy in self.local.copies.copies()] if round == 0 else []
        for route in self.receives:
            if message := route.message(round):
                pulls += _pulls(route, message)
        return pulls

    def all_pulls(self) -> list[list[Pull]]:
        """Those of every round."""
        return [self.pulls(round) for round in range(self.num_rounds)]

    def _local_pull(self, copy: Copy) -> Pull:
        slot, box, dtype = copy.holders[self.local.source_class]
        checksum_offset = self.local.checksums_base + CHECKSUM_BYTES * copy.row
        return Pull("arena", self.unit, slot, box, dtype, 0, copy.target, copy.box, copy.dtype, copy.transform, checksum_offset)


def _pulls(route: Route, message: Message) -> Iterator[Pull]:
    start = route.base + message.offset
    checksums = start + message.checksums_offset
    for copy in message.copies:
        slot, box, dtype = copy.holders[route.source_class]
        target = (copy.target, copy.box, copy.dtype, copy.transform)
        yield Pull("exchange", route.peer, slot, box, dtype, start + copy.offset, *target, checksums + CHECKSUM_BYTES * copy.row)


@dataclass(frozen=True)
class TargetClass:
    """The copies of all workers that have one layout, one source class on their unit, and the same source classes on their node."""

    local: Lane
    lanes: tuple[Lane, ...]
    """Each may come from any one rank that holds all of it."""
    links: tuple[Link, ...]
    """How far each lane goes."""
    padding: Mapping[Slot, tuple[Box, ...]]
    num_rounds: int
    region_bytes: int
    """What its messages need of the exchange memory, in the largest round."""

    @cached_property
    def written_bytes(self) -> int:
        """Bytes that a worker writes over all rounds, without padding."""
        every = [copy for lane in (self.local, *self.lanes) for copy in lane.copies()]
        return sum(volume(copy.box) * DTYPE_BYTES[copy.dtype] for copy in every)

    @cached_property
    def num_copies(self) -> int:
        """Copies of a worker, local ones included."""
        return sum(len(message.copies) for lane in (self.local, *self.lanes) for message in lane.messages)


@dataclass(frozen=True)
class Assignment:
    """One engine worker: its unit, its class, and the rank from which each lane of the class comes."""

    unit: int
    class_index: int
    ranks: tuple[int, ...]
    timetable: Timetable
    checksums_base: int
    region_base: int


@dataclass(frozen=True)
class Schedule:
    """All copies of a reshard. Made by `conversion.reshard.reshard`; participants get their part only."""

    num_rounds: int
    classes: tuple[TargetClass, ...]
    source_class: Mapping[int, int]
    """Class of each source rank: ranks of one class hold the same."""
    assignments: Mapping[int, Assignment]
    """By engine worker."""
    body_bytes: Mapping[int, int]
    """Size of the exchange memory of each unit that has workers."""

    def rank_part(self, rank: int) -> RankPart:
        """What the exchange of a unit needs: that of a trainer rank, or of a dedicated engine worker."""
        receives, locals = [], []
        for target in self._targets_of.get(rank, ()):
            assignment = self.assignments[target]
            receives += self._receives(assignment)
            local = self._local(assignment)
            if local.copies.messages:
                locals.append(local)
        sends = [self._send(target, lane_index) for target, lane_index in self._lanes_from.get(rank, ())]
        return RankPart(rank, self.num_rounds, tuple(sends), tuple(receives), tuple(locals), self.body_bytes.get(rank, 0))

    def worker_part(self, target: int) -> WorkerPart:
        """What the pulls of an engine worker need."""
        assignment = self.assignments[target]
        padding = self.classes[assignment.class_index].padding
        return WorkerPart(assignment.unit, self.num_rounds, self._receives(assignment), self._local(assignment), padding)

    def copied_bytes(self, target: int) -> int:
        """Bytes that a worker writes over all rounds, without padding."""
        return self.classes[self.assignments[target].class_index].written_bytes

    def link_bytes(self) -> dict[Link, int]:
        """Bytes that move over each kind of link in a refit, over all workers, in the sources' dtypes."""
        moved: dict[Link, int] = {"unit": 0, "node": 0, "network": 0}
        for assignment in self.assignments.values():
            found = self.classes[assignment.class_index]
            moved["unit"] += found.local.num_bytes
            for lane, link in zip(found.lanes, found.links, strict=True):
                moved[link] += lane.num_bytes
        return moved

    def sent_bytes(self) -> dict[int, int]:
        """Bytes that each source rank sends to other units in a refit."""
        sent = dict.fromkeys(self.source_class, 0)
        for assignment in self.assignments.values():
            for lane, rank in zip(self.classes[assignment.class_index].lanes, assignment.ranks, strict=True):
                sent[rank] += lane.num_bytes
        return sent

    @property
    def summary(self) -> str:
        """One line for the log."""
        num_copies = sum(self.classes[assignment.class_index].num_copies for assignment in self.assignments.values())
        moved = {link: f"{num_bytes / 2**20:.1f} MiB" for link, num_bytes in self.link_bytes().items()}
        memory = max(self.body_bytes.values(), default=0) / 2**20
        return (
            f"{num_copies} copies to {len(self.assignments)} engine workers in {self.num_rounds} rounds: {moved['unit']} from their own "
            f"units, {moved['node']} within nodes, {moved['network']} between nodes, exchange memory {memory:.1f} MiB"
        )

    def casts(self) -> list[str]:
        """Lines for the log: which tensors the engines keep in another dtype than the trainer, and which of them they round."""
        names: dict[tuple[str, str], set[str]] = defaultdict(set)
        for found in self.classes:
            for copy in (copy for lane in (found.local, *found.lanes) for copy in lane.copies()):
                source = next(iter(copy.holders.values())).dtype
                if source != copy.dtype:
                    names[source, copy.dtype].add(re.sub(r"\d+", "*", copy.target.name, count=1))
        return [_cast_line(source, target, sorted(kinds)) for (source, target), kinds in sorted(names.items())]

    @cached_property
    def _targets_of(self) -> dict[int, list[int]]:
        found = defaultdict(list)
        for target, assignment in sorted(self.assignments.items()):
            found[assignment.unit].append(target)
        return dict(found)

    @cached_property
    def _lanes_from(self) -> dict[int, list[tuple[int, int]]]:
        """By rank: the (target, lane) pairs that it sends, in order."""
        found = defaultdict(list)
        for target, assignment in sorted(self.assignments.items()):
            for lane_index, rank in enumerate(assignment.ranks):
                found[rank].append((target, lane_index))
        return dict(found)

    def _receives(self, assignment: Assignment) -> tuple[Route, ...]:
        found = self.classes[assignment.class_index]
        return tuple(
            Route(lane, rank, self._can_map(assignment, link), self.source_class[rank], assignment.timetable, assignment.region_base)
            for lane, link, rank in zip(found.lanes, found.links, assignment.ranks, strict=True)
        )

    def _send(self, target: int, lane_index: int) -> Route:
        assignment = self.assignments[target]
        found, rank = self.classes[assignment.class_index], assignment.ranks[lane_index]
        lane, can_map = found.lanes[lane_index], self._can_map(assignment, found.links[lane_index])
        return Route(lane, assignment.unit, can_map, self.source_class[rank], assignment.timetable, assignment.region_base)

    def _can_map(self, assignment: Assignment, link: Link) -> bool:
        return link == "node" and assignment.unit in self.source_class

    def _local(self, assignment: Assignment) -> LocalCopies:
        own = self.source_class.get(assignment.unit, -1)
        return LocalCopies(self.classes[assignment.class_index].local, own, assignment.checksums_base)


def _cast_line(source: str, target: str, kinds: list[str]) -> str:
    named = ", ".join(kinds[:_MAX_NAMED]) + (f" and {len(kinds) - _MAX_NAMED} more" if len(kinds) > _MAX_NAMED else "")
    verb = "round to" if DTYPE_BYTES[target] < DTYPE_BYTES[source] else "keep as"
    return f"Engines {verb} {target} what the trainer holds as {source}: {named}"
