# SPDX-License-Identifier: Apache-2.0
"""deepseek_v3 (DeepSeek V3 and R1, Moonlight, Kimi K2): latent attention, grouped sigmoid-routed and shared experts."""

from __future__ import annotations

from dataclasses import replace

from conversion.cuts import Canonical, ColumnParallel, Replicated, RowParallel, Stacked
from conversion.families import decoder
from conversion.families.common import Family, HfConfig, Model, Rule
from conversion.families.rope import Rope, refuse_unread_positions, rope_settings
from conversion.families.settings import check_settings, optional_integer, positive_integer, positive_number

_SUPPORTED = decoder.COMMON_SUPPORTED | {
    "moe_layer_freq": (1, None),
    "norm_topk_prob": (True,),
    "rope_interleave": (True, None),
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
}

_LATENT_KEYS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

_YARN = {
    "original_max_position_embeddings": ("original_max_position_embeddings", None),
    "beta_fast": ("beta_fast", 32.0),
    "beta_slow": ("beta_slow", 1.0),
    # transformers, vLLM and Megatron have three readings of a file with one of both.
    "mscale": ("mscale", None),
    "mscale_all_dim": ("mscale_all_dim", None),
}


def _decoder(hf_config: HfConfig) -> decoder.Decoder:
    check_settings(hf_config, _SUPPORTED)
    rope = Rope(rope_settings(hf_config)[0])
    moe = replace(decoder.sigmoid_experts(hf_config), is_shared_whole_in_groups=True)
    found = decoder.Decoder.of(hf_config, qk_norm=True, moe=moe, rope=rope)
    return replace(found, num_kv_heads=found.num_heads)


def model(hf_config: HfConfig, padded_vocabulary: int | None = None) -> Model:
    found = _decoder(hf_config)
    layers = tuple(_layer(f"model.layers.{index}.", hf_config, found, index) for index in range(found.num_layers))
    return decoder.with_ends(layers, found, padded_vocabulary)


def _layer(prefix: str, hf_config: HfConfig, found: decoder.Decoder, index: int) -> tuple[Rule, ...]:
    attention = _latent_attention(prefix + "self_attn.", hf_config, found)
    name = "input_layernorm.weight"
    norm = Rule(Replicated(Canonical(prefix + name, (found.hidden,))), name, name)
    return (norm, *attention, *decoder.mlp(prefix, found, index))


def _latent_attention(hf: str, hf_config: HfConfig, found: decoder.Decoder) -> tuple[Rule, ...]:
    kv_rank, plain, rotary, value = (positive_integer(hf_config, key) for key in _LATENT_KEYS)
    query_rank, heads = optional_integer(hf_config, "q_lora_rank"), found.num_heads
    query_rows, kv_rows = heads * (plain + rotary), heads * (plain + value)
    kv_down = Canonical(hf + "kv_a_proj_with_mqa.weight", (kv_rank + rotary, found.hidden))
    output = RowParallel(Canonical(hf + "o_proj.weight", (found.hidden, heads * value)))
    if query_rank is None:
        rules = [
            _up(hf, "q_proj", "linear_q_proj", query_rows, found.hidden),
            _down(kv_down, "linear_kv_down_proj", "kv_a_proj_with_mqa"),
        ]
    else:
        query_down = Canonical(hf + "q_a_proj.weight", (query_rank, found.hidden))
        rules = [
            _down(query_down, "linear_q_down_proj"),
            _norm(hf, "q_a_layernorm", "linear_q_up_proj", "q_layernorm", query_rank),
            _up(hf, "q_b_proj", "linear_q_up_proj", query_rows, query_rank),
            # vLLM holds both down projections in one.
            _down(kv_down, "linear_kv_down_proj", "fused_qkv_a_proj", Stacked(query_down, kv_down)),
        ]
    return (
        *rules,
        _norm(hf, "kv_a_layernorm", "linear_kv_up_proj", "kv_layernorm", kv_rank),
        _up(hf, "kv_b_proj", "linear_kv_up_proj", kv_rows, kv_rank),
        Rule(output, "self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    )


def _up(hf: str, name: str, megatron: str, *shape: int) -> Rule:
    cut = ColumnParallel(Canonical(f"{hf}{name}.weight", shape))
    return Rule(cut, f"self_attention.{megatron}.weight", f"self_attn.{name}.weight")


def _down(tensor: Canonical, megatron: str, vllm: str = "", vllm_cut: Stacked | None = None) -> Rule:
    name = f"self_attn.{vllm}.weight" if vllm else ""
    return Rule(Replicated(tensor), f"self_attention.{megatron}.weight", name, vllm_cut)


def _norm(hf: str, name: str, fused: str, local: str, size: int) -> Rule:
    cut, megatron = Replicated(Canonical(f"{hf}{name}.weight", (size,))), f"self_attention.{fused}.layer_norm_weight"
    return Rule(cut, megatron, f"self_attn.{name}.weight", local=f"self_attention.{local}.weight")


def megatron_arguments(hf_config: HfConfig) -> dict[str, dict[str, object]]:
    found = _decoder(hf_config)
    kv_rank, plain, rotary, value = (positive_integer(hf_config, key) for key in _LATENT_KEYS)
    _, kind, given = rope_settings(hf_config)
    if kind not in ("default", "yarn"):
        raise ValueError(f"config.json: rope_type={kind!r} is not supported for deepseek_v3; only default and yarn are")
    rope: dict[str, object] = dict(rope_type="rope")
    if kind == "yarn":
        numbers = {name: positive_number(given, key, default) for key, (name, default) in _YARN.items()}
        rope = dict(rope_type="yarn", rotary_scaling_factor=positive_number(given, "factor"), **numbers)
    refuse_unread_positions(kind, given)
    return decoder.megatron_arguments(
        found,
        multi_latent_attention=True,
        q_lora_rank=optional_integer(hf_config, "q_lora_rank"),
        kv_lora_rank=kv_rank,
        qk_head_dim=plain,
        qk_pos_emb_head_dim=rotary,
        v_head_dim=value,
        kv_channels=value,
        rotary_base=found.rope.base,
        **rope,
    )


FAMILY = Family(
    model,
    megatron_arguments,
    model_class="gpt",
    stated=(("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")),
    vllm_reads_stacked_experts=False,
    leaves_out_mtp=True,
)
