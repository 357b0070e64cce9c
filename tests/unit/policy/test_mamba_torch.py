# SPDX-License-Identifier: Apache-2.0
"""The padded, chunked Mamba-2 kernel against the recurrence, token by token."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.policy.mamba_torch import GatedRMSNorm, mamba_split_conv1d_scan_combined

HEADS, HEAD_DIM, GROUPS, STATE, WIDTH = 4, 8, 2, 16, 4
INNER = HEADS * HEAD_DIM
CHANNELS = INNER + 2 * GROUPS * STATE


def recurrence(zxbcdt: Tensor, weight: Tensor, bias: Tensor, dt_bias: Tensor, A: Tensor, D: Tensor) -> Tensor:
    """Mamba-2 of one sequence [tokens, z|x|B|C|dt], one token after another."""
    z, xbc, dt = zxbcdt.split([INNER, CHANNELS, HEADS], -1)
    state, outputs = zxbcdt.new_zeros(HEADS, HEAD_DIM, STATE), []
    for t in range(len(zxbcdt)):
        conv = bias + sum(xbc[t - k] * weight[:, WIDTH - 1 - k] for k in range(min(t + 1, WIDTH)))
        x, B, C = F.silu(conv).split([INNER, GROUPS * STATE, GROUPS * STATE])
        x = x.view(HEADS, HEAD_DIM)
        B, C = (group.view(GROUPS, STATE).repeat_interleave(HEADS // GROUPS, 0) for group in (B, C))
        step = F.softplus(dt[t] + dt_bias)
        state = state * torch.exp(step * A)[:, None, None] + (step[:, None] * x)[:, :, None] * B[:, None, :]
        y = (state * C[:, None, :]).sum(-1) + D[:, None] * x
        outputs.append(y.flatten() * F.silu(z[t]))
    return torch.stack(outputs)


@pytest.mark.parametrize("lengths", [[5, 1, 17, 2, 40], [64], [150, 3, 65, 64], [200]], ids=str)
@pytest.mark.parametrize("chunk_size", [16, 128])
def test_packed_scan_equals_the_recurrence_of_each_sequence(lengths: list[int], chunk_size: int):
    torch.manual_seed(0)
    tensors = dict(
        zxbcdt=torch.randn(sum(lengths), INNER + CHANNELS + HEADS),
        weight=torch.randn(CHANNELS, WIDTH) * 0.3,
        bias=torch.randn(CHANNELS) * 0.1,
        dt_bias=torch.randn(HEADS),
        A=-torch.rand(HEADS) * 8 - 0.1,
        D=torch.randn(HEADS),
    )
    packed = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    exact = {name: tensor.double().requires_grad_() for name, tensor in tensors.items()}
    row = packed["zxbcdt"]
    seq_idx = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int().unsqueeze(0)
    ours = mamba_split_conv1d_scan_combined(
        row.unsqueeze(0),
        packed["weight"],
        packed["bias"],
        packed["dt_bias"],
        packed["A"],
        packed["D"],
        chunk_size,
        seq_idx=seq_idx,
        headdim=HEAD_DIM,
        ngroups=GROUPS,
        norm_before_gate=False,
    )[0]
    parameters = [exact[name] for name in ("weight", "bias", "dt_bias", "A", "D")]
    theirs = torch.cat([recurrence(sequence, *parameters) for sequence in exact["zxbcdt"].split(lengths)])
    assert relative(ours, theirs) < 1e-6
    weights = torch.randn_like(theirs)
    (ours * weights.float()).sum().backward()
    (theirs * weights).sum().backward()
    for name, tensor in packed.items():
        assert relative(tensor.grad, exact[name].grad) < 2e-6, name


def test_a_row_without_seq_idx_is_one_sequence_per_batch_element():
    torch.manual_seed(0)
    batch = torch.randn(2, 20, INNER + CHANNELS + HEADS)
    weight, bias = torch.randn(CHANNELS, WIDTH), torch.randn(CHANNELS)
    dt_bias, A, D = torch.randn(HEADS), -torch.rand(HEADS), torch.randn(HEADS)
    ours = mamba_split_conv1d_scan_combined(batch, weight, bias, dt_bias, A, D, 128, headdim=HEAD_DIM, ngroups=GROUPS)
    theirs = torch.stack([recurrence(sequence, weight, bias, dt_bias, A, D) for sequence in batch])
    assert relative(ours, theirs) < 1e-6


def test_gated_norm_gates_first_and_normalises_groups():
    torch.manual_seed(0)
    norm = GatedRMSNorm(8, eps=1e-5, group_size=4, norm_before_gate=False)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(8))
    x, z = torch.randn(3, 8), torch.randn(3, 8)
    gated = (x * F.silu(z)).view(3, 2, 4)
    expected = (gated / (gated.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).view(3, 8) * norm.weight
    assert torch.allclose(norm(x, z), expected, atol=1e-6)


def relative(ours: Tensor | None, theirs: Tensor | None) -> float:
    assert ours is not None and theirs is not None
    return ((ours.double() - theirs).norm() / theirs.norm()).item()
