# SPDX-License-Identifier: Apache-2.0
import itertools
import json
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from mrl.data.planning import (
    PACKERS,
    RowPlan,
    SequenceCost,
    batch_dynamically,
    batch_in_order,
    concatenative,
    cost_of_model,
    first_fit_decreasing,
    first_fit_shuffle,
    largest_first,
    modified_first_fit_decreasing,
    pack,
    rank_shares,
    repack,
    sequence_cost,
)
from tests import models
from tests.sources import ROOT
from tests.waiting import growth

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
    """Tokens of every row of every rank."""
    return [[sum(lengths[index] for index in row) for row in rows] for rows in plan]


def members(plan: RowPlan) -> list[set[int]]:
    return [{index for row in rows for index in row} for rows in plan]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(lengths=lengths_lists, dp_size=dp_sizes, row_tokens=st.integers(60, 200), other_tokens=st.integers(60, 200))
def test_a_plan_holds_its_promises(
    algorithm: str, lengths: list[int], dp_size: int, row_tokens: int, other_tokens: int
):
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
        assert (
            worst(pack(lengths, algorithm="balanced", row_tokens=60, dp_size=dp_size, cost=cost)) <= best * 4 / 3 + 1e-9
        )


def test_work_is_balanced_where_tokens_cannot_be():
    # One of 8 is the work of 16 of 2: as many tokens on both ranks, 16 of 32, would be 80 : 32 of the work.
    lengths = [8] + [2] * 12
    plan = pack(
        lengths, algorithm="balanced", row_tokens=8, dp_size=2, cost=SequenceCost(per_token=0.0, per_token_squared=1.0)
    )
    assert rank_shares(plan, lengths, SequenceCost(0.0, 1.0).of) == pytest.approx([72 / 56, 40 / 56])
    assert rank_shares(plan, lengths, float) == pytest.approx([12 / 16, 20 / 16])


