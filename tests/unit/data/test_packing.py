import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrl.data.packing import pack_row, plan_rows
from mrl.types import Rollout
from tests.rollouts import request

PAD = 256
lengths_lists = st.lists(st.integers(1, 60), min_size=0, max_size=60)


def rollout(prompt: list[int], tokens: list[int], logprobs: list[float] | None = None) -> Rollout:
    values = [-0.5 - i for i in range(len(tokens))] if logprobs is None else logprobs
    return Rollout(request(prompt), 1, np.array(tokens, dtype=np.int32), np.array(values, dtype=np.float32), "stop")


def test_a_row_by_hand():
    row = pack_row([(4, rollout([1, 2], [3, 4]), 0.5, True), (9, rollout([5], [6, 7, 8]), -1.5, True)], divisible_by=5, pad_token_id=PAD)
    assert row.token_ids_T.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, PAD, PAD]
    assert row.position_ids_T.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert row.labels_T.tolist() == [2, 3, 4, 0, 6, 7, 8, 0, 0, 0]
    assert row.loss_mask_T.tolist() == [0, 1, 1, 0, 1, 1, 1, 0, 0, 0]
    assert torch.equal(row.generated_mask_T, row.loss_mask_T)
    assert row.generator_logprobs_T.tolist() == [0, -0.5, -1.5, 0, -0.5, -1.5, -2.5, 0, 0, 0]
    assert row.advantages_T.tolist() == [0, 0.5, 0.5, 0, -1.5, -1.5, -1.5, 0, 0, 0]
    assert row.cu_seqlens.tolist() == [0, 4, 8, 10]
    assert (row.max_seqlen, row.sequence_indices) == (4, [4, 9])
    assert (row.num_valid_tokens, row.num_valid_sequences) == (5, 2)
    dtypes = {row.token_ids_T.dtype, row.position_ids_T.dtype, row.labels_T.dtype}
    assert dtypes == {torch.int64} and row.cu_seqlens.dtype == torch.int32 and row.loss_mask_T.dtype == torch.float32


def test_an_invalid_sequence_is_generated_but_not_trained():
    row = pack_row([(0, rollout([1, 2], [3]), 9.0, False)], divisible_by=1, pad_token_id=PAD)
    assert row.generated_mask_T.tolist() == [0, 1, 0]
    assert row.loss_mask_T.tolist() == row.advantages_T.tolist() == [0, 0, 0]
    assert (row.num_valid_tokens, row.num_valid_sequences) == (0, 0)


def test_an_empty_row_is_padding():
    row = pack_row([], divisible_by=4, pad_token_id=PAD)
    assert row.token_ids_T.tolist() == [PAD] * 4
    assert row.cu_seqlens.tolist() == [0, 4]
    assert (row.num_valid_tokens, row.num_valid_sequences, row.sequence_indices) == (0, 0, [])


def test_a_full_row_has_no_padding_sequence():
    row = pack_row([(0, rollout([1], [2, 3, 4]), 1.0, True)], divisible_by=4, pad_token_id=PAD)
    assert row.cu_seqlens.tolist() == [0, 4]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.booleans()), max_size=6), st.integers(1, 8))
def test_every_sequence_can_be_read_back(shapes: list[tuple[int, int, bool]], divisible_by: int):
    rollouts = [rollout(list(range(1, p + 1)), list(range(100, 100 + g))) for p, g, _ in shapes]
    sequences = [(i, item, float(i + 1), is_valid) for i, (item, (_, _, is_valid)) in enumerate(zip(rollouts, shapes, strict=True))]
    row = pack_row(sequences, divisible_by=divisible_by, pad_token_id=PAD)
    bounds = row.cu_seqlens.tolist()
    assert bounds[-1] == len(row.token_ids_T) and bounds[-1] % divisible_by == 0
    assert row.max_seqlen == max(b - a for a, b in zip(bounds, bounds[1:], strict=False))
    for (_, item, advantage, is_valid), start, stop in zip(sequences, bounds, bounds[1:], strict=False):
        assert row.token_ids_T[start:stop].tolist() == [*item.request.token_ids, *item.token_ids.tolist()]
        generated = row.generated_mask_T[start:stop].bool()
        assert row.labels_T[start:stop][generated].tolist() == item.token_ids.tolist()
        assert row.generator_logprobs_T[start:stop][generated].tolist() == item.generator_logprobs.tolist()
        assert row.loss_mask_T[start:stop].tolist() == (generated.float() * is_valid).tolist()
        assert row.advantages_T[start:stop].tolist() == (generated.float() * is_valid * advantage).tolist()
    assert row.num_valid_tokens == sum(g for _, g, is_valid in shapes if is_valid)
    assert row.num_valid_sequences == sum(g > 0 for _, g, is_valid in shapes if is_valid)


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
