"""Schedules: which rank copies which box where, so that target layouts are filled from source layouts. Standard library only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from conversion.boxes import (
    DTYPE_BYTES,
    Box,
    Layout,
    Piece,
    Slot,
    full,
    intersect,
    lengths,
    place,
    subtract,
    tiling_fault,
    uncovered,
    volume,
)

ALIGNMENT = 64
"""Bytes to which every box in an exchange buffer is aligned: a cache line, and more than any dtype needs."""


class ScheduleError(ValueError):
    """Layouts that do not fit together: some element would not be written, would be written twice, or would be lost."""


class Transfer(NamedTuple):
    """A box that `source_rank` sends to the exchange buffer of `unit_rank`: raw bytes in the source's dtype, C order."""

    copy_index: int
    source_rank: int
    unit_rank: int
    slot: Slot
    box: Box
    dtype: str
    offset: int
    """Bytes from the start of the exchange buffer, a multiple of 64."""
    num_bytes: int
    checksum_index: int
    """Row in the checksum table of `unit_rank`."""
    target_dtype: str
    transform: str | None


class Pull(NamedTuple):
    """A box that a target copies: out of the arena of the rank on its own unit, or out of that rank's exchange buffer."""

    copy_index: int
    round: int
    origin: Literal["arena", "exchange"]
    source_rank: int
    source_slot: Slot
    source_box: Box
    source_dtype: str
    offset: int
    """Bytes from the start of the exchange buffer; 0 where the origin is the arena."""
    target: Slot
    target_box: Box
    target_dtype: str
    transform: str | None
    checksum_index: int


@dataclass(frozen=True)
class Schedule:
    """All copies of a reshard, by rank and round. Made by `reshard`; plain data, pickles."""

    num_rounds: int
    _sent: Mapping[tuple[int, int], list[Transfer]]
    _received: Mapping[tuple[int, int], list[Transfer]]
    _pulls: Mapping[tuple[int, int], list[Pull]]
    _arena_pulls: Mapping[tuple[int, int], list[Pull]]
    _padding: Mapping[int, dict[Slot, list[Box]]]
    _num_checksums: Mapping[int, int]
    _exchange_bytes: int

    def transfers(self, source_rank: int, round: int) -> list[Transfer]:
        """What `source_rank` sends in a round."""
        return self._sent.get((source_rank, round), [])

    def receives(self, unit_rank: int, round: int) -> list[Transfer]:
        """What arrives in the exchange buffer of `unit_rank` in a round."""
        return self._received.get((unit_rank, round), [])

    def pulls(self, target: int, round: int) -> list[Pull]:
        """What a target copies in a round."""
        return self._pulls.get((target, round), [])

    def local_checksums(self, unit_rank: int, round: int) -> list[Pull]:
        """The pulls out of the arena of `unit_rank`: no transfer brings their checksums, so that rank takes them itself."""
        return self._arena_pulls.get((unit_rank, round), [])

    def padding(self, target: int) -> dict[Slot, list[Box]]:
        """Boxes of a target that no copy writes; they are zero."""
        return self._padding[target]

    def num_checksums(self, unit_rank: int) -> int:
        """Rows of the checksum table of `unit_rank`, over all rounds."""
        return self._num_checksums.get(unit_rank, 0)

    def copied_bytes(self, target: int) -> int:
        """Bytes that a target writes over all rounds, without padding."""
        return sum(_target_bytes(pull) for round in range(self.num_rounds) for pull in self.pulls(target, round))

    def exchange_bytes(self) -> int:
        """Size of the exchange buffer that every unit rank needs."""
        return self._exchange_bytes

    @property
    def summary(self) -> str:
        """One line for the log."""
        sent = sum(transfer.num_bytes for transfers in self._sent.values() for transfer in transfers)
        local = sum(_target_bytes(pull) for pulls in self._arena_pulls.values() for pull in pulls)
        num_copies = sum(map(len, self._pulls.values()))
        return (
            f"{num_copies} copies to {len(self._padding)} engine workers in {self.num_rounds} rounds: {local / 2**20:.1f} MiB "
            f"from their own units, {sent / 2**20:.1f} MiB between ranks, exchange buffer {self._exchange_bytes / 2**20:.1f} MiB"
        )


class _Holding(NamedTuple):
    """Where a rank keeps a box of a canonical tensor."""

    slot: Slot
    box: Box
    dtype: str


_Holdings = dict[str, dict[Box, dict[int, _Holding]]]
"""Canonical name, box of it, rank. Equal boxes on several ranks are replicas of each other."""


class _Fragment(NamedTuple):
    """Part of a target's piece that lies within one held box; the same for all targets of one layout."""

    slot: Slot
    box: Box
    dtype: str
    transform: str | None
    holders: dict[int, _Holding]


