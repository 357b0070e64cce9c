# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in plain torch, called like flash-linear-attention's kernel, for hosts that cannot run it.

Sequences of a packed row are computed as padded batches of similar length. float32 inside, deterministic.
Shape suffixes: T tokens of a row, N sequences, L padded length, H heads, K width of a key, V width of a value,
M chunks, Q chunk length, W width of the convolution, C channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.policy.mamba_torch import DecayBetween
from mrl.policy.packed import packed_layout

CHUNK = 64
_L2_EPSILON = 1e-6


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, None]:
    """Outputs of the gated delta rule (arXiv:2412.06464) within each sequence of a row, [1, T, H, V]; no last states.

    `query`, `key` [1, T, H, K], `value` [1, T, H, V]; `g` log decays and `beta` strengths of writing, [1, T, H].
    Supports the arguments of fla.ops.gated_delta_rule.chunk_gated_delta_rule with which `DeltaNet` trains.
    """
    assert use_qk_l2norm_in_kernel, "DeltaNet normalizes queries and keys here"
    layout = packed_layout(cu_seqlens.diff(), multiple=16, chunk=CHUNK)
    rows = [layout.unpack(tensor.squeeze(0).float()) for tensor in (query, key, value, g, beta)]
    outputs = [_of_bucket(*batches) for batches in zip(*rows, strict=True)]
    return layout.pack(outputs).to(value.dtype).unsqueeze(0), None


def _of_bucket(q_NLHK: Tensor, k_NLHK: Tensor, v_NLHV: Tensor, g_NLH: Tensor, beta_NLH: Tensor) -> Tensor:
    """Outputs of padded sequences, [N, L, H, V]. Padding follows the tokens, and tokens do not read what follows."""
    chunk = min(CHUNK, q_NLHK.shape[1])

    def chunked(tensor: Tensor) -> Tensor:
        return tensor.unflatten(1, (-1, chunk)).movedim(3, 1)

    q, k = (chunked(_normalized(tensor)) for tensor in (q_NLHK, k_NLHK))
    q, v, beta = q * q.shape[-1] ** -0.5, chunked(v_NLHV), chunked(beta_NLH).unsqueeze(-1)
    # Decays are differences of sums over a chunk; float64 keeps them exact for neighbours when the sums are large.
    sums_NHMQ = chunked(g_NLH).double().cumsum(-1)
    between_NHMQQ = DecayBetween.apply(sums_NHMQ)
    since_NHMQ1 = sums_NHMQ.exp().float().unsqueeze(-1)
    until_NHMQ1 = (sums_NHMQ[..., -1:] - sums_NHMQ).exp().float().unsqueeze(-1)
    # Within a chunk, each token writes what its value differs from what the tokens before it would read for its key:
    # a triangular system, for the part that the state at the start of the chunk does not change, and for the part that
    # it does.
    k_beta = k * beta
    system = (k_beta @ k.transpose(-1, -2)) * between_NHMQQ
    right = torch.cat([v * beta, k_beta * since_NHMQ1], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, forgotten = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    reads = (q @ k.transpose(-1, -2)) * between_NHMQQ
    q, k = q * since_NHMQ1, k * until_NHMQ1
    state_NHKV, outputs = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1]), []
    for index in range(q.shape[2]):
        new = written[:, :, index] - forgotten[:, :, index] @ state_NHKV
        outputs.append(q[:, :, index] @ state_NHKV + reads[:, :, index] @ new)
        kept = since_NHMQ1[:, :, index, -1:]
        state_NHKV = state_NHKV * kept + k[:, :, index].transpose(-1, -2) @ new
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _normalized(tensor: Tensor) -> Tensor:
    return tensor * torch.rsqrt(tensor.square().sum(-1, keepdim=True) + _L2_EPSILON)


def packed_convolution(x_TC: Tensor, weight_CW: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Depthwise causal convolution within each sequence of a row, float32 [T, C]."""
    starts_S, lengths_S = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    positions_T = torch.arange(len(x_TC), device=x_TC.device) - starts_S.repeat_interleave(lengths_S)
    x_TC, weight_WC = x_TC.float(), weight_CW.float().flip(1).T
    y_TC = x_TC * weight_WC[0]
    for shift in range(1, min(len(weight_WC), len(x_TC))):
        before_TC = F.pad(x_TC[:-shift], (0, 0, shift, 0)) * (positions_T >= shift).unsqueeze(-1)
        y_TC = y_TC + before_TC * weight_WC[shift]
    return y_TC
