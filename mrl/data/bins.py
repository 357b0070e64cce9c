"""Packing of one list of lengths into rows of limited size. Rows of indices, none empty; equal lengths keep their order."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np

Rows = list[list[int]]
Item = tuple[int, int]
"""Length and minus the index: the last item of a sorted list is the longest, and of equal ones the first."""


def concatenative(lengths: Sequence[int], row_tokens: int) -> Rows:
    """The sequences in order, a new row wherever the next one does not fit."""
    rows: Rows = []
    room = 0
    for index, length in enumerate(lengths):
        if not rows or length > room:
            rows.append([])
            room = row_tokens
        rows[-1].append(index)
        room -= length
    return rows


def first_fit_shuffle(lengths: Sequence[int], row_tokens: int) -> Rows:
    """The sequences in an order drawn from the lengths themselves, each into the first row with room."""
    order = list(range(len(lengths)))
    random.Random(repr(list(lengths))).shuffle(order)
    rows: Rows = [[] for _ in lengths]
    room = np.full(len(lengths), row_tokens)
    for index in order:
        row = int(np.argmax(room >= lengths[index]))
        rows[row].append(index)
        room[row] -= lengths[index]
    return [row for row in rows if row]


def first_fit_decreasing(lengths: Sequence[int], row_tokens: int) -> Rows:
    """The longest first, each into the first row with room. At most 11/9 of the fewest rows, and one more."""
    # Row by row, the longest that still fits: the same rows, without a search through all of them.
    return _filled([], _sorted(lengths), row_tokens)


def modified_first_fit_decreasing(lengths: Sequence[int], row_tokens: int) -> Rows:
    """Rows of Johnson and Garey (J. Complexity 1, 1985), at most 71/60 of the fewest and one more.

    Every sequence above half a row opens one. Each of these rows, fullest first, takes the longest of those above a third that fits; then,
    emptiest first, a row without one takes two of those above a sixth: the shortest, and the longest beside it. The rest as in first fit
    decreasing.
    """
    items = _sorted(lengths)
    above = [bisect_right(items, (row_tokens // parts, math.inf)) for parts in (2, 3, 6)]
    large, medium, small, tiny = items[above[0] :], items[above[1] : above[0]], items[above[2] : above[1]], items[: above[2]]
    rows = [[item] for item in reversed(large)]
    for row in rows:
        row += _take_longest(medium, row_tokens - row[0][0])
    for row in reversed(rows):
        room = row_tokens - row[0][0]
        if len(row) == 1 and len(small) >= 2 and small[0][0] + small[1][0] <= room:
            row.append(small.pop(0))
            row += _take_longest(small, room - row[1][0])
    return _filled(rows, sorted(medium + small + tiny), row_tokens)


PACKERS: dict[str, Callable[[Sequence[int], int], Rows]] = {
    packer.__name__: packer for packer in (concatenative, first_fit_shuffle, first_fit_decreasing, modified_first_fit_decreasing)
}
"""By the name that NeMo RL gives the algorithm."""


def fewest_rows(lengths: Sequence[int], row_tokens: int) -> int:
    """A lower bound of the rows that any packing needs (L2 of Martello and Toth, Discrete Applied Mathematics 28, 1990).

    For every k up to half a row: sequences longer than row - k share a row with none of at least k, those above half a row not with each
    other; what is at least k then fills the room that the latter leave.
    """
    items = sorted(lengths)
    total = [0]
    for length in items:
        total.append(total[-1] + length)
    above_half = bisect_right(items, row_tokens // 2)
    bound = math.ceil(total[-1] / row_tokens)
    for shortest in range(above_half):
        alone = bisect_right(items, row_tokens - items[shortest])
        num_open = alone - above_half
        room = num_open * row_tokens - (total[alone] - total[above_half])
        overflow = total[above_half] - total[shortest] - room
        bound = max(bound, len(items) - above_half + max(0, math.ceil(overflow / row_tokens)))
    return max(bound, len(items) - above_half)


def _sorted(lengths: Sequence[int]) -> list[Item]:
    return sorted((length, -index) for index, length in enumerate(lengths))


def _take_longest(items: list[Item], room: int) -> list[Item]:
    """Takes the longest item that fits out of the sorted ones; none if none fits."""
    position = bisect_right(items, (room, math.inf))
    return [items.pop(position - 1)] if position else []


def _filled(rows: list[list[Item]], items: list[Item], row_tokens: int) -> Rows:
    """Indices of the rows, each filled up with the longest items that fit, and of as many more rows as the sorted items need."""
    filled = []
    opened = iter(rows)
    while (row := next(opened, [])) or items:
        room = row_tokens - sum(length for length, _ in row)
        while taken := _take_longest(items, room):
            row = row + taken
            room -= taken[0][0]
        filled.append([-index for _, index in row])
    return filled
