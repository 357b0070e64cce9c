# SPDX-License-Identifier: Apache-2.0
"""Schedules: which rank copies which box where, so that source layouts fill target layouts. Standard library only.

Ranks that hold the same are one class, and so are engine workers with the same layout and the same sources nearby:
copies are worked out and proven once for a class. Only the choice among replicas is made for each worker.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from conversion.boxes import (
    DTYPE_BYTES,
    Box,
    Layout,
    Piece,
    Slot,
    align,
    find_overlap,
    intersect,
    lengths,
    place,
    subtract,
    tiling_fault,
    uncovered,
    volume,
)
from conversion.rounds import MIN_BUFFER_BYTES, Bin, Draft, Turns, cut_rounds, split_copy
from conversion.schedule import CHECKSUM_BYTES, NUM_BUFFERS, Copy, EngineWorker, Holding, Link, Schedule, WorkerClass


class ScheduleError(ValueError):
    """Layouts that do not fit together: some element would not be written, would be written twice, or would be lost."""


_Parts = tuple[Copy, list[Copy]]
"""A copy as a worker makes it on its own GPU, and in the parts in which it travels."""
_Holders = dict[int, Holding]
_Holdings = dict[str, dict[Box, _Holders]]
"""Canonical name, box of it, source class. Equal boxes in several classes are replicas of each other."""


@dataclass(frozen=True)
class _Sources:
    class_of: dict[int, int]
    ranks: list[list[int]]
    holdings: _Holdings
    on_node: dict[int, dict[int, list[int]]]


def reshard(
    sources: Mapping[int, Layout],
    targets: Mapping[int, Layout],
    *,
    gpu_of: Mapping[int, int],
    node_of: Mapping[int, int] | None = None,
    buffer_bytes: int,
) -> Schedule:
    """The copies that fill every target (engine worker) from the sources (trainer ranks).

    A source rank runs on the GPU of its number; `gpu_of[target]` may be one of these, or a GPU of its own (a dedicated
    engine). `node_of` is by GPU; None puts all on one node. A target copies what the source on its GPU holds straight
    out of that rank's arena. The rest comes from the target's node where that holds it, else from anywhere, and always
    from the replica that sends least. It travels in rounds in which no GPU receives or sends more than `buffer_bytes`;
    its exchange memory holds `NUM_BUFFERS` of them. Equal layouts should be one Layout object: the work is done once
    for each. Equal arguments give equal schedules in every process.
    """
    node_of = node_of or dict.fromkeys([*sources, *gpu_of.values()], 0)
    # A large schedule is millions of tuples without a cycle; looking for cycles among them takes a third of the time.
    was_enabled, has_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    if has_frozen:
        # What is garbage by now would be frozen below, and kept.
        gc.collect()
    gc.disable()
    try:
        found = _sources(sources, node_of)
        drafts, class_of = _drafts(found, targets, gpu_of, node_of, buffer_bytes)
        _check_all_read(found, [draft.layout for draft in drafts])
        ranks = _assign(found, drafts, class_of, gpu_of, node_of)
        classes, turns = cut_rounds(drafts, class_of, ranks, buffer_bytes)
        _prove(classes, drafts, class_of)
        workers, body_bytes = _engine_workers(classes, class_of, gpu_of, ranks, turns)
        last_rounds = [
            (classes[item.class_index].num_rounds - 1) * item.num_turns + item.turn for item in workers.values()
        ]
        return Schedule(max(1, 1 + max(last_rounds, default=0)), tuple(classes), found.class_of, workers, body_bytes)
    finally:
        # Later collections leave them out, with all that an engine has frozen: vLLM collects at each switch of phase.
        gc.freeze()
        if not has_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def _sources(sources: Mapping[int, Layout], node_of: Mapping[int, int]) -> _Sources:
    by_id: dict[int, int] = {}
    layouts: list[Layout] = []
    class_of: dict[int, int] = {}
    ranks: list[list[int]] = []
    on_node: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank in sorted(sources):
        layout = sources[rank]
        if id(layout) not in by_id:
            # Layouts that came from other processes are equal without being one object.
            by_id[id(layout)] = next((index for index, known in enumerate(layouts) if known == layout), len(layouts))
            if by_id[id(layout)] == len(layouts):
                layouts.append(layout)
                ranks.append([])
        class_of[rank] = by_id[id(layout)]
        ranks[class_of[rank]].append(rank)
        on_node[node_of[rank]][class_of[rank]].append(rank)
    holdings: _Holdings = defaultdict(dict)
    for source_class, layout in enumerate(layouts):
        for slot, content in layout.items():
            source = f"source {slot} of rank {ranks[source_class][0]}"
            for piece in content.pieces:
                _check_piece(slot, content.shape, piece)
                if piece.transform is not None:
                    raise ScheduleError(
                        f"{source} holds {piece.name} transformed ({piece.transform}); only targets may"
                    )
                holders = holdings[piece.name].setdefault(piece.box, {})
                holding = Holding(slot, piece.local, content.dtype)
                other = next(iter(holders.values()), holding)
                if other.dtype != holding.dtype:
                    raise ScheduleError(
                        f"{piece.name} is held as {other.dtype} in {other.slot} and as {holding.dtype} in {slot}"
                    )
                holders.setdefault(source_class, other if other == holding else holding)
            fault = tiling_fault(content.shape, [*(piece.local for piece in content.pieces), *content.padding])
            if fault is not None:
                raise ScheduleError(f"{source}: {fault}, so that some of its elements have no meaning")
    return _Sources(class_of, ranks, holdings, on_node)


def _check_piece(slot: Slot, shape: tuple[int, ...], piece: Piece) -> None:
    extra = len(piece.local) - len(piece.box)
    is_same_size = (
        extra >= 0 and lengths(piece.local[extra:]) == lengths(piece.box) and volume(piece.local[:extra]) == 1
    )
    is_inside = len(piece.local) == len(shape) and all(
        0 <= start < stop <= size for (start, stop), size in zip(piece.local, shape, strict=True)
    )
    if not (is_same_size and is_inside):
        raise ScheduleError(f"{slot}: box {piece.box} of {piece.name} does not fit box {piece.local} of shape {shape}")


def _drafts(
    found: _Sources,
    targets: Mapping[int, Layout],
    gpu_of: Mapping[int, int],
    node_of: Mapping[int, int],
    buffer_bytes: int,
) -> tuple[list[Draft], dict[int, int]]:
    sharing: dict[int, int] = defaultdict(int)
    for target in targets:
        sharing[gpu_of[target]] += 1
    least = MIN_BUFFER_BYTES * max(sharing.values(), default=1)
    if buffer_bytes < least:
        raise ValueError(f"refit buffer of {buffer_bytes} bytes is too small; it takes at least {least}")
    # Where held boxes overlap, which of them a copy comes from depends on what is near; elsewhere there is no choice.
    has_choice = any(len(boxes) > 1 and find_overlap(boxes) for boxes in found.holdings.values())
    copies: dict[object, list[_Parts]] = {}
    index_of: dict[object, int] = {}
    drafts: list[Draft] = []
    class_of = {}
    for target in sorted(targets):
        layout, own = targets[target], found.class_of.get(gpu_of[target])
        near = frozenset(found.on_node.get(node_of[gpu_of[target]], ()))
        num_shares = sharing[gpu_of[target]]
        key = (id(layout), own, near, num_shares)
        if key not in index_of:
            copies_key = key if has_choice else (id(layout), num_shares)
            if copies_key not in copies:
                whole = _copies(layout, found.holdings, own, near)
                copies[copies_key] = [(copy, split_copy(copy, buffer_bytes // num_shares)) for copy in whole]
            index_of[key] = len(drafts)
            drafts.append(_draft(found, layout, copies[copies_key], own, near, num_shares, len(targets)))
        class_of[target] = index_of[key]
    return drafts, class_of


def _copies(layout: Layout, holdings: _Holdings, own: int | None, near: frozenset[int]) -> list[Copy]:
    """Splits each piece of a layout into the parts that sources hold, the nearest source first."""
    copies = []
    for slot, content in layout.items():
        for piece in content.pieces:
            _check_piece(slot, content.shape, piece)
            if piece.name not in holdings:
                raise ScheduleError(f"{slot} needs {piece.name}, which no source holds")
            rest = [piece.box]
            held = holdings[piece.name].items()
            if len(held) > 1:
                held = sorted(held, key=lambda item: own not in item[1] and 1 + near.isdisjoint(item[1]))
            for held_box, holders in held:
                parts = [common for part in rest if (common := intersect(part, held_box)) is not None]
                if parts:
                    for part in parts:
                        part_holders = holders
                        if part != held_box:
                            parts_of = {
                                kept: kept._replace(box=place(part, held_box, kept.box))
                                for kept in set(holders.values())
                            }
                            part_holders = {source_class: parts_of[kept] for source_class, kept in holders.items()}
                        num_bytes = volume(part) * DTYPE_BYTES[next(iter(holders.values())).dtype]
                        local = place(part, piece.box, piece.local)
                        copies.append(Copy(slot, local, content.dtype, piece.transform, part_holders, num_bytes))
                    rest = [] if parts == rest else [left for part in rest for left in subtract(part, held_box)]
                    if not rest:
                        break
            if rest:
                raise ScheduleError(f"{slot} needs box {rest[0]} of {piece.name}, which no source holds")
    return copies


def _check_all_read(found: _Sources, layouts: Iterable[Layout]) -> None:
    read: dict[str, set[Box]] = defaultdict(set)
    for layout in {id(layout): layout for layout in layouts}.values():
        for content in layout.values():
            for piece in content.pieces:
                read[piece.name].add(piece.box)
    for name, boxes in found.holdings.items():
        for box, holders in boxes.items():
            if box not in read[name] and (rest := uncovered(box, read[name])):
                ranks = sorted(rank for source_class in holders for rank in found.ranks[source_class])
                raise ScheduleError(f"box {rest[0]} of {name} is held by ranks {ranks[:4]}, but no target reads it")


def _draft(
    found: _Sources,
    layout: Layout,
    copies: Sequence[_Parts],
    own: int | None,
    near: frozenset[int],
    num_shares: int,
    num_targets: int,
) -> Draft:
    """Groups the copies of a class by their possible senders, and spreads each group over bins of about equal size."""
    own_copies: list[Copy] = []
    groups: dict[frozenset[int], list[Copy]] = defaultdict(list)
    known: dict[tuple[int, ...], frozenset[int]] = {}
    for copy, parts in copies:
        if own in copy.holders:
            own_copies.append(copy)
            continue
        classes = tuple(copy.holders)
        if classes not in known:
            every = frozenset(classes)
            known[classes] = every & near or every
        groups[known[classes]] += parts
    bins = []
    for candidates, members in groups.items():
        num_ranks = sum(len(found.ranks[source_class]) for source_class in candidates)
        # One bin for each class to choose from; more where ranks would otherwise have nothing to send.
        num_bins = min(len(members), max(len(candidates), math.ceil(num_ranks / num_targets)))
        link: Link = "node" if candidates <= near else "network"
        group = [Bin(link, candidates) for _ in range(num_bins)]
        heap = [(0, index) for index in range(num_bins)]
        for copy in sorted(members, key=lambda copy: -copy.num_bytes):
            num_bytes, index = heap[0]
            group[index].add(copy)
            heapq.heapreplace(heap, (num_bytes + copy.num_bytes, index))
        bins += group
    return Draft(layout, own_copies, bins, num_shares)


def _assign(
    found: _Sources,
    drafts: Sequence[Draft],
    class_of: Mapping[int, int],
    gpu_of: Mapping[int, int],
    node_of: Mapping[int, int],
) -> dict[int, list[int]]:
    """Chooses the sending rank of each bin, by target. Bins with the fewest possible senders choose first,
    each the rank that sends least so far."""
    loads = dict.fromkeys(found.class_of, 0)
    ranks = {target: [-1] * len(drafts[index].bins) for target, index in class_of.items()}
    queue: dict[object, list[tuple[int, int]]] = {}
    waiting = []
    for order, (target, index) in enumerate(class_of.items()):
        for bin_index, bin in enumerate(drafts[index].bins):
            place = node_of[gpu_of[target]] if bin.link == "node" else None
            key = (place, bin.candidates)
            if key not in queue:
                here = found.ranks if place is None else found.on_node[place]
                queue[key] = [(0, rank) for source_class in bin.candidates for rank in here[source_class]]
                heapq.heapify(queue[key])
            waiting.append((len(queue[key]), order, -bin.num_bytes, bin_index, target, key))
    waiting.sort(key=lambda item: item[:4])
    for _, _, num_bytes, bin_index, target, key in waiting:
        heap = queue[key]
        # Loads only grow, so an outdated entry is pushed back when it reaches the top.
        while heap[0][0] != loads[heap[0][1]]:
            heapq.heapreplace(heap, (loads[heap[0][1]], heap[0][1]))
        rank = heap[0][1]
        ranks[target][bin_index] = rank
        loads[rank] -= num_bytes
    return ranks


def _prove(classes: Sequence[WorkerClass], drafts: Sequence[Draft], class_of: Mapping[int, int]) -> None:
    """Raises ScheduleError unless copies and padding tile every slot of every target. Looks only at final copies."""
    example = {class_of[target]: target for target in sorted(class_of, reverse=True)}
    proven: dict[tuple[int, Slot], list[Box]] = {}
    for index, (found, draft) in enumerate(zip(classes, drafts, strict=True)):
        written: dict[Slot, list[Box]] = {slot: list(content.padding) for slot, content in draft.layout.items()}
        for copy in found.copies():
            written[copy.target].append(copy.box)
        for slot, content in draft.layout.items():
            boxes = sorted(written[slot])
            if proven.get((id(draft.layout), slot)) == boxes:
                continue
            fault = tiling_fault(content.shape, boxes)
            if fault is not None:
                names = ", ".join(sorted({piece.name for piece in content.pieces})[:4])
                raise ScheduleError(f"{slot} of engine worker {example[index]} (made of {names}): {fault}")
            proven[id(draft.layout), slot] = boxes


def _engine_workers(
    classes: Sequence[WorkerClass],
    class_of: Mapping[int, int],
    gpu_of: Mapping[int, int],
    ranks: Mapping[int, Sequence[int]],
    turns: Turns,
) -> tuple[dict[int, EngineWorker], dict[int, int]]:
    """Gives each worker its places in the exchange memory of its GPU: checksums of own copies first, then regions."""
    num_turns, turn_of = turns
    ends: dict[int, int] = defaultdict(int)
    checksums, regions = {}, {}
    for target, index in class_of.items():
        checksums[target] = ends[gpu_of[target]]
        ends[gpu_of[target]] += align(CHECKSUM_BYTES * len(classes[index].own))
    for target, index in class_of.items():
        regions[target] = ends[gpu_of[target]]
        ends[gpu_of[target]] += min(NUM_BUFFERS, classes[index].num_rounds) * align(classes[index].region_bytes)
    workers = {
        target: EngineWorker(
            gpu_of[target], index, tuple(ranks[target]), turn_of[target], num_turns, checksums[target], regions[target]
        )
        for target, index in class_of.items()
    }
    return workers, dict(ends)
