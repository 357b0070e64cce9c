# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 kernels in plain torch, called like those of mamba_ssm, for hosts that cannot run it.

Sequences of a packed row are computed as padded batches of similar length. float32 inside, deterministic.
Shape suffixes: N sequences, L padded length, C channels of the convolution, H heads, P head dim, G groups, K heads of a
group, S state, M chunks, Q chunk length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mrl.policy.packed import packed_layout

# The quadratic part of a chunk costs L * Q, the states between chunks L / Q: 64 is the fastest on CPUs for states of 16
# to 128.
MAX_CHUNK = 64


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    *,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor:
    """Convolution, state-space scan and gate of Mamba-2, [batch, tokens, heads * headdim], in the dtype of `zxbcdt`.

    Supports the arguments of mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined with which MambaMixer
    trains: no initial or final states; the norm (see `norm_before_gate`) and the output projection are separate.
    `zxbcdt` [batch, tokens, z|x|B|C|dt]; `seq_idx` [1, tokens], ascending, resets convolution and state where it
    changes.
    """
    assert activation == "silu"
    assert headdim is not None, (
        "MambaMixer passes headdim unless D has one value per channel, which nemotron_h does not"
    )
    batch, num_tokens, _ = zxbcdt.shape
    inner = dt_bias.shape[0] * headdim
    z, xbcdt = zxbcdt.split([inner, conv1d_weight.shape[0] + dt_bias.shape[0]], dim=-1)
    lengths_S = torch.full((batch,), num_tokens)
    if seq_idx is not None:
        assert batch == 1, "a packed row is a batch of one"
        lengths_S = torch.unique_consecutive(seq_idx[0], return_counts=True)[1]
    mixer = Mixer(
        conv1d_weight.float(),
        conv1d_bias.float(),
        dt_bias.float(),
        A.float(),
        D.float(),
        num_groups=ngroups,
        head_dim=headdim,
        chunk=min(chunk_size, MAX_CHUNK),
        dt_limit=dt_limit,
    )
    y = mixer.mix(xbcdt.flatten(0, 1).float(), lengths_S)[0].view(batch, num_tokens, inner)
    return (y * F.silu(z.float())).to(zxbcdt.dtype)


@dataclass(frozen=True)
class Carry:
    """State of sequences at a token, from which others go on."""

    inputs_SWC: Tensor
    """The last inputs of the convolution, one less than its width; zeros before the first token."""
    states_SGKPS: Tensor
    """The state of the scan."""

    def of(self, members: Tensor) -> Carry:
        """The state of some of the sequences, as often as they are named; gradients add up."""
        return Carry(self.inputs_SWC.index_select(0, members), self.states_SGKPS.index_select(0, members))

    @classmethod
    def join(cls, parts: Sequence[Carry]) -> Carry:
        """The states of all sequences of the parts, in order."""
        return cls(torch.cat([part.inputs_SWC for part in parts]), torch.cat([part.states_SGKPS for part in parts]))


