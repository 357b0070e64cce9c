# SPDX-License-Identifier: Apache-2.0
"""Packed rows to padded batches and back."""

import torch

from mrl.policy.packed import packed_layout

LENGTHS = torch.tensor([3, 0, 16, 17, 70, 1, 64, 130])


def test_unpack_gives_every_sequence_followed_by_zeros():
    row = torch.randn(int(LENGTHS.sum()), 2)
    layout = packed_layout(LENGTHS, multiple=16, chunk=64)
    assert [(bucket.num_sequences, bucket.length) for bucket in layout.buckets] == [
        (3, 16),
        (1, 32),
        (1, 64),
        (1, 128),
        (1, 192),
    ]
    padded = {batch.shape[1]: batch for batch in layout.unpack(row)}
    sequences = row.split(LENGTHS.tolist())
    for bucket_length, index, sequence in [
        (16, 0, 0),
        (16, 1, 2),
        (16, 2, 5),
        (32, 0, 3),
        (128, 0, 4),
        (64, 0, 6),
        (192, 0, 7),
    ]:
        length = len(sequences[sequence])
        assert torch.equal(padded[bucket_length][index, :length], sequences[sequence])
        assert not padded[bucket_length][index, length:].any()


def test_pack_undoes_unpack_and_both_pass_gradients_through():
    row = torch.randn(int(LENGTHS.sum()), 2, requires_grad=True)
    layout = packed_layout(LENGTHS, multiple=16, chunk=64)
    again = layout.pack([batch * 3 + 1 for batch in layout.unpack(row)])
    assert torch.allclose(again, row * 3 + 1)
    weights = torch.randn_like(again)
    (again * weights).sum().backward()
    assert row.grad is not None and torch.allclose(row.grad, weights * 3)
