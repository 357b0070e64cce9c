# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrl.data.packing import MAX_SAMPLED_TOKENS, PackedRow, pack_row, regroup, token_samples
from mrl.types import FixedAdvantage, Rollout, TokenSample, Turn
from tests.rollouts import pulled, request

PAD = 256


def rollout(prompt: list[int], tokens: list[int], logprobs: list[float] | None = None) -> Rollout:
    values = [-0.5 - i for i in range(len(tokens))] if logprobs is None else logprobs
    return Rollout(request(prompt), 1, np.array(tokens, dtype=np.int32), np.array(values, dtype=np.float32), "stop")


def test_a_row_by_hand():
    row = pack_row(
        {4: pulled(rollout([1, 2], [3, 4]), 0.5, True), 9: pulled(rollout([5], [6, 7, 8]), -1.5, True)},
        divisible_by=5,
        pad_token_id=PAD,
    )
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


def test_a_sampled_sequence_has_every_number_at_its_own_token():
    sequences = {4: pulled(rollout([1, 2], [3, 4]), 0.5, True), 9: pulled(rollout([5], [6, 7, 8]), -1.5, False)}
    # Old logprobs exist at the prompt's tokens too, where no one wants them.
    old_T = torch.arange(10).float()
    row = pack_row(sequences, divisible_by=10, sequence_multiple=5, pad_token_id=PAD)
    row.entropy_T, row.old_logprobs_T = old_T / 8, old_T
    assert token_samples(row, [4]) == {
        4: TokenSample(
            [1, 2, 3, 4],
            [0, 0, 1, 1],
            [0, 0, -0.5, -1.5],
            [0, 0, 1, 2],
            [0, 0, 0.5, 0.5],
            [0, 0, 1, 1],
            [0, 0, 0.125, 0.25],
        )
    }
    (second,) = token_samples(replace(row, old_logprobs_T=None), [9, 77]).values()
    assert second == TokenSample(
        [5, 6, 7, 8], [0, 1, 1, 1], [0, -0.5, -1.5, -2.5], None, [0, 0, 0, 0], [0, 0, 0, 0], [0, 0.625, 0.75, 0.875]
    )


def test_a_long_sequence_is_sampled_to_its_bound():
    row = pack_row({0: pulled(rollout([1], list(range(2, 5002))), 1.0, True)}, divisible_by=1, pad_token_id=PAD)
    (sample,) = token_samples(replace(row, entropy_T=torch.zeros(5001)), [0]).values()
    lengths = {
        len(values)
        for values in (
            sample.token_ids,
            sample.is_generated,
            sample.generator_logprobs,
            sample.advantages,
            sample.loss_mask,
        )
    }
    assert lengths == {MAX_SAMPLED_TOKENS}


def test_an_invalid_sequence_is_generated_but_not_trained():
    row = pack_row({0: pulled(rollout([1, 2], [3]), 9.0, False)}, divisible_by=1, pad_token_id=PAD)
    assert row.generated_mask_T.tolist() == [0, 1, 0]
    assert row.loss_mask_T.tolist() == row.advantages_T.tolist() == [0, 0, 0]
    assert (row.num_valid_tokens, row.num_valid_sequences) == (0, 0)


def test_what_the_environment_said_is_seen_and_not_trained():
    turns = replace(
        rollout([1], [2, 3, 40, 41, 5], [-0.5, -1.5, 0.0, 0.0, -2.5]), earlier_turns=(Turn(0, 2, 7),), last_turn_start=4
    )
    row = pack_row({0: pulled(turns, 2.0, True)}, divisible_by=1, pad_token_id=PAD)
    assert row.token_ids_T.tolist() == [1, 2, 3, 40, 41, 5]
    assert row.labels_T.tolist() == [2, 3, 40, 41, 5, 0]
    assert row.loss_mask_T.tolist() == row.generated_mask_T.tolist() == [1, 1, 0, 0, 1, 0]
    assert row.generator_logprobs_T.tolist() == [-0.5, -1.5, 0, 0, -2.5, 0]
    assert row.advantages_T.tolist() == [2, 2, 0, 0, 2, 0]
    assert (row.num_valid_tokens, row.lengths) == (3, [6])
    assert turns.turns == (Turn(0, 2, 7), Turn(4, 5, 1))