@dataclass(frozen=True)
class Mixer:
    """Weights and sizes of the convolution and the scan of a Mamba-2 layer; float32."""

    conv_weight_CW: Tensor
    conv_bias_C: Tensor
    dt_bias_H: Tensor
    A_H: Tensor
    D_H: Tensor
    num_groups: int
    head_dim: int
    chunk: int
    dt_limit: tuple[float, float] = (0.0, float("inf"))

    def mix(
        self, xbcdt_TC: Tensor, lengths_S: Tensor, start: Carry | None = None, *, needs_end: bool = False
    ) -> tuple[Tensor, Carry | None]:
        """Outputs [T, H * P] of sequences of these lengths, and with `needs_end` their states behind the last tokens.

        `start` are the states before their first tokens; None: zeros.
        """
        layout = packed_layout(lengths_S, multiple=16, chunk=self.chunk)
        outputs: list[Tensor] = []
        ends: list[Carry] = []
        for bucket, xbcdt_NLC in zip(layout.buckets, layout.unpack(xbcdt_TC), strict=True):
            carry = None if start is None else start.of(bucket.members)
            lengths_N = lengths_S[bucket.members] if needs_end else None
            output, end = self._mix_bucket(xbcdt_NLC, carry, lengths_N)
            outputs.append(output)
            ends += [] if end is None else [end]
        end = None
        if needs_end:
            members = torch.cat([bucket.members for bucket in layout.buckets])
            end = Carry.join(ends).of(members.argsort())
        return layout.pack(outputs), end

    def _mix_bucket(
        self, xbcdt_NLC: Tensor, start: Carry | None, lengths_N: Tensor | None
    ) -> tuple[Tensor, Carry | None]:
        """Outputs of padded sequences, and their states after `lengths_N` tokens, if given."""
        (channels, width), num_heads = self.conv_weight_CW.shape, len(self.dt_bias_H)
        xbc_NLC, dt_NLH = xbcdt_NLC.split([channels, num_heads], dim=-1)
        if start is not None:
            xbc_NLC = torch.cat([start.inputs_SWC, xbc_NLC], dim=1)
        mixed_NLC = F.silu(_CausalConv.apply(xbc_NLC, self.conv_weight_CW, self.conv_bias_C))
        dt_NLH = F.softplus(dt_NLH + self.dt_bias_H).clamp(*self.dt_limit)
        if start is not None:
            mixed_NLC = mixed_NLC[:, width - 1 :]
        if lengths_N is not None:
            # Padding then leaves the state as it is.
            is_token_NL = torch.arange(dt_NLH.shape[1], device=dt_NLH.device) < lengths_N[:, None]
            dt_NLH = dt_NLH * is_token_NL.unsqueeze(-1)
        y_NLC, states = _scan(
            mixed_NLC,
            dt_NLH,
            self.A_H,
            self.D_H,
            num_groups=self.num_groups,
            head_dim=self.head_dim,
            chunk=self.chunk,
            start=None if start is None else start.states_SGKPS,
            needs_end=lengths_N is not None,
        )
        if lengths_N is None or states is None:
            return y_NLC, None
        if start is None:
            xbc_NLC = F.pad(xbc_NLC, (0, 0, width - 1, 0))
        last_NW = lengths_N[:, None] + torch.arange(width - 1, device=lengths_N.device)
        inputs_NWC = xbc_NLC.gather(1, last_NW.unsqueeze(-1).expand(-1, -1, channels))
        return y_NLC, Carry(inputs_NWC, states)


