# SPDX-License-Identifier: Apache-2.0
"""Dense stand-ins for weights: every element of every canonical tensor has its own value, so a misplaced one shows."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from conversion.boxes import Box, Layout, Slot, SlotLayout

UNWRITTEN = -1
PADDING = -2


def index_arrays(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """An int64 array for each shape; no value occurs twice over all of them."""
    arrays, start = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.arange(start, start + size).reshape(shape)
        start += size
    return arrays


def part(array: np.ndarray, box: Box) -> np.ndarray:
    """The elements of a box, as a view."""
    return array[tuple(slice(start, stop) for start, stop in box)]


def build(content: SlotLayout, canonical: Mapping[str, np.ndarray]) -> np.ndarray:
    """A slot put together piece by piece; fails if one element is written twice."""
    array = np.full(content.shape, UNWRITTEN, dtype=np.int64)
    for piece in content.pieces:
        target = part(array, piece.local)
        assert (target == UNWRITTEN).all(), f"{piece} overwrites"
        target[...] = part(canonical[piece.name], piece.box).reshape(target.shape)
    for box in content.padding:
        target = part(array, box)
        assert (target == UNWRITTEN).all(), f"padding {box} overwrites"
        target[...] = PADDING
    return array


def build_layout(layout: Layout, canonical: Mapping[str, np.ndarray]) -> dict[Slot, np.ndarray]:
    """Every slot of a layout."""
    return {slot: build(content, canonical) for slot, content in layout.items()}
