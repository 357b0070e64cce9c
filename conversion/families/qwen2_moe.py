# SPDX-License-Identifier: Apache-2.0
"""qwen2_moe (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): qwen2 with softmax-routed experts beside a gated shared one."""

from __future__ import annotations

from dataclasses import replace

from conversion.families.decoder import COMMON_SUPPORTED, Decoder, decoder_family, softmax_experts, with_whole_heads
from conversion.families.settings import HfConfig, check_settings, positive_integer


def qwen2_moe(hf_config: HfConfig) -> Decoder:
    """Decoders with biases on query, key and value, and a gated shared expert in each layer with experts."""
    # vLLM always has the biases.
    check_settings(hf_config, COMMON_SUPPORTED | {"attention_bias": (True, None), "qkv_bias": (True, None)})
    moe = replace(
        softmax_experts(hf_config),
        shared=positive_integer(hf_config, "shared_expert_intermediate_size"),
        shared_name="shared_expert",
        has_shared_gate=True,
    )
    return with_whole_heads(Decoder.of(hf_config, qkv_bias=True, moe=moe, has_window_switch=True))


FAMILY = replace(decoder_family(qwen2_moe), has_ends_everywhere=True)
