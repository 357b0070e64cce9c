import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.data.bins import (
    PACKERS,
    concatenative,
    fewest_rows,
    first_fit_decreasing,
    first_fit_shuffle,
    modified_first_fit_decreasing,
)

lengths_lists = st.lists(st.integers(1, 60), max_size=40)


def sizes(rows: list[list[int]], lengths: list[int]) -> list[int]:
    return [sum(lengths[index] for index in row) for row in rows]


def optimum(lengths: list[int], row_tokens: int) -> int:
    """Fewest rows of any packing, by trying all: each sequence into every row so far, or a new one."""

    def best(index: int, room: tuple[int, ...]) -> int:
        if index == len(lengths):
            return len(room)
        choices = [
            best(index + 1, tuple(sorted((*room[:i], free - lengths[index], *room[i + 1 :]))))
            for i, free in enumerate(room)
            if free >= lengths[index]
        ]
        return min([*choices, best(index + 1, tuple(sorted((*room, row_tokens - lengths[index]))))])

    return best(0, ())


@pytest.mark.parametrize("packer", PACKERS.values(), ids=PACKERS)
@given(lengths=lengths_lists, row_tokens=st.integers(60, 200))
def test_every_sequence_stands_in_one_row_that_holds_it(packer, lengths: list[int], row_tokens: int):
    rows = packer(lengths, row_tokens)
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    assert all(0 < size <= row_tokens for size in sizes(rows, lengths))
    assert len(rows) >= fewest_rows(lengths, row_tokens)
    assert rows == packer(list(lengths), row_tokens)


def test_concatenative_by_hand():
    assert concatenative([4, 1, 3, 2, 1, 3, 4, 5], 5) == [[0, 1], [2, 3], [4, 5], [6], [7]]
    assert concatenative([4, 1, 3, 2, 1, 3, 4, 5], 8) == [[0, 1, 2], [3, 4, 5], [6], [7]]


@given(lengths_lists, st.integers(60, 200))
def test_first_fit_decreasing_is_a_search_for_the_first_row_with_room(lengths: list[int], row_tokens: int):
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        row = next((row for row in rows if sum(lengths[i] for i in row) + lengths[index] <= row_tokens), None)
        if row is None:
            rows.append(row := [])
        row.append(index)
    assert first_fit_decreasing(lengths, row_tokens) == rows


@given(lengths_lists, st.integers(60, 200))
def test_first_fit_shuffle_fills_earlier_rows_first(lengths: list[int], row_tokens: int):
    rows = first_fit_shuffle(lengths, row_tokens)
    full = sizes(rows, lengths)
    for row, earlier in itertools.combinations(reversed(range(len(rows))), 2):
        # Nothing in a row would have fitted into an earlier one, even as that ended.
        assert min(lengths[index] for index in rows[row]) + full[earlier] > row_tokens


def test_first_fit_shuffle_depends_on_the_lengths():
    orders = {tuple(first_fit_shuffle([5, 5, 5, last], 5 + last)[0]) for last in range(1, 5)}
    assert len(orders) > 1


def test_modified_first_fit_decreasing_by_hand():
    # A row of 60. Above half: 40, 31. Above a third: 21, 20 is not. Above a sixth: 20, 15, 11. Shorter: 10, 3.
    lengths = [11, 40, 21, 20, 31, 3, 15, 10]
    # 40 has no room for 21, 31 has. Beside 40 no two of 11, 15, 20 fit (11 + 15 > 20); then the longest that fit: 20.
    # 31 + 21 leaves 8: 3. What is left: 15, 11, 10.
    assert modified_first_fit_decreasing(lengths, 60) == [[1, 3], [4, 2, 5], [6, 0, 7]]


def test_two_small_sequences_share_a_row_with_a_large_one():
    # 33 takes the shortest, 11, and the longest that fits beside it: 16 leaves no room, 15 does. First fit decreasing would take 16 first.
    assert modified_first_fit_decreasing([33, 16, 15, 11], 59) == [[0, 3, 2], [1]]
    assert first_fit_decreasing([33, 16, 15, 11], 59) == [[0, 1], [2, 3]]


@given(st.lists(st.integers(1, 20), max_size=7), st.integers(20, 30))
def test_against_the_fewest_rows(lengths: list[int], row_tokens: int):
    best = optimum(lengths, row_tokens)
    assert fewest_rows(lengths, row_tokens) <= best
    assert len(first_fit_decreasing(lengths, row_tokens)) <= 11 / 9 * best + 6 / 9
    assert len(modified_first_fit_decreasing(lengths, row_tokens)) <= 71 / 60 * best + 1


def test_the_bound_knows_what_does_not_fit_together():
    assert fewest_rows([], 10) == 0
    assert fewest_rows([5, 5, 5, 5], 10) == 2
    # 24 tokens would fit into 3 rows of 10, but no two of 6 do.
    assert fewest_rows([6, 6, 6, 6], 10) == 4
    # Three of 6 leave room for 4 each: neither 5 fits there, and both share a row.
    assert fewest_rows([6, 6, 6, 5, 5], 10) == 4