def test_the_larger_of_both_shares_decides_and_not_their_sum():
    # 8 and 3 beside 6 and 4 have 11 and 10 of 21 tokens, 73 and 52 of 125 of the work: at most 0.584. 8 beside the rest
    # has the least sum of tokens and work when 3 is dealt, and would have 13 of 21 tokens on the other rank: 0.619.
    plan = pack([8, 6, 4, 3], algorithm="balanced", row_tokens=24, dp_size=2, cost=SequenceCost(0.0, 1.0))
    assert members(plan) == [{0, 3}, {1, 2}]


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
def test_dynamic_rows_stay_within_the_budget_when_padded(
    lengths: list[int], dp_size: int, row_tokens: int, multiple: int
):
    plan = batch_dynamically(lengths, row_tokens=row_tokens, length_multiple=multiple, dp_size=dp_size)
    check(plan, len(lengths), dp_size)
    for rows in plan:
        for row in rows:
            assert len(row) * -(-max((lengths[i] for i in row), default=0) // multiple) * multiple <= row_tokens
    # Sorted by length, and dealt in turn: whatever the budget, a rank has the same sequences.
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    assert members(plan) == [set(order[rank::dp_size]) for rank in range(dp_size)]


def test_dynamic_rows_by_hand():
    # Sorted: 1 2 | 3 3 | 4 5 | 8 8, one of each pair to each rank. Rounded to 2, the longest of a pair count 2, 4, 6,
    # 8.
    lengths = [8, 1, 5, 3, 2, 8, 3, 4]
    # 2 x 4 fits into 12 tokens, 3 x 6 does not; 6 + 8 as 2 x 8 neither.
    assert batch_dynamically(lengths, row_tokens=12, length_multiple=2, dp_size=2) == (
        ((1, 3), (7,), (0,)),
        ((4, 6), (2,), (5,)),
    )
    assert batch_dynamically(lengths, row_tokens=32, length_multiple=2, dp_size=2) == (((1, 3, 7, 0),), ((4, 6, 2, 5),))


def test_rows_in_order_by_hand():
    assert batch_in_order(8, sequences_per_row=3, dp_size=2) == (((0, 1, 2), (3,)), ((4, 5, 6), (7,)))
    assert batch_in_order(5, sequences_per_row=1, dp_size=3) == (((0,), (1,)), ((2,), (3,)), ((4,), ()))


@pytest.mark.parametrize("dp_size", [16, 1])
def test_a_long_tailed_batch_is_planned_well_and_in_no_time(dp_size: int):
    draws = np.random.default_rng(7).lognormal(np.log(6000), 1.0, 2048)
    lengths = np.clip(draws, 16, 49152).astype(int).tolist()
    cost = SequenceCost(per_token=6.45e9, per_token_squared=49152.0)
    plans = {}

    def plan_first(num: int) -> None:
        plans[num] = pack(lengths[:num], algorithm="balanced", row_tokens=49152, dp_size=dp_size, cost=cost)

    assert growth(plan_first, len(lengths) // 4) < 8
    plan = plans[len(lengths)]
    fewest = -(-fewest_rows(lengths, 49152) // dp_size)
    assert len(plan[0]) <= 1.01 * fewest
    for measure in (float, cost.of):
        assert max(rank_shares(plan, lengths, measure)) <= 1.02


def fewest_rows(lengths: Sequence[int], row_tokens: int) -> int:
    """A lower bound of the rows any packing needs (L2 of Martello and Toth, Discrete Applied Mathematics 28, 1990).

    For every k up to half a row: sequences longer than row - k share a row with none of at least k, those above half a
    row not with each other; what is at least k then fills the room that the latter leave.
    """
    items = sorted(lengths)
    total = [0, *itertools.accumulate(items)]
    above_half = bisect_right(items, row_tokens // 2)
    bound = math.ceil(total[-1] / row_tokens)
    for shortest in range(above_half):
        alone = bisect_right(items, row_tokens - items[shortest])
        num_open = alone - above_half
        room = num_open * row_tokens - (total[alone] - total[above_half])
        overflow = total[above_half] - total[shortest] - room
        bound = max(bound, len(items) - above_half + max(0, math.ceil(overflow / row_tokens)))
    return max(bound, len(items) - above_half)


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
    # 33 takes the shortest, 11, and the longest that fits beside it: 16 leaves no room, 15 does. First fit decreasing
    # would take 16 first.
    assert modified_first_fit_decreasing([33, 16, 15, 11], 59) == [[0, 3, 2], [1]]
    assert first_fit_decreasing([33, 16, 15, 11], 59) == [[0, 1], [2, 3]]


@given(st.lists(st.integers(1, 20), max_size=7), st.integers(20, 30))
def test_against_the_fewest_rows(lengths: list[int], row_tokens: int):
    best = optimum(lengths, row_tokens)
    assert fewest_rows(lengths, row_tokens) <= best
    assert len(first_fit_decreasing(lengths, row_tokens)) <= 11 / 9 * best + 6 / 9
    assert len(modified_first_fit_decreasing(lengths, row_tokens)) <= 71 / 60 * best + 1


QWEN = {
    "model_type": "qwen3_moe", "vocab_size": 100, "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "num_experts": 10, "num_experts_per_tok": 2, "moe_intermediate_size": 5,
    "intermediate_size": 16, "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "norm_topk_prob": True, "hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": [],
    "attention_bias": False,
}  # fmt: skip


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_mixture_by_hand(is_tied: bool):
    cost = cost_of_model(QWEN | {"tie_word_embeddings": is_tied})
    attention = 8 * 24 + 2 * 8 * 12 + 24 * 8  # query, key and value, output
    experts = 10 * 8 + 2 * (3 * 8 * 5)  # router, gate, up and down of two experts
    # The output layer multiplies, whether it is the embedding or not; the embedding itself does not.
    assert cost == SequenceCost(per_token=2.0 * (3 * (attention + experts) + 100 * 8), per_token_squared=2.0 * 3 * 24)
    assert cost.of(10) == 10 * cost.per_token + 100 * cost.per_token_squared


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_operations_are_those_that_torch_counts_in_a_forward_pass(name: str):
    model, length = models.tiny_model(name), 32
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(length)[None])
    cost = cost_of_model(model.config.to_dict())
    # Eager attention also computes the half of the scores that it masks.
    assert counter.get_total_flops() == cost.of(length) + cost.per_token_squared * length**2


def test_a_scan_takes_seven_operations_for_each_element_of_the_states():
    cost = cost_of_model(models.TINY_NEMOTRON_H | {"model_type": "nemotron_h"})
    # Three Mamba layers of 8 heads with 16 channels, each with a state of 16.
    assert cost.scan_per_token == 3 * 7 * (8 * 16) * 16 < 0.1 * cost.per_token


def test_mamba_layers_have_no_quadratic_term():
    folder = ROOT / "scripts" / "bench" / "models"
    hybrid, decoder = (
        cost_of_model(json.loads((folder / f"{name}.config.json").read_text()))
        for name in ("nemotron3_nano_30b_a3b", "qwen3_30b_a3b")
    )
    # 3.2 and 3.0 billion parameters at work per token, as the model cards say without embeddings; 6 of 52 layers
    # attend, and 48 of 48.
    assert hybrid.per_token / 2e9 == pytest.approx(3.2, abs=0.05)
    assert decoder.per_token / 2e9 == pytest.approx(3.0, abs=0.05)
    assert (hybrid.per_token_squared, decoder.per_token_squared) == (2 * 6 * 32 * 128, 2 * 48 * 32 * 128)


def test_the_model_is_named_by_its_folder(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    assert sequence_cost(str(tmp_path)) == cost_of_model(QWEN)
