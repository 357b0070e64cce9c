# SPDX-License-Identifier: Apache-2.0
"""Megatron's gated delta net over packed rows, which megatron-core 0.16.1 refuses, and the norm of its heads.

Shape suffixes: T tokens of a row, C channels, H heads of this rank, V width of a value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mrl.policy.delta_torch import packed_convolution


class HeadNorm(MegatronModule):
    """RMS norm of each head's output, whole on every tp rank; its weight is the factor itself, as in the file.

    Megatron's spec takes the norm of the model there, whose weight is the factor less one.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(config)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x_THV: Tensor, gate_THV: Tensor) -> Tensor:
        """The normalized `x_THV` times silu of the gate, in its dtype. Its backward pass is collective over tp."""
        # Each rank has the gradient of its own heads.
        weight_V = copy_to_tensor_model_parallel_region(self.weight)
        normalized = F.rms_norm(x_THV.float(), weight_V.shape, eps=self.eps) * weight_V.float()
        return (normalized * F.silu(gate_THV.float())).to(x_THV.dtype)


class DeltaNet(gated_delta_net.GatedDeltaNet):
    """Megatron's gated delta net, its weights and checkpoints; each sequence of a packed row has a state of its own.

    TODO(when megatron-core 0.19 is the oldest supported, and computes rows of any host): take its forward pass.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *_: object,
        packed_seq_params: PackedSeqParams | None = None,
        **__: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Output and missing bias for hidden states [T / sp, 1, hidden] of this rank. Collective over the tp group."""
        assert packed_seq_params is not None, "packed rows are the only batch format"
        cu_seqlens = packed_seq_params.cu_seqlens_q
        keys, values, heads = (size // self.tp_size for size in (self.qk_dim, self.v_dim, self.num_value_heads))
        projected, _ = self.in_proj(hidden_states)
        mixed_TC, gate_TC, beta_TH, alpha_TH = projected.squeeze(1).split(
            [2 * keys + values, values, heads, heads], dim=-1
        )
        mixed_TC = F.silu(packed_convolution(mixed_TC, self.conv1d.weight.squeeze(1), cu_seqlens)).to(mixed_TC.dtype)
        query, key, value = (
            part.unflatten(-1, (-1, width)).unsqueeze(0)
            for part, width in zip(
                mixed_TC.split([keys, keys, values], dim=-1),
                (self.key_head_dim, self.key_head_dim, self.value_head_dim),
                strict=True,
            )
        )
        shared = self.num_value_heads // self.num_key_heads
        decay_TH = -self.A_log.float().exp() * F.softplus(alpha_TH.float() + self.dt_bias.float())
        output, _ = gated_delta_net.chunk_gated_delta_rule(
            query.repeat_interleave(shared, dim=2),
            key.repeat_interleave(shared, dim=2),
            value.contiguous(),
            g=decay_TH.unsqueeze(0),
            beta=beta_TH.sigmoid().unsqueeze(0),
            cu_seqlens=cu_seqlens.long(),
            use_qk_l2norm_in_kernel=True,
        )
        output_THV = self.out_norm(output.squeeze(0), gate_TC.unflatten(-1, (-1, self.value_head_dim)))
        return self.out_proj(output_THV.flatten(1).unsqueeze(1))
