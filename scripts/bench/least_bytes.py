# SPDX-License-Identifier: Apache-2.0
"""The fewest bytes that a reshard can move over each kind of link, from layouts alone. Standard library only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from conversion.boxes import DTYPE_BYTES, Box, Layout, intersect, subtract, volume

_Boxes = dict[str, list[Box]]
"""Disjoint boxes by canonical name."""


@dataclass(frozen=True)
class LeastBytes:
    """Bytes of a refit that no schedule can save, in the sources' dtypes."""

    between_gpus: int
    """Bytes that the rank on a worker's GPU does not hold, over all workers."""
    between_nodes: int
    """Bytes that no rank on a worker's node holds, once for each worker."""
    between_nodes_once: int
    """The same, were each node to fetch a byte only once for all of its workers and to pass it on among them."""


def least_bytes(
    sources: Mapping[int, Layout], targets: Mapping[int, Layout], *, gpu_of: Mapping[int, int], node_of: Mapping[int, int]
) -> LeastBytes:
    """The least that any schedule between these layouts moves; arguments as for `conversion.reshard.reshard`."""
    layouts = {id(layout): layout for layout in (*sources.values(), *targets.values())}
    element = {
        piece.name: DTYPE_BYTES[content.dtype] for layout in sources.values() for content in layout.values() for piece in content.pieces
    }
    contents = {key: _contents(layout) for key, layout in layouts.items()}
    workers_on: dict[int, list[int]] = defaultdict(list)
    sources_on: dict[int, set[int]] = defaultdict(set)
    for target, layout in targets.items():
        workers_on[node_of[gpu_of[target]]].append(id(layout))
    for rank, layout in sources.items():
        sources_on[node_of[rank]].add(id(layout))
    lacking = _Lacking(contents, element)
    gpus = sum(lacking.bytes([id(layout)], {id(sources[gpu_of[t]])} if gpu_of[t] in sources else set()) for t, layout in targets.items())
    nodes = sum(lacking.bytes([worker], sources_on[node]) for node, workers in workers_on.items() for worker in workers)
    once = sum(lacking.bytes(workers, sources_on[node]) for node, workers in workers_on.items())
    return LeastBytes(gpus, nodes, once)


class _Lacking:
    """Bytes that some layouts have and others have not; each combination is counted once."""

    def __init__(self, contents: Mapping[int, _Boxes], element: Mapping[str, int]) -> None:
        self._contents = contents
        self._element = element
        self._known: dict[tuple[frozenset[int], frozenset[int]], int] = {}

    def bytes(self, wanted: Iterable[int], held: Iterable[int]) -> int:
        """Bytes in the union of `wanted` layouts and in none of the `held` ones."""
        key = frozenset(wanted), frozenset(held)
        if key not in self._known:
            self._known[key] = self._count(*key)
        return self._known[key]

    def _count(self, wanted: frozenset[int], held: frozenset[int]) -> int:
        total = 0
        held_boxes = _union([self._contents[layout] for layout in held])
        for name, boxes in _union([self._contents[layout] for layout in wanted]).items():
            have = held_boxes.get(name, [])
            inside = sum(volume(common) for box in boxes for other in have if (common := intersect(box, other)) is not None)
            total += (sum(map(volume, boxes)) - inside) * self._element[name]
        return total


def _contents(layout: Layout) -> _Boxes:
    boxes: _Boxes = defaultdict(list)
    for content in layout.values():
        for piece in content.pieces:
            boxes[piece.name].append(piece.box)
    return _union([boxes])


def _union(parts: Iterable[Mapping[str, list[Box]]]) -> _Boxes:
    union: _Boxes = defaultdict(list)
    for part in parts:
        for name, boxes in part.items():
            for box in boxes:
                union[name] += _outside(box, union[name])
    return union


def _outside(box: Box, others: list[Box]) -> list[Box]:
    rest = [box]
    for other in others:
        rest = [left for part in rest for left in subtract(part, other)]
    return rest
