# SPDX-License-Identifier: Apache-2.0
"""Cuts copies to engine workers into rounds and messages that fit the exchange buffers. Standard library only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add
from typing import NamedTuple

from conversion.boxes import ALIGNMENT, DTYPE_BYTES, Box, Layout, align, lengths, place, volume
from conversion.schedule import CHECKSUM_BYTES, Copy, Holding, Link, Message, Source, WorkerClass

MIN_BUFFER_BYTES = 2 * ALIGNMENT
"""Room for the smallest message: a box and its checksum."""

# Boxes are cut so that a buffer holds at least this many: otherwise rounds fill badly, and one source sends while the
# others wait.
_BOXES_PER_BUFFER = 64
_CHECKSUMS_PER_BLOCK = ALIGNMENT // CHECKSUM_BYTES
# Rounds are cut again, smaller, where some rank would send more than its buffer holds; below this part of the buffer
# workers take turns.
_LEAST_CAPACITY = 0.5


@dataclass
class Bin:
    """Copies that one source may send together: every rank of every candidate class holds all of them."""

    link: Link
    candidates: frozenset[int]
    copies: list[Copy] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, copy: Copy) -> None:
        """Appends a copy."""
        self.copies.append(copy)
        self.num_bytes += copy.num_bytes


@dataclass(frozen=True)
class Draft:
    """A class of workers before its rounds are cut."""

    layout: Layout
    own: list[Copy]
    bins: list[Bin]
    num_shares: int
    """Workers that share the buffer of one GPU."""


Turns = tuple[int, Mapping[int, int]]
"""Number of turns, and the turn of each worker: workers that one rank cannot serve at the same time receive one after
the other.
"""


class _Cuts(NamedTuple):
    counts: list[list[int]]
    """Number of copies, by round and bin."""
    num_bytes: list[list[int]]
    """Size of the message, by bin and round."""
    largest: int


def split_copy(copy: Copy, buffer_bytes: int) -> list[Copy]:
    """Splits a copy into parts, so small that several fit one buffer."""
    max_bytes = max(ALIGNMENT, buffer_bytes // _BOXES_PER_BUFFER // ALIGNMENT * ALIGNMENT)
    if copy.num_bytes <= max_bytes:
        return [copy]
    element = DTYPE_BYTES[next(iter(copy.holders.values())).dtype]
    copies = []
    for box in split(copy.box, max_bytes // element):
        parts: dict[Holding, Holding] = {}
        for holding in copy.holders.values():
            shared = min(len(box), len(holding.box))
            assert lengths(holding.box)[-shared:] == lengths(copy.box)[-shared:], (holding, copy.box)
            parts[holding] = holding._replace(box=place(box[-shared:], copy.box[-shared:], holding.box))
        holders = {source_class: parts[holding] for source_class, holding in copy.holders.items()}
        copies.append(copy._replace(box=box, holders=holders, num_bytes=volume(box) * element))
    return copies


def split(box: Box, max_elements: int) -> Iterator[Box]:
    """`box` in parts of at most `max_elements`, cut along its first dimensions so that parts stay contiguous."""
    if volume(box) <= max_elements:
        yield box
        return
    dim = next(index for index, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    step = max(1, max_elements * (stop - start) // volume(box))
    for low in range(start, stop, step):
        part = (*box[:dim], (low, min(low + step, stop)), *box[dim + 1 :])
        yield from split(part, max_elements)


def cut_rounds(
    drafts: Sequence[Draft], class_of: Mapping[int, int], ranks: Mapping[int, Sequence[int]], buffer_bytes: int
) -> tuple[list[WorkerClass], Turns]:
    """Gives the classes their messages: no worker receives and no rank sends more than `buffer_bytes` in a round."""
    orders = [_interleave(draft.bins) for draft in drafts]
    turns: Turns = 1, dict.fromkeys(class_of, 0)
    capacity = buffer_bytes
    while True:
        regions = [max(MIN_BUFFER_BYTES, capacity // draft.num_shares) for draft in drafts]
        cuts = [_cut(order, len(draft.bins), size) for order, draft, size in zip(orders, drafts, regions, strict=True)]
        num_rounds = max((len(found.counts) for found in cuts), default=0)
        padded = [[sizes + [0] * (num_rounds - len(sizes)) for sizes in found.num_bytes] for found in cuts]
        sent: dict[int, list[int]] = {}
        for worker, index in class_of.items():
            for sizes, rank in zip(padded[index], ranks[worker], strict=True):
                sent[rank] = list(map(add, sent[rank], sizes)) if rank in sent else sizes
        most = max((max(sizes) for sizes in sent.values()), default=0)
        if most <= buffer_bytes:
            break
        capacity = int(0.97 * capacity * buffer_bytes / most)
        if capacity < _LEAST_CAPACITY * buffer_bytes:
            cuts = [
                _cut(order, len(draft.bins), buffer_bytes // draft.num_shares)
                for order, draft in zip(orders, drafts, strict=True)
            ]
            turns = _take_turns(cuts, class_of, ranks, buffer_bytes)
            break
    return [_worker_class(draft, found) for draft, found in zip(drafts, cuts, strict=True)], turns


def _interleave(bins: Sequence[Bin]) -> list[tuple[int, int]]:
    """(bin, aligned size) of every copy, such that every stretch of the list takes an equal share of every bin."""
    order: list[tuple[float, int, int]] = []
    for index, bin in enumerate(bins):
        before = 0
        for copy in bin.copies:
            order.append(((before + copy.num_bytes / 2) / bin.num_bytes, index, align(copy.num_bytes)))
            before += copy.num_bytes
    # Positions within a bin only grow, so the order within each bin stays.
    order.sort()
    return [(index, size) for _, index, size in order]


def _cut(order: Sequence[tuple[int, int]], num_bins: int, region_bytes: int) -> _Cuts:
    """Rounds of at most `region_bytes`, checksums included, that follow the order of `_interleave`."""
    counts: list[list[int]] = []
    sizes: list[list[int]] = []
    used = region_bytes
    for index, size in order:
        more = size + ALIGNMENT if not counts or counts[-1][index] % _CHECKSUMS_PER_BLOCK == 0 else size
        if used + more > region_bytes:
            counts.append([0] * num_bins)
            sizes.append([0] * num_bins)
            used, more = 0, size + ALIGNMENT
        used += more
        counts[-1][index] += 1
        sizes[-1][index] += more
    by_bin = [list(column) for column in zip(*sizes, strict=True)] if sizes else [[] for _ in range(num_bins)]
    return _Cuts(counts, by_bin, max(map(sum, sizes), default=0))


def _take_turns(
    cuts: Sequence[_Cuts], class_of: Mapping[int, int], ranks: Mapping[int, Sequence[int]], buffer_bytes: int
) -> Turns:
    """Lets workers take turns where few ranks send to many of them, in as many groups as the senders' buffers need."""
    groups: list[dict[int, int]] = []
    turn_of = {}
    for worker, index in class_of.items():
        sent: dict[int, int] = defaultdict(int)
        for sizes, rank in zip(cuts[index].num_bytes, ranks[worker], strict=True):
            sent[rank] = min(sent[rank] + max(sizes), cuts[index].largest)
        fitting = (
            turn
            for turn, group in enumerate(groups)
            if all(group[rank] + num_bytes <= buffer_bytes for rank, num_bytes in sent.items() if rank in group)
        )
        turn_of[worker] = next(fitting, len(groups))
        if turn_of[worker] == len(groups):
            groups.append(defaultdict(int))
        for rank, num_bytes in sent.items():
            groups[turn_of[worker]][rank] += num_bytes
    return len(groups), turn_of


def _worker_class(draft: Draft, cuts: _Cuts) -> WorkerClass:
    """Each bin's messages. Those of a round lie in sequence in the receiver's region: each arrives where it is read."""
    messages: list[list[Message]] = [[] for _ in draft.bins]
    positions = [0] * len(draft.bins)
    for round, by_bin in enumerate(cuts.counts):
        end = 0
        for index, count in enumerate(by_bin):
            if count:
                start = positions[index]
                messages[index].append(Message(round, end, tuple(draft.bins[index].copies[start : start + count])))
                positions[index] += count
                end += messages[index][-1].num_bytes
    padding = {slot: content.padding for slot, content in draft.layout.items() if content.padding}
    sources = tuple(Source(bin.link, tuple(found)) for bin, found in zip(draft.bins, messages, strict=True))
    return WorkerClass(tuple(draft.own), sources, padding, len(cuts.counts), cuts.largest)