def reshard(sources: Mapping[int, Layout], targets: Mapping[int, Layout], *, unit_of: Mapping[int, int], buffer_bytes: int) -> Schedule:
    """The copies that fill every target (engine worker) from the sources (trainer ranks).

    `unit_of[target]` is the source rank on the same unit: what it holds is copied straight out of its arena. The rest comes from whichever
    replica has sent least so far, in rounds of at most `buffer_bytes` for each unit. Targets with equal layouts should share one Layout
    object: it is then analysed once.

    Raises:
        ScheduleError: an element of a target would not be written exactly once, a box is out of bounds, or a tensor that sources hold is
            read by no target. It names tensor, slot and box.
        ValueError: `buffer_bytes` is too small for a single element.
    """
    if buffer_bytes < ALIGNMENT:
        raise ValueError(f"refit buffer of {buffer_bytes} bytes is too small; it takes at least {ALIGNMENT}")
    holdings = _holdings(sources)
    layouts = {id(layout): layout for layout in targets.values()}
    fragments = {key: _fragments(layout, holdings) for key, layout in layouts.items()}
    _check_all_read(holdings, layouts.values())
    builder = _Builder(sources, buffer_bytes)
    for target, layout in targets.items():
        for fragment in fragments[id(layout)]:
            builder.add(target, unit_of[target], fragment)
    _prove(builder.pulls, targets)
    padding = {
        target: {slot: list(content.padding) for slot, content in layout.items() if content.padding} for target, layout in targets.items()
    }
    return builder.schedule(padding)


def _holdings(sources: Mapping[int, Layout]) -> _Holdings:
    holdings: _Holdings = defaultdict(dict)
    for rank, layout in sources.items():
        for slot, content in layout.items():
            for piece in content.pieces:
                _check_piece(slot, content.shape, piece)
                if piece.transform is not None:
                    raise ScheduleError(
                        f"source {slot} of rank {rank} holds {piece.name} transformed ({piece.transform}); only targets may"
                    )
                replicas = holdings[piece.name].setdefault(piece.box, {})
                replicas.setdefault(rank, _Holding(slot, piece.local, content.dtype))
    return holdings


def _check_piece(slot: Slot, shape: tuple[int, ...], piece: Piece) -> None:
    extra = len(piece.local) - len(piece.box)
    is_same_size = extra >= 0 and lengths(piece.local) == (1,) * extra + lengths(piece.box)
    if not is_same_size or intersect(piece.local, full(shape)) != piece.local:
        raise ScheduleError(f"{slot}: box {piece.box} of {piece.name} does not fit box {piece.local} of shape {shape}")


def _fragments(layout: Layout, holdings: _Holdings) -> list[_Fragment]:
    fragments = []
    for slot, content in layout.items():
        for piece in content.pieces:
            _check_piece(slot, content.shape, piece)
            if piece.name not in holdings:
                raise ScheduleError(f"{slot} needs {piece.name}, which no source holds")
            rest = [piece.box]
            for held_box, holders in holdings[piece.name].items():
                parts = [common for part in rest if (common := intersect(part, held_box)) is not None]
                if parts:
                    for part in parts:
                        target_box = place(part, piece.box, piece.local)
                        part_holders = holders if part == held_box else _narrowed(holders, held_box, part)
                        fragments.append(_Fragment(slot, target_box, content.dtype, piece.transform, part_holders))
                    rest = [left for part in rest for left in subtract(part, held_box)]
            if rest:
                raise ScheduleError(f"{slot} needs box {rest[0]} of {piece.name}, which no source holds")
    return fragments


def _narrowed(holders: dict[int, _Holding], held_box: Box, part: Box) -> dict[int, _Holding]:
    boxes = {box: place(part, held_box, box) for box in {holding.box for holding in holders.values()}}
    return {rank: _Holding(slot, boxes[box], dtype) for rank, (slot, box, dtype) in holders.items()}


def _check_all_read(holdings: _Holdings, layouts: Iterable[Layout]) -> None:
    read: dict[str, set[Box]] = defaultdict(set)
    for layout in layouts:
        for content in layout.values():
            for piece in content.pieces:
                read[piece.name].add(piece.box)
    for name, boxes in holdings.items():
        for box in boxes:
            if box not in read[name] and (rest := uncovered(box, read[name])):
                raise ScheduleError(f"box {rest[0]} of {name} is held by ranks {sorted(boxes[box])[:4]}, but no target reads it")


