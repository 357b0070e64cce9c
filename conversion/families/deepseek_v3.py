# SPDX-License-Identifier: Apache-2.0
"""deepseek_v3: multi-latent attention, grouped sigmoid-routed and shared experts. Converted, not trained or sampled."""

from __future__ import annotations

from dataclasses import replace

from conversion.cuts import Canonical, ColumnParallel, Replicated, RowParallel
from conversion.families import decoder
from conversion.families.common import Family, HfConfig, Model, Rule
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
    "mscale": ("mscale", 1.0),
    "mscale_all_dim": ("mscale_all_dim", None),
}


def _decoder(hf_config: HfConfig) -> decoder.Decoder:
    check_settings(hf_config, _SUPPORTED)
    rope = decoder.Rope(decoder.rope_settings(hf_config)[0])
    found = decoder.Decoder.of(hf_config, qk_norm=True, moe=decoder.sigmoid_experts(hf_config), rope=rope)
    return replace(found, num_kv_heads=found.num_heads)


def model(hf_config: HfConfig, padded_vocabulary: int | None = None) -> Model:
    found = _decoder(hf_config)
    layers = tuple(_layer(f"model.layers.{index}.", hf_config, found, index) for index in range(found.num_layers))
    return decoder.with_ends(layers, found, padded_vocabulary)


def _layer(prefix: str, hf_config: HfConfig, found: decoder.Decoder, index: int) -> tuple[Rule, ...]:
    attention = _latent_attention(prefix + "self_attn.", hf_config, found)
    norm = Rule(Replicated(Canonical(prefix + "input_layernorm.weight", (found.hidden,))), "input_layernorm.weight")
    return (norm, *attention, *decoder.mlp(prefix, found, index))


def _latent_attention(hf: str, hf_config: HfConfig, found: decoder.Decoder) -> tuple[Rule, ...]:
    kv_rank, plain, rotary, value = (positive_integer(hf_config, key) for key in _LATENT_KEYS)
    query_rank, heads = optional_integer(hf_config, "q_lora_rank"), found.num_heads
    query_rows, kv_rows = heads * (plain + rotary), heads * (plain + value)
    if query_rank is None:
        rules = [_up(hf + "q_proj", "linear_q_proj", query_rows, found.hidden)]
    else:
        rules = [
            _down(hf + "q_a_proj", "linear_q_down_proj", query_rank, found.hidden),
            _norm(hf + "q_a_layernorm", "linear_q_up_proj", "q_layernorm", query_rank),
            _up(hf + "q_b_proj", "linear_q_up_proj", query_rows, query_rank),
        ]
    return (
        *rules,
        _down(hf + "kv_a_proj_with_mqa", "linear_kv_down_proj", kv_rank + rotary, found.hidden),
        _norm(hf + "kv_a_layernorm", "linear_kv_up_proj", "kv_layernorm", kv_rank),
        _up(hf + "kv_b_proj", "linear_kv_up_proj", kv_rows, kv_rank),
        Rule(
            RowParallel(Canonical(hf + "o_proj.weight", (found.hidden, heads * value))),
            "self_attention.linear_proj.weight",
        ),
    )


def _up(hf: str, megatron: str, *shape: int) -> Rule:
    return Rule(ColumnParallel(Canonical(hf + ".weight", shape)), f"self_attention.{megatron}.weight")


def _down(hf: str, megatron: str, *shape: int) -> Rule:
    # Transformer Engine's specs replicate it, the local ones cut it.
    tensor = Canonical(hf + ".weight", shape)
    return Rule(Replicated(tensor), f"self_attention.{megatron}.weight", local_cut=ColumnParallel(tensor))


def _norm(hf: str, fused: str, local: str, size: int) -> Rule:
    cut = Replicated(Canonical(hf + ".weight", (size,)))
    return Rule(cut, f"self_attention.{fused}.layer_norm_weight", local=f"self_attention.{local}.weight")


def megatron_arguments(hf_config: HfConfig) -> dict[str, dict[str, object]]:
    found = _decoder(hf_config)
    kv_rank, plain, rotary, value = (positive_integer(hf_config, key) for key in _LATENT_KEYS)
    _, kind, given = decoder.rope_settings(hf_config)
    if kind not in ("default", "yarn"):
        raise ValueError(f"config.json: rope_type={kind!r} is not supported for deepseek_v3; only default and yarn are")
    rope: dict[str, object] = dict(rope_type="rope")
    if kind == "yarn":
        numbers = {name: positive_number(given, key, default) for key, (name, default) in _YARN.items()}
        rope = dict(rope_type="yarn", rotary_scaling_factor=positive_number(given, "factor"), **numbers)
    decoder.refuse_unread_positions(kind, given)
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


FAMILY = Family(model, megatron_arguments, model_class="gpt", vllm_layers=None, can_train=False, leaves_out_mtp=True)
