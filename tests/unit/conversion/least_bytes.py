# SPDX-License-Identifier: Apache-2.0
"""The fewest bytes that a reshard can move over each kind of link, from layouts alone. Standard library only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from conversion.boxes import DTYPE_BYTES, Box, Layout, Piece, uncovered, volume


@dataclass(frozen=True)
class LeastBytes:
    """Bytes of a refit that no schedule can save, in the sources' dtypes."""

    between_gpus: int
    """Bytes that the rank on a worker's GPU does not hold, over all workers."""
    between_nodes: int
    """Bytes that no rank on a worker's node holds, once for each worker."""


def least_bytes(
    sources: Mapping[int, Layout],
    targets: Mapping[int, Layout],
    *,
    gpu_of: Mapping[int, int],
    node_of: Mapping[int, int],
) -> LeastBytes:
    """The least that any schedule between these layouts moves; arguments as for `conversion.reshard.reshard`."""
    layouts = {id(layout): layout for layout in (*sources.values(), *targets.values())}
    element = {piece.name: DTYPE_BYTES[dtype] for layout in sources.values() for dtype, piece in _pieces(layout)}

    @cache
    def lacking(wanted: frozenset[int], held: frozenset[int]) -> int:
        """Bytes that some layouts have and others have not; what several of them have counts once."""
        total, known = 0, defaultdict[str, list[Box]](list)
        for layout in (*held, *wanted):
            for _, piece in _pieces(layouts[layout]):
                new = uncovered(piece.box, known[piece.name])
                known[piece.name] += new
                total += element[piece.name] * sum(map(volume, new)) * (layout not in held)
        return total

    workers_on, sources_on = defaultdict[int, list[int]](list), defaultdict[int, set[int]](set)
    for target, layout in targets.items():
        workers_on[node_of[gpu_of[target]]].append(id(layout))
    for rank, layout in sources.items():
        sources_on[node_of[rank]].add(id(layout))
    on_gpu = {gpu: frozenset([id(layout)]) for gpu, layout in sources.items()}
    gpus = sum(
        lacking(frozenset([id(layout)]), on_gpu.get(gpu_of[target], frozenset())) for target, layout in targets.items()
    )
    on_node = [(workers, frozenset(sources_on[node])) for node, workers in workers_on.items()]
    nodes = sum(lacking(frozenset([worker]), held) for workers, held in on_node for worker in workers)
    return LeastBytes(gpus, nodes)


def _pieces(layout: Layout) -> Iterator[tuple[str, Piece]]:
    """Every piece of a layout behind its dtype."""
    return ((content.dtype, piece) for content in layout.values() for piece in content.pieces)
