# SPDX-License-Identifier: Apache-2.0
"""glm4_moe (GLM-4.5, 4.6, 4.7, 4.5-Air and their derivatives): half of each head rotated, experts as in DeepSeek V3."""

from __future__ import annotations

from dataclasses import replace

from conversion.families.decoder import COMMON_SUPPORTED, Decoder, decoder_family, sigmoid_experts
from conversion.families.rope import read_rope
from conversion.families.settings import HfConfig, check_settings, choice

_SUPPORTED = COMMON_SUPPORTED | {"attention_bias": (False, True, None), "norm_topk_prob": (True, None)}

# transformers' default.
_ROTATED = 0.5


def glm4_moe(hf_config: HfConfig) -> Decoder:
    """Decoders with experts whose attention may have biases, and norms on query and key."""
    check_settings(hf_config, _SUPPORTED)
    return Decoder.of(
        hf_config,
        qkv_bias=choice(hf_config, "attention_bias", default=False),
        qk_norm=choice(hf_config, "use_qk_norm", default=False),
        moe=sigmoid_experts(hf_config),
        rope=read_rope(hf_config, percent=_ROTATED),
    )


FAMILY = replace(decoder_family(glm4_moe), leaves_out_mtp=True)
