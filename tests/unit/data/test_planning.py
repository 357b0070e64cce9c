import itertools
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrl.data.bins import PACKERS, fewest_rows
from mrl.data.cost import SequenceCost
from mrl.data.planning import RowPlan, batch_dynamically, batch_in_order, largest_first, pack, rank_shares, repack

ALGORITHMS = ["balanced", *PACKERS]
# At 64 tokens, the quadratic part is as large as the other.
COST = SequenceCost(per_token=64.0, per_token_squared=1.0)
lengths_lists = st.lists(st.integers(1, 60), max_size=60)
dp_sizes = st.integers(1, 6)


def check(plan: RowPlan, num_sequences: int, dp_size: int) -> None:
    """Every sequence once, and equally many rows on all ranks."""
    assert sorted(index for rows in plan for row in rows for index in row) == list(range(num_sequences))
    assert len(plan) == dp_size and len({len(rows) for rows in plan}) == 1 and len(plan[0]) >= 1


def tokens(plan: RowPlan, lengths: list[int]) -> list[list[int]]:
    """Of every row of every rank."""
    return [[sum(lengths[index] for index in row) for row in rows] for rows in plan]


def members(plan: RowPlan) -> list[set[int]]:
    return [{index for row in rows for index in row} for rows in plan]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(lengths=lengths_lists, dp_size=dp_sizes, row_tokens=st.integers(60, 200), other_tokens=st.integers(60, 200))
def test_a_plan_holds_its_promises(algorithm: str, lengths: list[int], dp_size: int, row_tokens: int, other_tokens: int):
    def planned() -> RowPlan:
        return pack(lengths, algorithm=algorithm, row_tokens=row_tokens, dp_size=dp_size, cost=COST)

    plan = planned()
    check(plan, len(lengths), dp_size)
    assert all(size <= row_tokens for rows in tokens(plan, lengths) for size in rows)
    assert plan == planned()
    other = repack(plan, lengths, algorithm=algorithm, row_tokens=other_tokens)
    check(other, len(lengths), dp_size)
    assert all(size <= other_tokens for rows in tokens(other, lengths) for size in rows)
    assert members(other) == members(plan)
    by_tokens = largest_first(plan, lengths)
    check(by_tokens, len(lengths), dp_size)
    assert tokens(by_tokens, lengths) == [sorted(rows, reverse=True) for rows in tokens(plan, lengths)]


@given(lengths_lists, dp_sizes)
def test_ranks_of_linear_cost_differ_by_one_sequence_at_most(lengths: list[int], dp_size: int):
    plan = pack(lengths, algorithm="balanced", row_tokens=60, dp_size=dp_size, cost=SequenceCost(1.0, 0.0))
    of_ranks = [sum(rows) for rows in tokens(plan, lengths)]
    assert max(of_ranks) - min(of_ranks) <= max(lengths, default=0)


@pytest.mark.parametrize("cost", [SequenceCost(1.0, 0.0), COST, SequenceCost(0.0, 1.0)])
def test_balance_against_the_best_of_all_assignments(cost: SequenceCost):
    def worst(plan: RowPlan) -> float:
        return max(*rank_shares(plan, lengths, float), *rank_shares(plan, lengths, cost.of))

    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths, dp_size = rng.integers(1, 61, int(rng.integers(2, 8))).tolist(), int(rng.integers(2, 4))
        best = min(
            worst(tuple((tuple(i for i, rank in enumerate(ranks) if rank == mine),) for mine in range(dp_size)))
            for ranks in itertools.product(range(dp_size), repeat=len(lengths))
            if ranks[0] == 0
        )
        # Longest first is within 4/3 of the best (Graham, 1969).
        assert worst(pack(lengths, algorithm="balanced", row_tokens=60, dp_size=dp_size, cost=cost)) <= best * 4 / 3 + 1e-9


def test_work_is_balanced_where_tokens_cannot_be():
    # One of 8 is the work of 16 of 2: as many tokens on both ranks, 16 of 32, would be 80 : 32 of the work.
    lengths = [8] + [2] * 12
    plan = pack(lengths, algorithm="balanced", row_tokens=8, dp_size=2, cost=SequenceCost(per_token=0.0, per_token_squared=1.0))
    assert rank_shares(plan, lengths, SequenceCost(0.0, 1.0).of) == pytest.approx([72 / 56, 40 / 56])
    assert rank_shares(plan, lengths, float) == pytest.approx([12 / 16, 20 / 16])


