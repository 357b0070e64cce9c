# SPDX-License-Identifier: Apache-2.0
"""Tokens of a context-parallel rank, and its attention, against whole sequences."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.policy import packed
from mrl.policy.packed import join, local_positions, zigzag_attention


def bounds(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def test_a_zigzag_by_hand():
    cu_seqlens = bounds([8, 4])
    assert local_positions(cu_seqlens, cp_size=2, cp_rank=0).tolist() == [0, 1, 6, 7, 8, 11]
    assert local_positions(cu_seqlens, cp_size=2, cp_rank=1).tolist() == [2, 3, 4, 5, 9, 10]
    assert local_positions(bounds([3, 2]), cp_size=1, cp_rank=0).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_parts_of_a_row_join_to_the_row(cp_size: int):
    cu_seqlens = bounds([2 * cp_size * num for num in (3, 1, 0, 5)])
    row = torch.randn(int(cu_seqlens[-1]))
    parts = [row[local_positions(cu_seqlens, cp_size=cp_size, cp_rank=rank)] for rank in range(cp_size)]
    assert {len(part) for part in parts} == {len(row) // cp_size}
    assert torch.equal(join(parts, cu_seqlens), row)


def test_a_sequence_without_its_padding_is_refused():
    with pytest.raises(AssertionError, match="multiple of 2"):
        local_positions(bounds([8, 6]), cp_size=2, cp_rank=0)


@pytest.mark.parametrize("cp_size", [2, 4])
def test_attention_of_all_ranks_is_that_of_whole_sequences(monkeypatch: pytest.MonkeyPatch, cp_size: int):
    # Chunks of 100 tokens and more are computed block by block, the last of which is smaller.
    monkeypatch.setattr(packed, "QUERY_BLOCK", 48)
    torch.manual_seed(0)
    cu_seqlens = bounds([2 * cp_size * num for num in (1, 5, 100, 1, 40, 7, 40, 130)])
    num_tokens = int(cu_seqlens[-1])
    query, key, value = (torch.randn(num_tokens, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    weights = torch.randn(num_tokens, 4, 8)
    expected = whole_attention(query, key, value, cu_seqlens)
    positions = [local_positions(cu_seqlens, cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)]
    of_ranks = torch.cat(positions)
    parts = [
        zigzag_attention(
            query[mine], key[of_ranks], value[of_ranks], cu_seqlens, cp_size=cp_size, cp_rank=rank, scale=None
        )
        for rank, mine in enumerate(positions)
    ]
    found = join(parts, cu_seqlens)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(
        *(torch.autograd.grad((t * weights).sum(), (query, key, value)) for t in (found, expected)), strict=True
    ):
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


def whole_attention(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor) -> Tensor:
    lengths, outputs = cu_seqlens.diff().tolist(), []
    for q, k, v in zip(*(t.split(lengths) for t in (query, key, value)), strict=True):
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1))
    return torch.cat(outputs)
