# SPDX-License-Identifier: Apache-2.0
"""Causal convolutions of state-space layers on CPU engines, for all sequences of one length at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