def test_equal_lengths_keep_their_order():
    plan = pack([3] * 6, algorithm="balanced", row_tokens=6, dp_size=2, cost=COST)
    assert plan == (((0, 2), (4,)), ((1, 3), (5,)))


def test_rows_at_the_same_place_cost_about_the_same():
    plan = pack([2] * 8 + [8, 8], algorithm="balanced", row_tokens=8, dp_size=2, cost=COST)
    assert tokens(plan, [2] * 8 + [8, 8]) == [[8, 8], [8, 8]]
    assert [len(rows[0]) for rows in plan] == [1, 1]


def test_packed_rows_are_dealt_evenly():
    # Rows of 6, 6, 6 and 1 tokens.
    plan = pack([3] * 6 + [1], algorithm="first_fit_decreasing", row_tokens=6, dp_size=2, cost=COST)
    assert plan == (((0, 1), (4, 5)), ((2, 3), (6,)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_sequences_give_one_empty_row_per_rank(algorithm: str):
    plan = pack([], algorithm=algorithm, row_tokens=8, dp_size=2, cost=COST)
    assert plan == batch_in_order(0, sequences_per_row=2, dp_size=2) == (((),), ((),))
    assert batch_dynamically([], row_tokens=8, length_multiple=1, dp_size=2) == plan
    assert rank_shares(plan, [], float) == [1.0, 1.0]


def test_a_sequence_longer_than_a_row_is_named():
    plans: list[Callable[[], RowPlan]] = [
        lambda: pack([3, 9, 2], algorithm="balanced", row_tokens=8, dp_size=2, cost=COST),
        lambda: repack((((0, 1, 2),),), [3, 9, 2], algorithm="balanced", row_tokens=8),
        lambda: batch_dynamically([3, 9, 2], row_tokens=8, length_multiple=1, dp_size=2),
    ]
    for plan in plans:
        with pytest.raises(ValueError, match=r"sequence 1 has 9 tokens.*\(8\).*train_mb_tokens"):
            plan()


@given(lengths_lists, dp_sizes, st.integers(64, 200), st.sampled_from([1, 4]))
def test_dynamic_rows_stay_within_the_budget_when_padded(lengths: list[int], dp_size: int, row_tokens: int, multiple: int):
    plan = batch_dynamically(lengths, row_tokens=row_tokens, length_multiple=multiple, dp_size=dp_size)
    check(plan, len(lengths), dp_size)
    for rows in plan:
        for row in rows:
            assert len(row) * -(-max((lengths[i] for i in row), default=0) // multiple) * multiple <= row_tokens
    # Sorted by length, and dealt in turn: whatever the budget, a rank has the same sequences.
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    assert members(plan) == [set(order[rank::dp_size]) for rank in range(dp_size)]


def test_dynamic_rows_by_hand():
    # Sorted: 1 2 | 3 3 | 4 5 | 8 8, one of each pair to each rank. Rounded to 2, the longest of a pair count 2, 4, 6, 8.
    lengths = [8, 1, 5, 3, 2, 8, 3, 4]
    # 2 x 4 fits into 12 tokens, 3 x 6 does not; 6 + 8 as 2 x 8 neither.
    assert batch_dynamically(lengths, row_tokens=12, length_multiple=2, dp_size=2) == (((1, 3), (7,), (0,)), ((4, 6), (2,), (5,)))
    assert batch_dynamically(lengths, row_tokens=32, length_multiple=2, dp_size=2) == (((1, 3, 7, 0),), ((4, 6, 2, 5),))


def test_rows_in_order_by_hand():
    assert batch_in_order(8, sequences_per_row=3, dp_size=2) == (((0, 1, 2), (3,)), ((4, 5, 6), (7,)))
    assert batch_in_order(5, sequences_per_row=1, dp_size=3) == (((0,), (1,)), ((2,), (3,)), ((4,), ()))


@pytest.mark.parametrize("dp_size", [16, 1])
def test_a_long_tailed_batch_is_planned_well_and_in_no_time(dp_size: int):
    draws = np.random.default_rng(7).lognormal(np.log(6000), 1.0, 2048)
    lengths = np.clip(draws, 16, 49152).astype(int).tolist()
    cost = SequenceCost(per_token=6.45e9, per_token_squared=49152.0)
    started = time.process_time()
    plan = pack(lengths, algorithm="balanced", row_tokens=49152, dp_size=dp_size, cost=cost)
    assert time.process_time() - started < 2.0
    fewest = -(-fewest_rows(lengths, 49152) // dp_size)
    assert len(plan[0]) <= 1.01 * fewest
    for measure in (float, cost.of):
        assert max(rank_shares(plan, lengths, measure)) <= 1.02
