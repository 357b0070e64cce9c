# SPDX-License-Identifier: Apache-2.0
"""Packed rows as padded batches of sequences of similar length, and causal attention over them. No Megatron.

Under context parallelism every sequence of a row is cut into 2 * cp chunks of equal length; rank r holds chunks r and 2
* cp - 1 - r, in this order, so that causal attention is the same work on every rank. This is the order of Transformer
  Engine's THD format.
Shape suffixes: T tokens of a row, P rows of the padded buffer, S sequences, N sequences of a bucket, C padded length of
a chunk, H heads, G groups of heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Rows of a mask at a time: 512 queries with 49,152 keys make 25 MB of booleans, all 12,288 queries of a chunk would
# make 600.
QUERY_BLOCK = 512


@dataclass(frozen=True)
class Bucket:
    """Sequences of one padded length; they occupy rows [start, start + num_sequences * length) of the padded buffer."""

    start: int
    num_sequences: int
    length: int
    members: Tensor
    """int64 [num_sequences], which of the sequences these are."""


@dataclass(frozen=True)
class PackedLayout:
    """Places of a packed row's tokens in the padded buffer."""

    slots_T: Tensor
    """int64, row of the padded buffer."""
    num_slots: int
    buckets: tuple[Bucket, ...]

    def unpack(self, x_T: Tensor) -> list[Tensor]:
        """One batch [num_sequences, length, ...] per bucket; positions after the end of a sequence are zero."""
        x_P = x_T.new_zeros(self.num_slots, *x_T.shape[1:]).index_copy_(0, self.slots_T, x_T)
        return [
            x_P[bucket.start : bucket.start + bucket.num_sequences * bucket.length].unflatten(
                0, (bucket.num_sequences, bucket.length)
            )
            for bucket in self.buckets
        ]

    def pack(self, batches: list[Tensor]) -> Tensor:
        """The inverse of `unpack`, [T, ...]; drops padded positions, which get no gradient."""
        return _Pack.apply(torch.cat([batch.flatten(0, 1) for batch in batches]), self.slots_T)


def packed_layout(lengths_S: Tensor, *, multiple: int, chunk: int) -> PackedLayout:
    """The layout for sequences of these lengths (integers, in the order of the row, zeros allowed)."""

    def rounded_up(step: int) -> Tensor:
        return (lengths_S + step - 1) // step * step

    lengths_S = lengths_S.long()
    padded_S = torch.where(lengths_S <= chunk, rounded_up(multiple).clamp(max=chunk), rounded_up(chunk))
    first_slot_S = torch.zeros_like(padded_S)
    buckets, num_slots = [], 0
    for length in sorted(set(padded_S.tolist()) - {0}):
        members = (padded_S == length).nonzero().flatten()
        first_slot_S[members] = num_slots + length * torch.arange(len(members), device=members.device)
        buckets.append(Bucket(num_slots, len(members), length, members))
        num_slots += len(members) * length
    first_token_S = lengths_S.cumsum(0) - lengths_S
    shift_T = (first_slot_S - first_token_S).repeat_interleave(lengths_S)
    return PackedLayout(shift_T + torch.arange(len(shift_T), device=shift_T.device), num_slots, tuple(buckets))


class _Pack(torch.autograd.Function):
    # Every token has one slot, so the backward pass is a plain copy: deterministic, no index_add.
    @staticmethod
    def forward(ctx, x_P: Tensor, slots_T: Tensor) -> Tensor:
        ctx.save_for_backward(slots_T)
        ctx.num_slots = x_P.shape[0]
        return x_P.index_select(0, slots_T)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        (slots_T,) = ctx.saved_tensors
        (grad_T,) = grads
        return grad_T.new_zeros(ctx.num_slots, *grad_T.shape[1:]).index_copy_(0, slots_T, grad_T), None


def local_positions(cu_seqlens: Tensor, *, cp_size: int, cp_rank: int) -> Tensor:
    """Positions in the row of the tokens of one rank, int64 [T / cp], in that rank's order.

    With `cp_size` above 1, each of the lengths that `cu_seqlens` bounds is a multiple of 2 * cp_size.
    """
    starts_S, lengths_S = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    if cp_size == 1:
        return torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
    chunks_S = lengths_S // (2 * cp_size)
    assert torch.equal(chunks_S * 2 * cp_size, lengths_S), "pack_row pads every sequence to a multiple of 2 * cp"
    first_S2 = torch.stack([starts_S + cp_rank * chunks_S, starts_S + (2 * cp_size - 1 - cp_rank) * chunks_S], dim=1)
    lengths_2S = chunks_S.repeat_interleave(2)
    shift_2S = first_S2.flatten() - (lengths_2S.cumsum(0) - lengths_2S)
    shift_T = shift_2S.repeat_interleave(lengths_2S)
    return shift_T + torch.arange(len(shift_T), device=cu_seqlens.device)


def join(parts: list[Tensor], cu_seqlens: Tensor) -> Tensor:
    """The values of a whole row in its order, [T], from those of every rank, [T / cp] each, in order of rank."""
    positions_T = torch.cat(
        [local_positions(cu_seqlens, cp_size=len(parts), cp_rank=rank) for rank in range(len(parts))]
    )
    values_T = torch.cat(parts)
    return torch.empty_like(values_T).index_copy_(0, positions_T.to(values_T.device), values_T)


