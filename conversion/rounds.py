"""Cuts what a class of engine workers receives into rounds and messages that fit the exchange buffers. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from conversion.boxes import DTYPE_BYTES, Box, Slot, lengths, place, volume
from conversion.schedule import ALIGNMENT, CHECKSUM_BYTES, Copy, Holding, Lane, Message, align

MIN_BUFFER_BYTES = 2 * ALIGNMENT
"""Room for the smallest message: a box and its checksum."""

# Boxes are cut so that a buffer holds at least this many: otherwise rounds fill badly, and one source sends while the others wait.
_BOXES_PER_BUFFER = 64
_CHECKSUMS_PER_BLOCK = ALIGNMENT // CHECKSUM_BYTES


class Fragment(NamedTuple):
    """Part of a tensor of a worker that some sources hold as one box; the same for all workers of one layout."""

    slot: Slot
    box: Box
    dtype: str
    transform: str | None
    holders: Mapping[int, Holding]
    """By source class."""
    num_bytes: int
    """In the sources' dtype."""


def split_fragment(fragment: Fragment, buffer_bytes: int) -> list[Fragment]:
    """The fragment in parts that several of fit one buffer."""
    max_bytes = max(ALIGNMENT, buffer_bytes // _BOXES_PER_BUFFER // ALIGNMENT * ALIGNMENT)
    if fragment.num_bytes <= max_bytes:
        return [fragment]
    element = DTYPE_BYTES[next(iter(fragment.holders.values())).dtype]
    fragments = []
    for box in split(fragment.box, max_bytes // element):
        parts: dict[Holding, Holding] = {}
        for holding in fragment.holders.values():
            parts[holding] = holding._replace(box=part_of(holding.box, fragment.box, box))
        holders = {source_class: parts[holding] for source_class, holding in fragment.holders.items()}
        fragments.append(fragment._replace(box=box, holders=holders, num_bytes=volume(box) * element))
    return fragments


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


def part_of(other: Box, box: Box, part: Box) -> Box:
    """The part of `other` that corresponds to `part` of `box`; either may have leading dimensions of length 1."""
    num_shared = min(len(part), len(other))
    assert lengths(other)[-num_shared:] == lengths(box)[-num_shared:], (other, box)
    return place(part[-num_shared:], box[-num_shared:], other)


def local_lane(fragments: Sequence[Fragment]) -> Lane:
    """What a worker reads out of its own unit's arena: one message that is never sent."""
    copies = tuple(Copy(*fragment, 0, row) for row, fragment in enumerate(fragments))
    return Lane((Message(0, 0, 0, CHECKSUM_BYTES * len(copies), copies),) if copies else ())


class Cuts(NamedTuple):
    """Where the rounds of a class of workers end."""

    counts: list[list[int]]
    """By round and bin: how many fragments travel."""
    num_bytes: list[list[int]]
    """By bin and round: size of the message."""
    largest: int
    """Bytes of the largest round."""


def interleave(bins: Sequence[Sequence[Fragment]]) -> list[tuple[int, int]]:
    """(bin, aligned size) of every fragment, such that every stretch of the list takes an equal share of every bin."""
    order: list[tuple[float, int, int]] = []
    for index, fragments in enumerate(bins):
        total = sum(fragment.num_bytes for fragment in fragments)
        before = 0
        for fragment in fragments:
            num_bytes = fragment.num_bytes
            order.append(((before + num_bytes / 2) / total, index, align(num_bytes)))
            before += num_bytes
    # Positions within a bin only grow, so the order within each bin stays.
    order.sort()
    return [(index, size) for _, index, size in order]


def cut(order: Sequence[tuple[int, int]], num_bins: int, region_bytes: int) -> Cuts:
    """Rounds of at most `region_bytes`, checksums included, that follow the order of `interleave`."""
    counts: list[list[int]] = []
    sizes: list[list[int]] = []
    used = region_bytes
    for index, size in order:
        # Checksums of eight boxes fill one aligned block.
        more = size + ALIGNMENT if not counts or counts[-1][index] % _CHECKSUMS_PER_BLOCK == 0 else size
        if used + more > region_bytes:
            counts.append([0] * num_bins)
            sizes.append([0] * num_bins)
            used, more = 0, size + ALIGNMENT
        used += more
        counts[-1][index] += 1
        sizes[-1][index] += more
    by_bin = [list(column) for column in zip(*sizes, strict=True)] if sizes else [[] for _ in range(num_bins)]
    return Cuts(counts, by_bin, max(map(sum, sizes), default=0))


def lanes(bins: Sequence[Sequence[Fragment]], cuts: Cuts) -> tuple[Lane, ...]:
    """The messages of each bin. Those of a round lie one after the other in the receiver's buffer: each arrives where it is read."""
    messages: list[list[Message]] = [[] for _ in bins]
    positions = [0] * len(bins)
    for round, by_bin in enumerate(cuts.counts):
        end = 0
        for index, count in enumerate(by_bin):
            if count:
                start = positions[index]
                messages[index].append(_message(round, end, bins[index][start : start + count]))
                positions[index] += count
                end += messages[index][-1].num_bytes
    return tuple(Lane(tuple(lane)) for lane in messages)


def _message(round: int, offset: int, fragments: Sequence[Fragment]) -> Message:
    copies, end = [], 0
    for row, (slot, box, dtype, transform, holders, num_bytes) in enumerate(fragments):
        copies.append(Copy(slot, box, dtype, transform, holders, num_bytes, end, row))
        end += align(num_bytes)
    return Message(round, offset, end, end + align(CHECKSUM_BYTES * len(copies)), tuple(copies))
