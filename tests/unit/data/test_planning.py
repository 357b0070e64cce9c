import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.data.planning import plan_rows

lengths_lists = st.lists(st.integers(1, 60), min_size=0, max_size=60)


@given(lengths_lists, st.integers(1, 6), st.integers(60, 200))
def test_a_plan_holds_its_promises(lengths: list[int], dp_size: int, row_tokens: int):
    plan = plan_rows(lengths, dp_size=dp_size, row_tokens=row_tokens)
    assert sorted(index for rows in plan for row in rows for index in row) == list(range(len(lengths)))
    assert len(plan) == dp_size and len({len(rows) for rows in plan}) == 1 and len(plan[0]) >= 1
    assert all(sum(lengths[i] for i in row) <= row_tokens for rows in plan for row in rows)
    rank_tokens = [sum(lengths[i] for row in rows for i in row) for rows in plan]
    assert max(rank_tokens) - min(rank_tokens) <= max(lengths, default=0)
    # First fit: at most one row of a rank is less than half full.
    for rows in plan:
        assert sum(0 < 2 * sum(lengths[i] for i in row) < row_tokens for row in rows) <= 1


@given(lengths_lists, st.integers(1, 4))
def test_a_plan_is_a_function_of_the_ordered_lengths(lengths: list[int], dp_size: int):
    assert plan_rows(lengths, dp_size=dp_size, row_tokens=64) == plan_rows(list(lengths), dp_size=dp_size, row_tokens=64)


def test_equal_lengths_keep_their_order():
    assert plan_rows([3] * 6, dp_size=2, row_tokens=6) == (((0, 2), (4,)), ((1, 3), (5,)))


def test_no_sequences_give_one_empty_row_per_rank():
    assert plan_rows([], dp_size=2, row_tokens=8) == (((),), ((),))


def test_a_sequence_longer_than_a_row_is_named():
    with pytest.raises(ValueError, match=r"sequence 1 has 9 tokens.*\(8\).*train_mb_tokens"):
        plan_rows([3, 9, 2], dp_size=2, row_tokens=8)