def packed_attention(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float | None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Causal attention within each sequence of a whole row, [T, H, D].

    With `window`, a token reads as many tokens, itself among them. `sinks_H`: each head's softmax has one more logit,
    of which nothing is read.
    """
    layout = packed_layout(cu_seqlens.diff(), multiple=16, chunk=64)
    outputs = []
    for batches in zip(*(layout.unpack(t) for t in (query_THD, key_TGD, value_TGD)), strict=True):
        q, k, v = (t.transpose(1, 2) for t in batches)
        # Padding follows a sequence's tokens, so the causal mask hides it.
        if sinks_H is None:
            assert window is None, "the models with windows have sinks"
            output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        else:
            output = _sink_attention(q, k, v, sinks_H, window, scale)
        outputs.append(output.transpose(1, 2))
    return layout.pack(outputs)


def _sink_attention(
    query_NHCD: Tensor, key_NGCD: Tensor, value_NGCD: Tensor, sinks_H: Tensor, window: int | None, scale: float | None
) -> Tensor:
    """Causal attention with sinks, block by block, [N, H, C, D]; the backward pass makes scores again."""

    def block(query: Tensor, key: Tensor, value: Tensor, sinks_H: Tensor, first: int, low: int) -> Tensor:
        places = first + torch.arange(query.shape[2], device=query.device)[:, None]
        positions = low + torch.arange(key.shape[2], device=query.device)
        is_seen = positions <= places
        if window is not None:
            is_seen = is_seen & (positions > places - window)
        bias = torch.zeros_like(is_seen, dtype=query.dtype).masked_fill_(~is_seen, -torch.inf)
        of_sinks = sinks_H.to(query.dtype)[:, None, None].expand(-1, query.shape[2], 1)
        # The key of zeros has the score 0, so that its bias is the sink; its value is zero.
        bias = torch.cat([bias.expand(len(sinks_H), -1, -1), of_sinks], dim=2)
        key, value = (F.pad(t, (0, 0, 0, 1)) for t in (key, value))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale, enable_gqa=True)

    blocks = []
    for first in range(0, query_NHCD.shape[2], QUERY_BLOCK):
        query = query_NHCD[:, :, first : first + QUERY_BLOCK]
        low = 0 if window is None else max(0, first - window + 1)
        k, v = (t[:, :, low : first + query.shape[2]] for t in (key_NGCD, value_NGCD))
        found = checkpoint(block, query, k, v, sinks_H, first, low, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(found, Tensor)
        blocks.append(found)
    return torch.cat(blocks, dim=2)


def zigzag_attention(
    query_THD: Tensor,
    keys_TGD: Tensor,
    values_TGD: Tensor,
    cu_seqlens: Tensor,
    *,
    cp_size: int,
    cp_rank: int,
    scale: float | None,
) -> Tensor:
    """Causal attention of a rank's queries [T / cp, H, D] per sequence, over all ranks' keys and values, rank by rank.

    The backward pass makes masks again: kept, they would be the largest tensors of a long row.
    """

    def in_order(of_ranks: Tensor) -> Tensor:
        """Chunks [cp * N * 2, C, ...], rank after rank, as sequences of all their chunks, [N, 2 * cp * C, ...]."""
        early, late = of_ranks.unflatten(0, (cp_size, -1, 2)).unbind(2)
        return torch.cat([early, late.flip(0)]).transpose(0, 1).flatten(1, 2)

    halves_2S = (cu_seqlens.diff() // (2 * cp_size)).repeat_interleave(2)
    of_queries = packed_layout(halves_2S, multiple=16, chunk=64)
    of_keys = packed_layout(halves_2S.repeat(cp_size), multiple=16, chunk=64)
    is_token_T = torch.ones(keys_TGD.shape[0], device=keys_TGD.device)
    outputs = []
    for query, *ranks in zip(
        of_queries.unpack(query_THD), *(of_keys.unpack(t) for t in (keys_TGD, values_TGD, is_token_T)), strict=True
    ):
        keys, values, is_token = map(in_order, ranks)
        halves = [
            _chunk_attention(half_NCHD, keys, values, is_token.bool(), index, scale)
            for half_NCHD, index in zip(
                query.unflatten(0, (-1, 2)).unbind(1), (cp_rank, 2 * cp_size - 1 - cp_rank), strict=True
            )
        ]
        outputs.append(torch.stack(halves, dim=1).flatten(0, 1))
    return of_queries.pack(outputs)


def _chunk_attention(
    query_NCHD: Tensor, keys: Tensor, values: Tensor, is_token: Tensor, chunk_index: int, scale: float | None
) -> Tensor:
    """Attention of one chunk over itself and all earlier chunks, [N, C, H, D]."""

    def masked(query: Tensor, key: Tensor, value: Tensor, is_token: Tensor, first: int) -> Tensor:
        positions = torch.arange(key.shape[2], device=key.device)
        is_seen = (positions <= first + torch.arange(query.shape[2], device=key.device)[:, None]) & is_token[
            :, None, None, :
        ]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=is_seen, scale=scale, enable_gqa=True)

    length = query_NCHD.shape[1]
    blocks = []
    for start in range(0, length, QUERY_BLOCK):
        query = query_NCHD[:, start : start + QUERY_BLOCK].transpose(1, 2)
        first = chunk_index * length + start
        seen = first + query.shape[2]
        k, v = (t[:, :seen].transpose(1, 2) for t in (keys, values))
        block = checkpoint(
            masked, query, k, v, is_token[:, :seen], first, use_reentrant=False, preserve_rng_state=False
        )
        assert isinstance(block, Tensor)
        blocks.append(block.transpose(1, 2))
    return torch.cat(blocks, dim=1)
