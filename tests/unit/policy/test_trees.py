# SPDX-License-Identifier: Apache-2.0
"""Attention and Mamba layers over prefix trees against every path by itself, in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mrl.data.packing import PrefixTree
from mrl.policy.mamba_torch import Mixer
from mrl.policy.trees import tree_attention, tree_mix
from tests.unit.policy.test_mamba_torch import CHANNELS, GROUPS, HEAD_DIM, HEADS, INNER, WIDTH, recurrence, relative

# Nodes shorter than the convolution, of a chunk and more, one below another, and padding.
LENGTHS, PARENTS = (40, 5, 1, 2, 50, 20, 18, 33, 3, 7), (-1, -1, 0, 0, 0, 1, 2, 2, 7, -1)
LEVELS = (range(2), range(2, 6), range(6, 8), range(8, 9), range(9, 10))
NUM_TOKENS = sum(LENGTHS)
TREE = PrefixTree(torch.arange(NUM_TOKENS), torch.arange(NUM_TOKENS), LENGTHS, PARENTS, (1,) * len(LENGTHS), LEVELS)
LEAVES = set(range(len(LENGTHS))) - set(PARENTS)


def test_attention_reads_the_whole_path():
    torch.manual_seed(0)
    ours = [torch.randn(NUM_TOKENS, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
    query, key, value = ours
    output = tree_attention(query, key, value, TREE, scale=0.5)
    weights = torch.randn_like(output)
    expected = torch.zeros_like(output)
    for node, length in enumerate(LENGTHS):
        tokens = TREE.path_tokens(node)
        q, k, v = (tensor[tokens].transpose(0, 1) for tensor in theirs)
        k, v = (tensor.repeat_interleave(2, 0) for tensor in (k, v))
        scores = (q @ k.transpose(1, 2) * 0.5).masked_fill(
            torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1), float("-inf")
        )
        whole = (scores.softmax(-1) @ v).transpose(0, 1)
        expected = expected.index_put((tokens[-length:],), whole[-length:])
    assert torch.allclose(output, expected, atol=1e-12)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert relative(mine.grad, other.grad) < 1e-12


def test_a_mamba_layer_goes_on_from_the_state_above():
    torch.manual_seed(0)
    tensors = dict(
        xbcdt=torch.randn(NUM_TOKENS, CHANNELS + HEADS),
        weight=torch.randn(CHANNELS, WIDTH) * 0.3,
        bias=torch.randn(CHANNELS) * 0.1,
        dt_bias=torch.randn(HEADS),
        A=-torch.rand(HEADS) * 8 - 0.1,
        D=torch.randn(HEADS),
    )
    ours = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    exact = {name: tensor.double().requires_grad_() for name, tensor in tensors.items()}
    parameters = ("weight", "bias", "dt_bias", "A", "D")
    mixer = Mixer(*(ours[name] for name in parameters), num_groups=GROUPS, head_dim=HEAD_DIM, chunk=16)
    output = tree_mix(mixer, ours["xbcdt"], TREE)
    expected = torch.zeros_like(output, dtype=torch.float64)
    # The recurrence has the gate, too: this one is 1.
    gate = torch.full((1, INNER), 1.2784645427610738, dtype=torch.float64)
    assert F.silu(gate).sub(1).abs().max() < 1e-12
    for leaf in LEAVES:
        tokens = TREE.path_tokens(leaf)
        whole = recurrence(
            torch.cat([gate.expand(len(tokens), -1), exact["xbcdt"][tokens]], dim=-1),
            *(exact[name] for name in parameters),
        )
        # Beginnings come with each of their leaves, and are the same.
        expected = expected.index_put((tokens,), whole)
    assert relative(output, expected) < 1e-6
    weights = torch.randn(NUM_TOKENS, INNER)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    for name, tensor in ours.items():
        assert relative(tensor.grad, exact[name].grad) < 2e-6, name