class _Builder:
    """Chooses a source for each fragment and gives it its place in rounds, buffers and tables."""

    def __init__(self, sources: Iterable[int], buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._sent_bytes = dict.fromkeys(sources, 0)
        self._cursors: dict[int, tuple[int, int]] = {}
        self._num_copies = 0
        self._num_checksums: dict[int, int] = defaultdict(int)
        self._exchange_bytes = 0
        self._sent: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        self._received: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
        self._arena_pulls: dict[tuple[int, int], list[Pull]] = defaultdict(list)
        self.pulls: dict[tuple[int, int], list[Pull]] = defaultdict(list)

    def add(self, target: int, unit: int, fragment: _Fragment) -> None:
        """Copies one fragment to one target."""
        if unit in fragment.holders:
            pull = self._pull(unit, unit, fragment, fragment.holders[unit].box, fragment.box, None)
            self._arena_pulls[unit, 0].append(pull)
            self.pulls[target, 0].append(pull)
            return
        # Ties go to the next rank after the unit, so that units do not all draw on the same replica.
        source = min(fragment.holders, key=lambda rank: (self._sent_bytes[rank], rank < unit, rank))
        _, source_box, dtype = fragment.holders[source]
        for box in split(source_box, self._buffer_bytes // DTYPE_BYTES[dtype]):
            num_bytes = volume(box) * DTYPE_BYTES[dtype]
            position = self._reserve(unit, num_bytes)
            target_box = fragment.box if box is source_box else _part_of(fragment.box, source_box, box)
            pull = self._pull(source, unit, fragment, box, target_box, position)
            self._send(pull, unit, num_bytes)
            self.pulls[target, position[0]].append(pull)

    def schedule(self, padding: dict[int, dict[Slot, list[Box]]]) -> Schedule:
        """Everything added so far."""
        num_rounds = 1 + max((round for round, _ in self._cursors.values()), default=0)
        return Schedule(
            num_rounds,
            dict(self._sent),
            dict(self._received),
            dict(self.pulls),
            dict(self._arena_pulls),
            padding,
            dict(self._num_checksums),
            self._exchange_bytes,
        )

    def _reserve(self, unit: int, num_bytes: int) -> tuple[int, int]:
        """Round and offset of a box in the exchange buffer of a unit."""
        round, offset = self._cursors.get(unit, (0, 0))
        if offset + num_bytes > self._buffer_bytes:
            round, offset = round + 1, 0
        self._exchange_bytes = max(self._exchange_bytes, offset + num_bytes)
        self._cursors[unit] = round, -(-(offset + num_bytes) // ALIGNMENT) * ALIGNMENT
        return round, offset

    def _pull(
        self, source: int, unit: int, fragment: _Fragment, source_box: Box, target_box: Box, position: tuple[int, int] | None
    ) -> Pull:
        """A copy out of the exchange buffer at `position` (round, offset), or out of the arena where that is None."""
        round, offset = position or (0, 0)
        slot, _, dtype = fragment.holders[source]
        pull = Pull(
            copy_index=self._num_copies,
            round=round,
            origin="exchange" if position else "arena",
            source_rank=source,
            source_slot=slot,
            source_box=source_box,
            source_dtype=dtype,
            offset=offset,
            target=fragment.slot,
            target_box=target_box,
            target_dtype=fragment.dtype,
            transform=fragment.transform,
            checksum_index=self._num_checksums[unit],
        )
        self._num_copies += 1
        self._num_checksums[unit] += 1
        return pull

    def _send(self, pull: Pull, unit: int, num_bytes: int) -> None:
        transfer = Transfer(
            copy_index=pull.copy_index,
            source_rank=pull.source_rank,
            unit_rank=unit,
            slot=pull.source_slot,
            box=pull.source_box,
            dtype=pull.source_dtype,
            offset=pull.offset,
            num_bytes=num_bytes,
            checksum_index=pull.checksum_index,
            target_dtype=pull.target_dtype,
            transform=pull.transform,
        )
        self._sent_bytes[pull.source_rank] += num_bytes
        self._sent[pull.source_rank, pull.round].append(transfer)
        self._received[unit, pull.round].append(transfer)


def _part_of(target_box: Box, source_box: Box, part: Box) -> Box:
    """The part of `target_box` that corresponds to `part` of `source_box`; either may have leading dimensions of length 1."""
    num_shared = min(len(part), len(target_box))
    return place(part[-num_shared:], source_box[-num_shared:], target_box)


def split(box: Box, max_elements: int) -> Iterator[Box]:
    """`box` in parts of at most `max_elements` elements, cut along its first dimensions so that parts stay contiguous."""
    if volume(box) <= max_elements:
        yield box
        return
    dim = next(index for index, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    step = max(1, max_elements * (stop - start) // volume(box))
    for low in range(start, stop, step):
        part = (*box[:dim], (low, min(low + step, stop)), *box[dim + 1 :])
        yield from split(part, max_elements)


def _prove(pulls: Mapping[tuple[int, int], list[Pull]], targets: Mapping[int, Layout]) -> None:
    """Raises ScheduleError unless pulls and padding tile every slot of every target. Looks only at the final copies."""
    written: dict[int, dict[Slot, list[Box]]] = {target: defaultdict(list) for target in targets}
    for (target, _), copies in pulls.items():
        for pull in copies:
            written[target][pull.target].append(pull.target_box)
    proven: dict[tuple[int, Slot], list[Box]] = {}
    for target, layout in targets.items():
        for slot, content in layout.items():
            boxes = sorted([*written[target][slot], *content.padding])
            if proven.get((id(layout), slot)) == boxes:
                continue
            fault = tiling_fault(content.shape, boxes)
            if fault is not None:
                names = ", ".join(sorted({piece.name for piece in content.pieces})[:4])
                raise ScheduleError(f"{slot} of engine worker {target} (made of {names}): {fault}")
            proven[id(layout), slot] = boxes


def _target_bytes(pull: Pull) -> int:
    return volume(pull.target_box) * DTYPE_BYTES[pull.target_dtype]