def test_fixed_advantages_and_rewards_stand_at_their_tokens():
    spans = (FixedAdvantage(0, 2, -5.0), FixedAdvantage(1, 3, -1.0))
    sequences = {
        0: pulled(rollout([1, 2], [3, 4, 5, 6]), 0.5, True, 1.0, spans),
        1: pulled(rollout([5], [6]), 0.5, True, -1.0),
        2: pulled(rollout([5], [6]), 0.5, False, 1.0),
    }
    row = pack_row(sequences, divisible_by=12, pad_token_id=PAD)
    assert row.fixed_advantages_T[1:4].tolist() == [-5.0, -1.0, -1.0]
    assert row.fixed_advantages_T.isnan().sum() == 9
    assert row.sequence_rewards.tolist() == [1.0, -1.0, 1.0, 0.0]
    # Valid tokens of rewards above 0.
    assert row.positive_mask_T.nonzero().flatten().tolist() == [1, 2, 3, 4]
    masked = row.masked(torch.tensor([False, True, True, True]))
    assert masked.loss_mask_T.nonzero().flatten().tolist() == [6]
    assert (masked.num_valid_tokens, masked.num_valid_sequences, row.num_valid_sequences) == (1, 1, 2)


def test_an_empty_row_is_padding():
    row = pack_row({}, divisible_by=4, pad_token_id=PAD)
    assert row.token_ids_T.tolist() == [PAD] * 4
    assert row.cu_seqlens.tolist() == [0, 4]
    assert (row.num_valid_tokens, row.num_valid_sequences, row.sequence_indices) == (0, 0, [])


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.booleans()), max_size=6),
    st.integers(1, 8),
    st.sampled_from([1, 4]),
)
def test_every_sequence_can_be_read_back(
    shapes: list[tuple[int, int, bool]], divisible_by: int, sequence_multiple: int
):
    divisible_by *= sequence_multiple
    rollouts = [rollout(list(range(1, p + 1)), list(range(100, 100 + g))) for p, g, _ in shapes]
    sequences = {
        i: pulled(item, float(i + 1), is_valid)
        for i, (item, (_, _, is_valid)) in enumerate(zip(rollouts, shapes, strict=True))
    }
    row = pack_row(sequences, divisible_by=divisible_by, sequence_multiple=sequence_multiple, pad_token_id=PAD)
    bounds = row.cu_seqlens.tolist()
    assert bounds[-1] == len(row.token_ids_T) and bounds[-1] % divisible_by == 0
    assert row.max_seqlen == max(b - a for a, b in zip(bounds, bounds[1:], strict=False))
    for sequence, start, stop in zip(sequences.values(), bounds, bounds[1:], strict=False):
        item, is_valid = sequence.rollout.pulled, sequence.is_valid
        tokens = [*item.request.token_ids, *item.token_ids.tolist()]
        padding = [PAD] * (stop - start - len(tokens))
        assert (stop - start) % sequence_multiple == 0 and len(padding) < sequence_multiple
        assert row.token_ids_T[start:stop].tolist() == tokens + padding
        assert row.position_ids_T[start:stop].tolist() == list(range(stop - start))
        generated = row.generated_mask_T[start:stop].bool()
        assert row.labels_T[start:stop][generated].tolist() == item.token_ids.tolist()
        assert row.generator_logprobs_T[start:stop][generated].tolist() == item.generator_logprobs.tolist()
        assert row.loss_mask_T[start:stop].tolist() == (generated.float() * is_valid).tolist()
        assert row.advantages_T[start:stop].tolist() == (generated.float() * is_valid * sequence.advantage).tolist()
    assert row.num_valid_tokens == sum(g for _, g, is_valid in shapes if is_valid)
    assert row.num_valid_sequences == sum(g > 0 for _, g, is_valid in shapes if is_valid)


