# SPDX-License-Identifier: Apache-2.0
"""gpt_oss (gpt-oss-20b, gpt-oss-120b): attention sinks, windows in every other layer, experts with biases.

The file has a layer's experts in one tensor, inputs first, or in MXFP4 (`conversion.files.experts` reads both);
here each is a tensor of its own, outputs first. Rows of gate and up projection alternate in every holder.
"""

from __future__ import annotations

from dataclasses import replace

from conversion.cuts import Canonical, ColumnParallel, Cut, Experts, OnFirst, Replicated, RowParallel
from conversion.families import decoder
from conversion.families.common import Family, HfConfig, Model, Rule
from conversion.families.rope import rope_settings
from conversion.families.settings import check_settings, positive_integer, softmax_router

_SUPPORTED = decoder.COMMON_SUPPORTED | {
    "attention_bias": (True, None),
    # vLLM has these numbers in its code, and no tied form.
    "rms_norm_eps": (1e-5,),
    "swiglu_alpha": (1.702, None),
    "swiglu_limit": (7.0, None),
    "tie_word_embeddings": (False, None),
}
_KINDS = ("sliding_attention", "full_attention")
_PAIR = 2
"""Rows of a gate and of its up projection, which no rank parts."""


def _decoder(hf_config: HfConfig) -> decoder.Decoder:
    quantised = hf_config.get("quantization_config")
    is_mxfp4 = isinstance(quantised, dict) and quantised.get("quant_method") == "mxfp4"
    check_settings(hf_config, {**_SUPPORTED, "quantization_config": (quantised if is_mxfp4 else None,)})
    num_layers, topk = (positive_integer(hf_config, key) for key in ("num_hidden_layers", "num_experts_per_tok"))
    kinds = [_KINDS[index % 2] for index in range(num_layers)]
    if hf_config.get("layer_types") not in (None, kinds):
        raise ValueError(
            f"config.json: layer_types={hf_config.get('layer_types')!r} is not supported for gpt_oss; vLLM has windows "
            f"in the first of every two layers: leave it out, or give {_KINDS[0]} and {_KINDS[1]} by turns, "
            f"{num_layers} in all"
        )
    if (kind := rope_settings(hf_config)[1]) != "yarn":
        raise ValueError(f"config.json: rope_type={kind!r} is not supported for gpt_oss; only yarn is")
    moe = decoder.Moe(
        layers=(True,) * num_layers,
        num_experts=positive_integer(hf_config, "num_local_experts"),
        width=positive_integer(hf_config, "intermediate_size"),
        topk=topk,
        router=softmax_router(topk, normalised=True),
    )
    return decoder.Decoder.of(hf_config, qkv_bias=True, moe=moe, kinds=_KINDS, has_windows=True)


def model(hf_config: HfConfig, padded_vocabulary: int | None = None) -> Model:
    found = _decoder(hf_config)
    prefixes = [f"model.layers.{index}." for index in range(found.num_layers)]
    layers = tuple((*_attention(prefix, found), *_experts(prefix, found)) for prefix in prefixes)
    whole = decoder.with_ends(layers, found, padded_vocabulary)
    return replace(whole, first=tuple(replace(rule, vllm="model.embedding.weight") for rule in whole.first))


def _attention(prefix: str, found: decoder.Decoder) -> tuple[Rule, ...]:
    """Input norm, attention with biases, and a learned logit for each head that nothing is read for."""
    hf = prefix + "self_attn."
    output = Replicated(Canonical(hf + "o_proj.bias", (found.hidden,)))
    sinks = ColumnParallel(Canonical(hf + "sinks", (found.num_heads,)))
    rules = (
        *decoder.attention(prefix, found),
        Rule(output, "self_attention.linear_proj.bias", "self_attn.o_proj.bias"),
        Rule(sinks, "self_attention.core_attention.softmax_offset", "self_attn.sinks"),
    )
    return tuple(replace(rule, vllm=rule.vllm.replace("self_attn.", "attn.")) for rule in rules)


def _experts(prefix: str, found: decoder.Decoder) -> tuple[Rule, ...]:
    """Norm, router with a bias, and both linear layers of all experts."""
    moe, hidden = found.moe, found.hidden
    assert moe is not None
    norm, router, expert = "post_attention_layernorm.weight", "mlp.router.", prefix + "mlp.experts.{expert}."

    def replicated(name: str, *shape: int) -> Replicated:
        return Replicated(Canonical(prefix + name, shape))

    def pairs(kind: str, *columns: int) -> ColumnParallel:
        return ColumnParallel(Canonical(f"{expert}gate_up_proj.{kind}", (_PAIR * moe.width, *columns)), unit=_PAIR)

    down = RowParallel(Canonical(expert + "down_proj.weight", (hidden, moe.width)))
    # Workers add up their outputs, so one of them has the bias.
    down_bias = OnFirst(Canonical(expert + "down_proj.bias", (hidden,)))
    return (
        Rule(replicated(norm, hidden), "pre_mlp_layernorm.weight", norm),
        Rule(replicated(router + "weight", moe.num_experts, hidden), router + "weight", router + "weight"),
        Rule(replicated(router + "bias", moe.num_experts), router + "bias", router + "bias"),
        _of_experts(pairs("weight", hidden), moe, "linear_fc1.weight", "w13_weight"),
        _of_experts(pairs("bias"), moe, "linear_fc1.bias", "w13_bias"),
        _of_experts(down, moe, "linear_fc2.weight", "w2_weight"),
        _of_experts(down_bias, moe, "linear_fc2.bias", "w2_bias"),
    )


def _of_experts(cut: Cut, moe: decoder.Moe, megatron: str, vllm: str) -> Rule:
    return Rule(
        Experts(cut, moe.num_experts),
        f"mlp.experts.{megatron}{{expert}}",
        f"mlp.experts.routed_experts.{vllm}",
        local=f"mlp.experts.local_experts.{{expert}}.{megatron}",
        checkpoint=f"mlp.experts.experts.{megatron}",
    )


def megatron_arguments(hf_config: HfConfig) -> dict[str, dict[str, object]]:
    window = positive_integer(hf_config, "sliding_window")
    return decoder.megatron_arguments(
        _decoder(hf_config),
        activation_func="quick_gelu",
        activation_func_clamp_value=7.0,
        glu_linear_offset=1.0,
        add_bias_linear=True,
        softmax_type="learnable",
        # A token reads itself and as many before it.
        window_size=(window - 1, 0),
        # Layers from 1 on that this number divides have no window.
        window_attn_skip_freq=2,
    )


FAMILY = Family(
    model,
    megatron_arguments,
    model_class="gpt",
    has_ends_everywhere=True,
    has_transposed_experts=True,
    held_otherwise="all gates of an expert above all its up projections in linear_fc1",
)
