# SPDX-License-Identifier: Apache-2.0
"""qwen3_next (Qwen3-Next-80B-A3B): gated delta nets, every fourth layer gated attention, gated experts in each."""

from __future__ import annotations

from dataclasses import replace

from conversion.cuts import Canonical, ColumnParallel, Qkv, Regrouped, Replicated, RowParallel, Section, Sections
from conversion.families import decoder
from conversion.families.common import Family, HfConfig, Model, Rule
from conversion.families.settings import check_settings, positive_integer

_SUPPORTED = decoder.COMMON_SUPPORTED | {
    "attn_output_gate": (True, None),
    "layer_scale": (False, None),
    "linear_conv_kernel_dim": (4,),
    "output_gate_type": ("silu", "swish", None),
    "qkv_bias": (False, None),
    # vLLM's model has no tied form.
    "tie_word_embeddings": (False, None),
}
_SIZE_KEYS = tuple(
    f"linear_{name}"
    for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
)
_KINDS = ("linear_attention", "full_attention")
# transformers' default.
_ROTATED = 0.25


def _decoder(hf_config: HfConfig) -> decoder.Decoder:
    check_settings(hf_config, _SUPPORTED)
    moe = replace(
        decoder.softmax_experts(hf_config),
        shared=positive_integer(hf_config, "shared_expert_intermediate_size"),
        shared_name="shared_expert",
        has_shared_gate=True,
        is_shared_whole_in_groups=True,
    )
    rope = decoder.read_rope(hf_config, percent=_ROTATED)
    return decoder.Decoder.of(hf_config, qk_norm=True, moe=moe, rope=rope, kinds=_KINDS)


def _is_linear(hf_config: HfConfig) -> list[bool]:
    """Tells for each layer whether it is a gated delta net; config.json lists the layers, or says how often not."""
    num_layers, given = positive_integer(hf_config, "num_hidden_layers"), hf_config.get("layer_types")
    if given is None:
        interval = positive_integer(hf_config, "full_attention_interval", 4)
        return [(index + 1) % interval != 0 for index in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers:
        raise ValueError(
            f"config.json: layer_types={given!r} must be a list with a name for each of {num_layers} layers"
        )
    return [kind == _KINDS[0] for kind in given]


def _sizes(hf_config: HfConfig) -> tuple[int, ...]:
    heads, value_heads, *widths = (positive_integer(hf_config, key) for key in _SIZE_KEYS)
    if value_heads % heads:
        raise ValueError(
            f"config.json: linear_num_value_heads={value_heads} must be a multiple of linear_num_key_heads={heads}"
        )
    return heads, value_heads, *widths


def model(hf_config: HfConfig, padded_vocabulary: int | None = None) -> Model:
    found, layers = _decoder(hf_config), []
    for index, is_linear in enumerate(_is_linear(hf_config)):
        prefix = f"model.layers.{index}."
        mixer = _delta_net(prefix, hf_config, found) if is_linear else _attention(prefix, found)
        layers.append((*mixer, *decoder.mlp(prefix, found, index)))
    return decoder.with_ends(tuple(layers), found, padded_vocabulary)


def _attention(prefix: str, found: decoder.Decoder) -> tuple[Rule, ...]:
    """Attention whose query projection has a gate beside each head."""
    rules = []
    for rule in decoder.attention(prefix, found):
        if isinstance(rule.cut, Qkv):
            query = rule.cut.query
            gated = Canonical(query.name, (2 * query.shape[0], *query.shape[1:]))
            rule = replace(rule, cut=replace(rule.cut, query=gated, has_gate=True))
        rules.append(rule)
    return tuple(rules)


def _delta_net(prefix: str, hf_config: HfConfig, found: decoder.Decoder) -> tuple[Rule, ...]:
    """Norm and gated delta net (arXiv:2412.06464).

    The file has, for each key head, its rows of query, key, value and gate in one tensor, and those of beta and alpha
    in another; vLLM has them so, too. Megatron has one tensor with all queries first, then all keys, and so on.
    """
    heads, value_heads, key_dim, value_dim, width = _sizes(hf_config)
    keys, values, hf = heads * key_dim, value_heads * value_dim, prefix + "linear_attn."

    def tensor(name: str, *shape: int) -> Canonical:
        return Canonical(hf + name, shape)

    wide = tensor("in_proj_qkvz.weight", 2 * keys + 2 * values, found.hidden)
    narrow = tensor("in_proj_ba.weight", 2 * value_heads, found.hidden)
    mixed = (Section("query", keys, heads), Section("key", keys, heads), Section("value", values, heads))
    gates = (Section("beta", value_heads, heads), Section("alpha", value_heads, heads))
    norm, channels = "input_layernorm.weight", 2 * keys + values
    return (
        Rule(
            Replicated(Canonical(prefix + norm, (found.hidden,))),
            "self_attention.in_proj.layer_norm_weight",
            norm,
            local=norm,
        ),
        Rule(
            Regrouped(wide, narrow, (*mixed, Section("z", values, heads)), gates),
            "self_attention.in_proj.weight",
            "linear_attn.in_proj_qkvz.weight",
            ColumnParallel(wide),
        ),
        Rule(ColumnParallel(narrow), "", "linear_attn.in_proj_ba.weight"),
        _same("conv1d.weight", Sections(tensor("conv1d.weight", channels, 1, width), mixed)),
        _same("dt_bias", ColumnParallel(tensor("dt_bias", value_heads))),
        _same("A_log", ColumnParallel(tensor("A_log", value_heads))),
        Rule(Replicated(tensor("norm.weight", value_dim)), "self_attention.out_norm.weight", "linear_attn.norm.weight"),
        _same("out_proj.weight", RowParallel(tensor("out_proj.weight", found.hidden, values))),
    )


def _same(name: str, cut: ColumnParallel | RowParallel | Sections) -> Rule:
    return Rule(cut, f"self_attention.{name}", f"linear_attn.{name}")


def megatron_arguments(hf_config: HfConfig) -> dict[str, dict[str, object]]:
    return decoder.megatron_arguments(
        _decoder(hf_config),
        layernorm_zero_centered_gamma=True,
        attention_output_gate=True,
        linear_attention_freq=[int(is_linear) for is_linear in _is_linear(hf_config)],
        **dict(zip(_SIZE_KEYS, _sizes(hf_config), strict=True)),
    )


FAMILY = Family(
    model, megatron_arguments, model_class="gpt", has_ends_everywhere=True, has_norm_at_end=True, left_out="mtp."
)
