# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets of CPU engines in plain torch, float32 inside, token by token: bits do not depend on the batch.
Causal convolutions of all state-space layers, for all sequences of one length at once.

Shape suffixes: T tokens of a step, C channels, S slots of the cache, N sequences of one length, H heads, K width of a
key, V width of a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

if TYPE_CHECKING:
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

# torch's vector loops take 32 floats with AVX-512; the scalar loop for the rest rounds differently.
VECTOR_LANES = 64


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **unused: object,
) -> Tensor:
    """vLLM's function, with all sequences of one length at once: `x` and the result are [channels, tokens]."""
    assert activation == "silu"
    width = weight.shape[1]
    out, lengths = torch.empty_like(x), query_start_loc.diff()
    # Neither empty sequences nor padding have a state.
    for length in lengths[(lengths > 0) & (cache_indices >= 0)].unique().tolist():
        chosen = ((lengths == length) & (cache_indices >= 0)).nonzero()[:, 0]
        positions = query_start_loc[chosen].long()[:, None] + torch.arange(length)
        slots = cache_indices[chosen].long()
        before = conv_states[slots, :, : width - 1].masked_fill(~has_initial_state[chosen][:, None, None], 0)
        window = torch.cat([before, x[:, positions].transpose(0, 1)], dim=-1).contiguous()
        result = F.silu(F.conv1d(window, weight.unsqueeze(1), bias, groups=len(weight)))
        out[:, positions] = result.transpose(0, 1)
        conv_states[slots, :, : width - 1] = window[..., length:]
    return out


_L2_EPSILON = 1e-6


def gated_delta_net(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: LayerNameType) -> None:
    """Convolution and delta rule of one layer, into `core_attn_out` [T, H, V]; vLLM's `cpu_gdn_attention_core`.

    `mixed_qkv` [T, C]; `b` and `a` [T, H]. Reads and writes the states of the step's sequences in the layer's cache.
    """
    context, name = get_forward_context(), _resolve_layer_name(layer_name)
    if context.attn_metadata is None:  # a profiling run
        return
    layer = context.no_compile_layers[name]
    found = cast("dict[str, GDNAttentionMetadata]", context.attn_metadata)[name]
    num_tokens = found.num_actual_tokens
    if num_tokens == 0:
        return
    assert found.spec_sequence_masks is None, "config rules refuse proposals"
    bounds, slots, has_state = _sequences(found)
    conv_states, states_SHKV = layer.kv_cache[0], layer.kv_cache[1].transpose(2, 3)
    channels_first = conv_states if is_conv_state_dim_first() else conv_states.transpose(1, 2)
    weight_CW = layer.conv1d.weight.squeeze(1)
    x = mixed_qkv[:num_tokens].T
    mixed_TC = causal_conv1d(x, weight_CW, None, "silu", channels_first, has_state, slots, bounds).T
    heads = layer.num_v_heads // layer.num_k_heads
    query, key, value = (part.squeeze(0).float() for part in layer.rearrange_mixed_qkv(mixed_TC))
    query, key = (_normalized(part).repeat_interleave(heads, dim=1) for part in (query, key))
    query = query * query.shape[-1] ** -0.5
    rate_TH = F.softplus(a[:num_tokens].float() + layer.dt_bias.float()) * -layer.A_log.float().exp()
    decay_TH, beta_TH = _exp(rate_TH), b[:num_tokens].float().sigmoid()
    lengths = bounds.diff()
    for length in lengths[lengths > 0].unique().tolist():
        chosen = (lengths == length).nonzero()[:, 0]
        first, places = bounds[chosen].long(), slots[chosen].long()
        state_NHKV = states_SHKV[places].float().contiguous()
        state_NHKV = state_NHKV.masked_fill(~has_state[chosen][:, None, None, None], 0.0)
        for step in range(length):
            at = first + step
            state_NHKV = state_NHKV * decay_TH[at][:, :, None, None]
            key_NHK1 = key[at].unsqueeze(-1)
            new_NHV = (value[at] - (state_NHKV * key_NHK1).sum(2)) * beta_TH[at].unsqueeze(-1)
            state_NHKV = state_NHKV + key_NHK1 * new_NHV.unsqueeze(2)
            core_attn_out[at] = (state_NHKV * query[at].unsqueeze(-1)).sum(2).to(core_attn_out.dtype)
        states_SHKV[places] = state_NHKV.to(states_SHKV.dtype)


def _sequences(found: GDNAttentionMetadata) -> tuple[Tensor, Tensor, Tensor]:
    """Bounds of the step's sequences in its tokens, their slots, and whether they have a state there."""
    bounds, slots = found.non_spec_query_start_loc, found.non_spec_state_indices_tensor
    assert bounds is not None and slots is not None
    count = found.num_decodes + found.num_prefills
    has_state = torch.ones(count, dtype=torch.bool)
    if found.num_prefills:
        assert found.has_initial_state is not None
        has_state = found.has_initial_state[:count]
    return bounds[: count + 1], slots[:count], has_state


def _normalized(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + _L2_EPSILON).sqrt()


def _exp(x: Tensor) -> Tensor:
    """exp of every value by torch's vector loop, whose bits differ from those of the loop for the rest."""
    flat = F.pad(x.reshape(-1), (0, -x.numel() % VECTOR_LANES))
    return flat.exp()[: x.numel()].view(x.shape)
