"""How the global tensors of a Megatron checkpoint are cut into chunks, and which file each chunk goes to. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from conversion.boxes import DTYPE_BYTES, Box, Layout, Piece, Slot, SlotLayout, full, intersect, lengths, place, subtract
from conversion.families.common import Family, HfConfig, MegatronCoords, MegatronParallel


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a global tensor that is stored, and later read, as one."""

    key: str
    offsets: tuple[int, ...]
    content: SlotLayout

    @property
    def num_bytes(self) -> int:
        """Size of its content."""
        return math.prod(self.content.shape) * DTYPE_BYTES[self.content.dtype]


ChunkBoxes = dict[str, list[Box]]
"""Boxes of global tensors, by key."""


def restricted(content: SlotLayout, box: Box) -> SlotLayout:
    """What a box of a tensor consists of, as a tensor of its own."""
    pieces = []
    for piece in content.pieces:
        common = intersect(piece.local, box)
        if common is not None:
            extra = len(piece.local) - len(piece.box)
            inside = place(common[extra:], piece.local[extra:], piece.box)
            pieces.append(Piece(piece.name, inside, _counted_from(common, box), piece.transform))
    padding = tuple(_counted_from(common, box) for hole in content.padding if (common := intersect(hole, box)) is not None)
    return replace(content, shape=lengths(box), pieces=tuple(pieces), padding=padding)


def files_of_size(layout: Layout, max_file_bytes: int, max_bytes: int) -> list[list[Chunk]]:
    """Files of about `max_file_bytes`: a chunk per expert where experts are stacked, else per tensor."""
    boxes = {slot.name: list(_experts(content)) for slot, content in layout.items()}
    files: list[list[Chunk]] = [[]]
    num_bytes = 0
    for chunk in _chunks(layout, boxes, max_bytes):
        if files[-1] and num_bytes + chunk.num_bytes > max_file_bytes:
            files.append([])
            num_bytes = 0
        files[-1].append(chunk)
        num_bytes += chunk.num_bytes
    return files


def files_of_ranks(family: Family, hf_config: HfConfig, parallel: MegatronParallel, layout: Layout, max_bytes: int) -> list[list[Chunk]]:
    """A file for each (tp, pp, ep, etp) rank with the chunks that it reads; what several ranks read lies in the first one's.

    Raises:
        ValueError: the model cannot be cut so.
    """
    holders: dict[str, list[tuple[str, Piece]]] = {}
    for slot, content in layout.items():
        for piece in content.pieces:
            holders.setdefault(piece.name, []).append((slot.name, piece))
    taken: dict[tuple[str, Box], list[Box]] = {}
    files: list[ChunkBoxes] = []
    for coords in _ranks(parallel):
        rank = family.megatron_layout(hf_config, parallel, coords, "float32", "te")
        read = _read_by(rank, holders)
        stacked = {key: is_stacked(layout[Slot(key)]) for key in read}
        files.append({key: _merged(_untaken(key, boxes, taken, stacked[key]), stacked=stacked[key]) for key, boxes in read.items()})
    for slot, content in layout.items():
        # Padding has no canonical source, so that no rank's layout has named it. It goes where the last rows of the tensor are.
        last = next(file for file in reversed(files) if file.get(slot.name))
        last[slot.name] += content.padding
    return [_chunks(layout, boxes, max_bytes) for boxes in files]


def _ranks(parallel: MegatronParallel) -> Iterator[MegatronCoords]:
    """The distinct coordinates of the smallest world of these sizes."""
    world_size = parallel.pp * math.lcm(parallel.tp, parallel.ep * parallel.etp)
    sizes = replace(parallel, cp=1)
    yield from dict.fromkeys(sizes.coords_of(rank, world_size) for rank in range(world_size))


def _read_by(rank: Layout, holders: dict[str, list[tuple[str, Piece]]]) -> ChunkBoxes:
    """The boxes of global tensors that a rank's tensors are made of."""
    boxes: ChunkBoxes = {}
    for content in rank.values():
        for piece in content.pieces:
            for key, held in holders[piece.name]:
                common = intersect(piece.box, held.box)
                if common is not None:
                    boxes.setdefault(key, []).append(place(common, held.box, held.local))
    return boxes


def _untaken(key: str, boxes: list[Box], taken: dict[tuple[str, Box], list[Box]], stacked: bool) -> list[Box]:
    """What no rank before has taken."""
    found = []
    for box in boxes:
        # Experts do not overlap each other; looking at one at a time keeps this linear in their number.
        others = taken.setdefault((key, box[:1] if stacked else ()), [])
        rest = [box]
        for other in others:
            rest = [left for part in rest for left in subtract(part, other)]
        others += rest
        found += rest
    return found


def _merged(boxes: list[Box], *, stacked: bool) -> list[Box]:
    """The same elements in fewer boxes: those that follow each other along one dimension become one. Experts stay apart."""
    merged: list[Box] = []
    for box in sorted(boxes):
        joined = _joined(merged[-1], box) if merged and not (stacked and merged[-1][0] != box[0]) else None
        if joined is None:
            merged.append(box)
        else:
            merged[-1] = joined
    return merged


def _joined(first: Box, second: Box) -> Box | None:
    different = [dim for dim, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if len(different) != 1 or first[different[0]][1] != second[different[0]][0]:
        return None
    (dim,) = different
    return (*first[:dim], (first[dim][0], second[dim][1]), *first[dim + 1 :])


def _chunks(layout: Layout, boxes: ChunkBoxes, max_bytes: int) -> list[Chunk]:
    chunks = []
    # In the order of the layout: that of the source, which is then read front to back.
    for slot, content in layout.items():
        for whole in boxes.get(slot.name, []):
            for box in _limited(whole, max_bytes // DTYPE_BYTES[content.dtype]):
                chunks.append(Chunk(slot.name, tuple(start for start, _ in box), restricted(content, box)))
    return chunks


def _limited(box: Box, max_elements: int) -> Iterator[Box]:
    """A box in slices along its longest dimension, of at most about `max_elements` each."""
    num_elements = math.prod(lengths(box))
    if num_elements <= max_elements:
        yield box
        return
    dim = max(range(len(box)), key=lambda dim: box[dim][1] - box[dim][0])
    start, stop = box[dim]
    num_slices = min(stop - start, -(-num_elements // max_elements))
    step = (stop - start) // num_slices
    for low in range(start, stop, step):
        yield (*box[:dim], (low, min(low + step, stop)), *box[dim + 1 :])


def _experts(content: SlotLayout) -> Iterator[Box]:
    if not is_stacked(content):
        yield full(content.shape)
        return
    for index in range(content.shape[0]):
        yield ((index, index + 1), *full(content.shape[1:]))


def is_stacked(content: SlotLayout) -> bool:
    """Whether the first dimension of a global tensor counts experts."""
    return any(len(piece.local) > len(piece.box) for piece in content.pieces)


def _counted_from(box: Box, origin: Box) -> Box:
    return tuple((start - low, stop - low) for (start, stop), (low, _) in zip(box, origin, strict=True))
