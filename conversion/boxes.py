# SPDX-License-Identifier: Apache-2.0
"""Boxes: rectangular parts of tensors, and layouts made of them. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]
"""(start, stop) for each dimension."""

ALIGNMENT = 64
"""Bytes to which every box in an exchange buffer is aligned: a cache line, and more than any dtype needs."""
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int8": 1, "uint8": 1}


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a canonical tensor, and where a holder keeps it."""

    name: str
    """The canonical tensor: named and shaped as the Hugging Face checkpoint does."""
    box: Box
    local: Box
    """The place in the holder's tensor. Same lengths as `box`; it may have more leading dimensions, of length 1
    (stacked experts).
    """
    transform: str | None = None
    """Function from the canonical values to the holder's: None, or "neg_exp" for -exp(x) computed in float32."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter or persistent buffer by name in the holder's live model; `chunk` is the virtual pipeline chunk."""

    name: str
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.name} (chunk {self.chunk})" if self.chunk else self.name


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Content of one tensor of a holder. Pieces and padding together should tile it; `reshard` proves that they do."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]
    padding: tuple[Box, ...] = ()
    """Boxes without a canonical source; they are zero."""


Layout = dict[Slot, SlotLayout]


def align(size: int, multiple: int = ALIGNMENT) -> int:
    """`size` rounded up to a multiple of `multiple`."""
    return -(-size // multiple) * multiple


def full(shape: Sequence[int]) -> Box:
    """The box that covers a whole tensor."""
    return tuple((0, size) for size in shape)


def lengths(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    product = 1
    for start, stop in box:
        product *= stop - start
    return product


def intersect(first: Box, second: Box) -> Box | None:
    """The common part of two boxes of equal rank, or None where they have none."""
    common = []
    for (a, b), (c, d) in zip(first, second, strict=True):
        start, stop = max(a, c), min(b, d)
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def subtract(box: Box, hole: Box) -> list[Box]:
    """`box` without `hole`, as disjoint boxes."""
    common = intersect(box, hole)
    if common is None:
        return [box]
    rest, core = [], list(box)
    for dim, ((start, stop), (low, high)) in enumerate(zip(box, common, strict=True)):
        for part in ((start, low), (high, stop)):
            if part[0] < part[1]:
                rest.append((*core[:dim], part, *core[dim + 1 :]))
        core[dim] = (low, high)
    return rest


def place(box: Box, inside: Box, local: Box) -> Box:
    """The indices of `box`, a part of `inside`, in a tensor that keeps `inside` at `local`."""
    extra = len(local) - len(inside)
    moved = tuple(
        (start - low + base, stop - low + base)
        for (start, stop), (low, _), (base, _) in zip(box, inside, local[extra:], strict=True)
    )
    return local[:extra] + moved


def counted_from(box: Box, origin: Box) -> Box:
    """Shifts `box` so that its indices count from the start of `origin`."""
    return tuple((start - low, stop - low) for (start, stop), (low, _) in zip(box, origin, strict=True))


def range_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Elements `start` to `stop` of a tensor, counted row by row, as boxes in order: 2n - 1 at most in n dimensions."""
    if start >= stop:
        return []
    if not shape:
        return [()]
    row = math.prod(shape[1:])
    low, high = -(-start // row), stop // row
    if low > high:
        return [((high, low), *box) for box in range_boxes(shape[1:], start - high * row, stop - high * row)]
    boxes: list[Box] = (
        [((low - 1, low), *box) for box in range_boxes(shape[1:], start - (low - 1) * row, row)]
        if start < low * row
        else []
    )
    if low < high:
        boxes.append(((low, high), *full(shape[1:])))
    return boxes + [((high, high + 1), *box) for box in range_boxes(shape[1:], 0, stop - high * row)]


def find_overlap(boxes: Iterable[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, or None where all are disjoint."""
    active: list[Box] = []
    for box in sorted(boxes):
        # Sorted by start: what ends before this one begins meets none of those that follow.
        active = [other for other in active if not other or other[0][1] > box[0][0]]
        for other in active:
            if intersect(other, box) is not None:
                return other, box
        active.append(box)
    return None


def uncovered(box: Box, parts: Iterable[Box]) -> list[Box]:
    """The rest of `box` outside `parts`, as disjoint boxes."""
    rest = [box]
    for part in parts:
        rest = [left for whole in rest for left in subtract(whole, part)]
        if not rest:
            break
    return rest


def tiling_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Returns why `boxes` do not cover each element of a tensor exactly once, or None where they do."""
    whole = full(shape)
    for box in boxes:
        if len(box) != len(whole) or any(
            not 0 <= start < stop <= size for (start, stop), size in zip(box, shape, strict=True)
        ):
            return f"box {box} is empty or outside of shape {tuple(shape)}"
    pair = find_overlap(boxes)
    if pair is not None:
        return f"boxes {pair[0]} and {pair[1]} overlap"
    if sum(map(volume, boxes)) != volume(whole):
        return f"box {uncovered(whole, boxes)[0]} is not written"
    return None
