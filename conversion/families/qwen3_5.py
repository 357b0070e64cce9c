# SPDX-License-Identifier: Apache-2.0
"""The text models of Qwen3.5, dense and with experts: the layers of qwen3_next, projections of delta nets apart."""

from __future__ import annotations

from conversion.cuts import Canonical, Joined, Sections
from conversion.families import decoder
from conversion.families.common import HfConfig, Rule
from conversion.families.qwen3_next import KINDS, ROTATED, SUPPORTED, Sizes, delta_family, projection_rules
from conversion.families.rope import read_rope
from conversion.families.settings import check_settings, ignore, positive_integer, softmax_router

# Axes of images, whose positions are equal in a text.
_AXES = ("mrope_interleaved", "mrope_section")


def _dense(hf_config: HfConfig) -> decoder.Decoder:
    return _decoder(hf_config, None)


def _with_experts(hf_config: HfConfig) -> decoder.Decoder:
    ignore(hf_config, "intermediate_size")
    # transformers divides by the sum whatever config.json says; vLLM asks it.
    check_settings(hf_config, {"norm_topk_prob": (True, None)})
    topk = positive_integer(hf_config, "num_experts_per_tok")
    moe = decoder.Moe(
        layers=(True,) * positive_integer(hf_config, "num_hidden_layers"),
        num_experts=positive_integer(hf_config, "num_experts"),
        width=positive_integer(hf_config, "moe_intermediate_size"),
        topk=topk,
        router=softmax_router(topk, normalised=True),
        shared=positive_integer(hf_config, "shared_expert_intermediate_size"),
        shared_name="shared_expert",
        has_shared_gate=True,
        is_shared_whole_in_groups=True,
    )
    return _decoder(hf_config, moe)


def _decoder(hf_config: HfConfig, moe: decoder.Moe | None) -> decoder.Decoder:
    check_settings(hf_config, SUPPORTED)
    ignore(hf_config, "mtp_num_hidden_layers")  # their tensors are left out, by name
    rope = read_rope(hf_config, percent=ROTATED, unused=_AXES)
    return decoder.Decoder.of(hf_config, qk_norm=True, moe=moe, mlp=moe and moe.width, rope=rope, kinds=KINDS)


def _projections(hf: str, sizes: Sizes, hidden: int) -> tuple[Rule, ...]:

    def part(name: str, **rows: int) -> Sections:
        tensor = Canonical(f"{hf}in_proj_{name}.weight", (sum(rows.values()), hidden))
        return Sections(tensor, tuple(sizes.section(label, size) for label, size in rows.items()))

    wide = part("qkv", query=sizes.keys, key=sizes.keys, value=sizes.values), part("z", z=sizes.values)
    narrow = part("b", beta=sizes.value_heads), part("a", alpha=sizes.value_heads)
    return projection_rules(Joined((*wide, *narrow)), Joined(wide), Joined(narrow))


DENSE = delta_family(_dense, _projections, num_at_end=2)
WITH_EXPERTS = delta_family(_with_experts, _projections, num_at_end=2)