def test_routes_stand_at_their_tokens():
    short, long = (np.full((length, 2, 3), 7, dtype=np.uint8) for length in (2, 3))
    routed = [replace(rollout([1, 2], [3]), routes=short), replace(rollout([5], [6, 7, 8]), routes=long)]
    sequences = {index: pulled(item, 1.0, True) for index, item in enumerate(routed)}
    row = pack_row(sequences, divisible_by=12, sequence_multiple=4, pad_token_id=PAD)
    assert row.routes is not None and row.routes.expert_ids_TLK.dtype == torch.uint8
    # The last token of a sequence and padding have no route.
    assert row.routes.is_known_T.tolist() == [True, True, False, False, True, True, True, *[False] * 5]
    assert torch.equal(row.routes.expert_ids_TLK, 7 * row.routes.is_known_T[:, None, None].expand(12, 2, 3).byte())


def test_routes_beyond_a_byte_keep_their_ids():
    routed = replace(rollout([1], [2, 3]), routes=np.array([[[511, 0]], [[300, 2]]], dtype=np.uint16))
    row = pack_row({0: pulled(routed, 1.0, True)}, divisible_by=1, pad_token_id=PAD)
    assert row.routes is not None and row.routes.expert_ids_TLK.tolist() == [[[511, 0]], [[300, 2]], [[0, 0]]]


def test_rollouts_with_and_without_routes_do_not_share_a_row():
    routed = replace(rollout([1], [2]), routes=np.zeros((1, 1, 1), dtype=np.uint8))
    with pytest.raises(ValueError, match="1 of 2 rollouts"):
        pack_row(
            {0: pulled(routed, 1.0, True), 1: pulled(rollout([1], [2]), 1.0, True)}, divisible_by=1, pad_token_id=PAD
        )


def test_a_rollout_in_which_nothing_was_sampled_has_no_routes():
    routed = replace(rollout([1], [2, 3]), routes=np.full((2, 1, 1), 300, dtype=np.uint16))
    empty = replace(rollout([1], [2]), routes=np.zeros((0, 0, 0), dtype=np.uint8))
    row = pack_row({0: pulled(empty, 0.0, False), 1: pulled(routed, 1.0, True)}, divisible_by=1, pad_token_id=PAD)
    assert row.routes is not None and row.routes.expert_ids_TLK.flatten().tolist() == [0, 0, 300, 300, 0]
    assert row.routes.is_known_T.tolist() == [False, False, True, True, False]
    assert pack_row({0: pulled(empty, 0.0, False)}, divisible_by=1, pad_token_id=PAD).routes is None


def test_values_follow_their_sequences_into_other_rows():
    sequences = [pulled(rollout([1], list(range(length))), 0.5, True) for length in [2, 7, 4]]

    def packed(plan: list[list[int]]) -> list[PackedRow]:
        return [
            pack_row({i: sequences[i] for i in row}, divisible_by=8, sequence_multiple=4, pad_token_id=PAD)
            for row in plan
        ]

    rows, other_rows = packed([[1], [2, 0], []]), packed([[0, 2, 1]])
    # Sequence i has the values 10 i, 10 i + 1, ..., its padding too; padding of a row has -1.
    values = [torch.arange(size) + 10.0 * index for index, size in enumerate((4, 8, 8))]
    row_padding = [torch.full((size,), -1.0) for size in (0, 4, 8)]
    of_rows = [
        torch.cat([values[1], row_padding[0]]),
        torch.cat([values[2], values[0], row_padding[1]]),
        row_padding[2],
    ]
    (regrouped,) = regroup(of_rows, rows, other_rows)
    assert regrouped.tolist() == torch.cat([values[0], values[2], values[1], torch.zeros(4)]).tolist()
    assert [part.tolist() for part in regroup([regrouped], other_rows, packed([[1], []]))] == [
        values[1].tolist(),
        [0.0] * 8,
    ]
    assert regroup(of_rows, rows, rows) is of_rows
