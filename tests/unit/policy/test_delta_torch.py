# SPDX-License-Identifier: Apache-2.0
"""The padded, chunked gated delta rule and its convolution against transformers' and a loop, one sequence at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from mrl.policy.delta_torch import chunk_gated_delta_rule, packed_convolution

LENGTHS = (1, 5, 64, 130, 17)
HEADS, KEY, VALUE = 3, 8, 4


def test_a_row_gives_outputs_and_gradients_of_its_sequences_token_by_token():
    draw = torch.Generator().manual_seed(0)
    shapes = {"query": KEY, "key": KEY, "value": VALUE}
    named = {
        name: torch.randn(1, sum(LENGTHS), HEADS, width, generator=draw).requires_grad_()
        for name, width in shapes.items()
    }
    decays, beta = torch.randn(2, 1, sum(LENGTHS), HEADS, generator=draw)
    # Up to e^-20 for a token: sums over a chunk that float32 rounds to two digits.
    named |= {"g": (-6 * F.softplus(decays)).requires_grad_(), "beta": beta.sigmoid().requires_grad_()}
    bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    ours, _ = chunk_gated_delta_rule(**named, cu_seqlens=bounds, use_qk_l2norm_in_kernel=True)
    parts = [
        torch_recurrent_gated_delta_rule(
            **{name: tensor[:, start:stop] for name, tensor in named.items()}, use_qk_l2norm_in_kernel=True
        )[0]
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    ]
    theirs = torch.cat(parts, dim=1)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    weights = torch.randn(ours.shape, generator=draw)
    found, expected = (torch.autograd.grad((y * weights).sum(), list(named.values())) for y in (ours, theirs))
    for name, gradient, other in zip(named, found, expected, strict=True):
        torch.testing.assert_close(gradient, other, atol=2e-6, rtol=1e-4, msg=name)


def test_a_convolution_reads_no_other_sequence():
    x, weight = torch.randn(7, 3), torch.randn(3, 4)
    found = packed_convolution(x, weight, torch.tensor([0, 5, 7]))
    for start, stop in ((0, 5), (5, 7)):
        for t in range(start, stop):
            expected = sum(x[t - k] * weight[:, 3 - k] for k in range(4) if t - k >= start)
            torch.testing.assert_close(found[t], expected)
