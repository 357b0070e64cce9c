"""Packed rows to padded batches and back, so that kernels compute sequences of similar length together.

Shape suffixes: T packed tokens, P rows of the padded buffer, S sequences; trailing dimensions are any.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bucket:
    """Sequences that share one padded length; they occupy rows [start, start + num_sequences * length) of the padded buffer."""

    start: int
    num_sequences: int
    length: int


@dataclass(frozen=True)
class PackedLayout:
    """Where each token of a packed row stands in the padded buffer."""

    slots_T: Tensor
    """int64, row of the padded buffer."""
    num_slots: int
    buckets: tuple[Bucket, ...]

    def unpack(self, x_T: Tensor) -> list[Tensor]:
        """One batch [num_sequences, length, ...] per bucket; positions after the end of a sequence are zero."""
        x_P = x_T.new_zeros(self.num_slots, *x_T.shape[1:]).index_copy_(0, self.slots_T, x_T)
        return [
            x_P[bucket.start : bucket.start + bucket.num_sequences * bucket.length].unflatten(0, (bucket.num_sequences, bucket.length))
            for bucket in self.buckets
        ]

    def pack(self, batches: list[Tensor]) -> Tensor:
        """The inverse of `unpack`, [T, ...]; drops padded positions, which get no gradient."""
        return _Pack.apply(torch.cat([batch.flatten(0, 1) for batch in batches]), self.slots_T)


def packed_layout(lengths_S: Tensor, *, multiple: int, chunk: int) -> PackedLayout:
    """The layout for sequences of these lengths (integers, in the order of the row, zeros allowed).

    Lengths up to `chunk` are padded to `multiple`, longer ones to `chunk`: few buckets, little padding.
    """
    lengths_S = lengths_S.long()
    padded_S = torch.where(lengths_S <= chunk, _round_up(lengths_S, multiple).clamp(max=chunk), _round_up(lengths_S, chunk))
    first_slot_S = torch.zeros_like(padded_S)
    buckets, num_slots = [], 0
    for length in sorted(set(padded_S.tolist()) - {0}):
        members = (padded_S == length).nonzero().flatten()
        first_slot_S[members] = num_slots + length * torch.arange(len(members), device=members.device)
        buckets.append(Bucket(num_slots, len(members), length))
        num_slots += len(members) * length
    first_token_S = lengths_S.cumsum(0) - lengths_S
    shift_T = (first_slot_S - first_token_S).repeat_interleave(lengths_S)
    slots_T = shift_T + torch.arange(len(shift_T), device=shift_T.device)
    return PackedLayout(slots_T, num_slots, tuple(buckets))


def _round_up(numbers: Tensor, multiple: int) -> Tensor:
    return (numbers + multiple - 1) // multiple * multiple


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
