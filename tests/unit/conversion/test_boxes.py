# SPDX-License-Identifier: Apache-2.0
"""Box arithmetic against boolean masks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from conversion.boxes import (
    Box,
    find_overlap,
    full,
    intersect,
    lengths,
    place,
    range_boxes,
    subtract,
    tiling_fault,
    uncovered,
    volume,
)
from tests.unit.conversion.dense import part

SHAPE = (5, 4, 3)
RANGES = [
    st.tuples(st.integers(0, size - 1), st.integers(1, size)).filter(lambda pair: pair[0] < pair[1]) for size in SHAPE
]
BOXES = st.tuples(*RANGES)


def count(boxes: list[Box]) -> np.ndarray:
    """Counts the boxes that contain each element of a tensor of SHAPE."""
    counts = np.zeros(SHAPE, dtype=int)
    for box in boxes:
        part(counts, box)[...] += 1
    return counts


@given(BOXES, BOXES)
def test_intersection_and_difference_share_out_a_box(first: Box, second: Box):
    common = intersect(first, second)
    both = (count([first]) > 0) & (count([second]) > 0)
    assert np.array_equal(count([common] if common else []) > 0, both)
    rest = subtract(first, second)
    assert np.array_equal(count(rest), (count([first]) - both).astype(int))


@given(st.lists(BOXES, max_size=6))
def test_overlap_and_uncovered_are_found(boxes: list[Box]):
    counts = count(boxes)
    pair = find_overlap(boxes)
    assert (pair is not None) == bool((counts > 1).any())
    assert pair is None or intersect(*pair) is not None
    assert np.array_equal(count(uncovered(full(SHAPE), boxes)), (counts == 0).astype(int))


@given(BOXES, st.lists(BOXES, max_size=3))
def test_a_tiling_is_recognised(box: Box, more: list[Box]):
    boxes = [box, *subtract(full(SHAPE), box)]
    assert tiling_fault(SHAPE, boxes) is None
    assert tiling_fault(SHAPE, boxes[1:]) is not None
    assert (tiling_fault(SHAPE, boxes + more) is None) == (not more)


def test_faults_name_the_box():
    assert tiling_fault((4,), [((0, 2),)]) == "box ((2, 4),) is not written"
    assert tiling_fault((4,), [((0, 3),), ((2, 4),)]) == "boxes ((0, 3),) and ((2, 4),) overlap"
    assert tiling_fault((4,), [((0, 5),)]) == "box ((0, 5),) is empty or outside of shape (4,)"
    assert tiling_fault((4,), [((0, 4),), ((2, 2),)]) == "box ((2, 2),) is empty or outside of shape (4,)"
    assert tiling_fault((), [()]) is None


def test_a_box_is_placed_where_its_surroundings_lie():
    # Rows 10 to 20 of a tensor lie at rows 3 to 13 of expert 7 of a stack.
    assert place(((12, 15), (1, 2)), ((10, 20), (0, 4)), ((7, 8), (3, 13), (0, 4))) == ((7, 8), (5, 8), (1, 2))


def test_lengths_and_volume():
    assert lengths(((1, 4), (2, 3))) == (3, 1)
    assert volume(((1, 4), (2, 3))) == 3
    assert volume(()) == 1


@given(st.lists(st.integers(1, 4), max_size=4), st.integers(0, 256), st.integers(0, 256))
def test_a_range_of_elements_is_a_few_boxes_in_order(shape: list[int], start: int, stop: int):
    flat = np.arange(volume(full(shape)))
    elements = flat.reshape(shape)
    boxes = range_boxes(shape, min(start, len(flat)), min(stop, len(flat)))
    found = np.concatenate([part(elements, box).reshape(-1) for box in boxes] or [flat[:0]])
    assert np.array_equal(found, flat[start:stop])
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