class _CausalConv(torch.autograd.Function):
    """Depthwise causal convolution of [N, L, C] by weights [C, W], plus bias, as shifted multiply-adds in place.

    torch's depthwise conv1d is slower on CPUs, forward and backward, and so is autograd over the shifts.
    """

    @staticmethod
    def forward(ctx: Any, x_NLC: Tensor, weight_CW: Tensor, bias_C: Tensor) -> Tensor:
        ctx.save_for_backward(x_NLC, weight_CW)
        y_NLC = torch.addcmul(bias_C, x_NLC, weight_CW[:, -1])
        for shift, weight_C in _shifts(weight_CW):
            y_NLC[:, shift:].addcmul_(x_NLC[:, :-shift], weight_C)
        return y_NLC

    @staticmethod
    def backward(ctx: Any, grad_NLC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_NLC, weight_CW = ctx.saved_tensors
        grad_x_NLC = grad_NLC * weight_CW[:, -1]
        grad_taps = [(grad_NLC * x_NLC).sum((0, 1))]
        for shift, weight_C in _shifts(weight_CW):
            grad_x_NLC[:, :-shift].addcmul_(grad_NLC[:, shift:], weight_C)
            grad_taps.append((grad_NLC[:, shift:] * x_NLC[:, :-shift]).sum((0, 1)))
        return grad_x_NLC, torch.stack(grad_taps[::-1], dim=1), grad_NLC.sum((0, 1))


def _shifts(weight_CW: Tensor) -> list[tuple[int, Tensor]]:
    width = weight_CW.shape[1]
    return [(shift, weight_CW[:, width - 1 - shift]) for shift in range(1, width)]


def _scan(
    xbc_NLC: Tensor,
    dt_NLH: Tensor,
    A_H: Tensor,
    D_H: Tensor,
    *,
    num_groups: int,
    head_dim: int,
    chunk: int,
    start: Tensor | None,
    needs_end: bool,
) -> tuple[Tensor, Tensor | None]:
    """State-space scan of padded sequences by chunks (arXiv:2405.21060, listing 1), [N, L, H * P].

    `start` and the second value are states [N, G, K, P, S] before the first and after the last token; None: zeros, or
    not needed.
    """
    num, length, num_heads = dt_NLH.shape
    inner = num_heads * head_dim
    state_size = (xbc_NLC.shape[-1] - inner) // (2 * num_groups)
    chunk = min(chunk, length)
    num_chunks = length // chunk
    heads_per_group = num_heads // num_groups
    chunked = (num * num_chunks, chunk)
    x, B, C = xbc_NLC.split([inner, num_groups * state_size, num_groups * state_size], dim=-1)
    x_NLHP = x.unflatten(-1, (num_heads, head_dim))
    u_MGKQP = (
        (x_NLHP * dt_NLH.unsqueeze(-1)).view(*chunked, num_groups, heads_per_group, head_dim).permute(0, 2, 3, 1, 4)
    )
    B_MGQS, C_MGQS = (t.reshape(*chunked, num_groups, state_size).transpose(1, 2) for t in (B, C))

    # Decays are differences of sums over a chunk; float64 keeps them exact for neighbours when the sums are large.
    decay_MGKQ = (dt_NLH * A_H).double().view(*chunked, num_groups, heads_per_group).permute(0, 2, 3, 1).cumsum(-1)
    weights_MGKQQ = DecayBetween.apply(decay_MGKQ) * (C_MGQS @ B_MGQS.transpose(-1, -2)).unsqueeze(2)
    y_MGKQP = weights_MGKQQ @ u_MGKQP
    end = None
    if num_chunks > 1 or start is not None or needs_end:
        to_end_MGKQ = torch.exp(decay_MGKQ[..., -1:] - decay_MGKQ).float()
        states_MGKPS = (u_MGKQP * to_end_MGKQ.unsqueeze(-1)).transpose(-1, -2) @ B_MGQS.unsqueeze(2)
        states_NJ = states_MGKPS.unflatten(0, (num, -1))
        decay_NJ = decay_MGKQ[..., -1].unflatten(0, (num, -1)).cumsum(1).movedim(1, -1)
        if start is not None:
            # As the state of one more chunk, before the first.
            states_NJ, decay_NJ = torch.cat([start.unsqueeze(1), states_NJ], dim=1), F.pad(decay_NJ, (1, 0))
        ending = torch.einsum("ngkij,njgkps->nigkps", DecayBetween.apply(decay_NJ), states_NJ)
        end = ending[:, -1] if needs_end else None
        entering = ending[:, :-1] if start is not None else F.pad(ending[:, :-1], (0, 0) * 4 + (1, 0))
        entering_MGKPS = entering.flatten(0, 1)
        reads_MGKQP = C_MGQS.unsqueeze(2) @ entering_MGKPS.transpose(-1, -2)
        y_MGKQP = y_MGKQP + torch.exp(decay_MGKQ).float().unsqueeze(-1) * reads_MGKQP
    y_NLHP = y_MGKQP.permute(0, 3, 1, 2, 4).reshape(num, length, num_heads, head_dim)
    return (y_NLHP + x_NLHP * D_H.unsqueeze(-1)).flatten(2), end


class DecayBetween(torch.autograd.Function):
    """exp(decay_i - decay_j) for i >= j else 0, float32 [..., Q, Q], of summed log decays [..., Q]; keeps one."""

    @staticmethod
    def forward(ctx: Any, decay_Q: Tensor) -> Tensor:
        size = decay_Q.shape[-1]
        future = torch.ones(size, size, dtype=torch.bool, device=decay_Q.device).triu(1)
        result_QQ = (decay_Q.unsqueeze(-1) - decay_Q.unsqueeze(-2)).float().masked_fill_(future, float("-inf")).exp_()
        ctx.save_for_backward(result_QQ)
        return result_QQ

    @staticmethod
    def backward(ctx: Any, grad_QQ: Tensor) -> Tensor:
        (result_QQ,) = ctx.saved_tensors
        grad_QQ = grad_QQ * result_QQ
        # The two sums nearly cancel, so float32 would leave few digits.
        return grad_QQ.sum(-1, dtype=torch.float64) - grad_QQ.sum(-2, dtype=torch.float64)


class GatedRMSNorm(nn.Module):
    """RMS norm over groups of channels with an optional gate: mamba_ssm.ops.triton.layernorm_gated.RMSNorm."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.group_size = group_size or hidden_size
        self.norm_before_gate = norm_before_gate
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """The normalised `x`, in its dtype; multiplied by silu(z) before or after the norm."""
        hidden = x.float()
        if z is not None and not self.norm_before_gate:
            hidden = hidden * F.silu(z.float())
        groups = hidden.unflatten(-1, (-1, self.group_size))
        hidden = F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight.float()
        if z is not None and self.norm_before_gate:
            hidden = hidden * F.silu(z.float())
        return hidden.to(x.dtype)
