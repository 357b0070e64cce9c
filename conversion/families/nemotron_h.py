# SPDX-License-Identifier: Apache-2.0
"""nemotron_h: Mamba-2, attention and mixture-of-experts layers in pattern order (Nemotron-3-Nano), then MTP layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from conversion.cuts import (
    Canonical,
    ColumnParallel,
    Experts,
    Qkv,
    Replicated,
    RowParallel,
    Section,
    Sections,
    Vocabulary,
)
from conversion.families.common import DRAFTER, MTP, Family, HfConfig, Model, Rule
from conversion.families.decoder import expert_rule
from conversion.families.settings import (
    check_multiple,
    check_settings,
    ignore,
    optional_integer,
    positive_integer,
    positive_number,
    sigmoid_router,
)

_LETTERS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "moe": "E", "mlp": "-"}

# Settings that change the computation or the tensors, with the only values that Megatron, vLLM and our rules all
# support.
_SUPPORTED: dict[str, tuple[object, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_bias": (False,),
    "mamba_proj_bias": (False,),
    "use_conv_bias": (True,),
    "conv_kernel": (4,),
    "mamba_hidden_act": ("silu",),
    "mlp_hidden_act": ("relu2",),
    "quantization_config": (None,),
    "residual_in_fp32": (False,),
    "sliding_window": (None,),
    # vLLM's model has no tied form.
    "tie_word_embeddings": (False,),
}
_SUPPORTED_EXPERTS: dict[str, tuple[object, ...]] = {"n_shared_experts": (1,), "norm_topk_prob": (True,)}

_SIZE_KEYS = (
    *("vocab_size", "hidden_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
)
_SIZES_OF = {
    "-": ("intermediate_size",),
    "E": ("n_routed_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
}
"""Sizes that only layers of this letter have."""
_ROUTER_KEYS = ("num_experts_per_tok", "n_group", "topk_group", "routed_scaling_factor")

_MTP_PATTERN = "*E"

# Megatron's Mamba mixer fixes this number in its code.
_MAMBA_NORM_EPSILON = 1e-5


Sizes = Mapping[str, int]
"""Sizes of a config.json, by its keys. Those of layers that the model does not have are missing, and `moe_latent_size`
may be.
"""


def _sizes(hf_config: HfConfig) -> Sizes:
    _check_supported(hf_config)
    letters, keys, latent = layer_pattern(hf_config) + mtp_pattern(hf_config), [*_SIZE_KEYS], None
    for letter, of_letter in _SIZES_OF.items():
        if letter in letters:
            keys += of_letter
    if "E" in letters:
        check_settings(hf_config, _SUPPORTED_EXPERTS)
        latent = optional_integer(hf_config, "moe_latent_size")
    else:
        # transformers writes its defaults for layers that a model does not have.
        ignore(hf_config, *_SIZES_OF["E"], *_ROUTER_KEYS, *_SUPPORTED_EXPERTS, "moe_latent_size")
    if "-" not in letters:
        ignore(hf_config, *_SIZES_OF["-"])
    check_multiple(hf_config, "num_attention_heads", "num_key_value_heads")
    check_multiple(hf_config, "mamba_num_heads", "n_groups")
    return {key: positive_integer(hf_config, key) for key in keys} | (
        {} if latent is None else {"moe_latent_size": latent}
    )


def layer_pattern(hf_config: HfConfig) -> str:
    """One letter per layer: M Mamba, * attention, E experts, - dense MLP. Accepts both forms of config.json."""
    kinds, pattern = hf_config.get("layers_block_type"), hf_config.get("hybrid_override_pattern")
    if isinstance(kinds, list):
        letters = "".join(_LETTERS.get(str(kind), "?") for kind in kinds)
    elif isinstance(pattern, str):
        letters = pattern
    else:
        raise ValueError(
            "config.json: neither layers_block_type (a list) nor hybrid_override_pattern (a string) gives the layers"
        )
    if not letters or set(letters) - set("M*E-"):
        raise ValueError(
            f"config.json: layers {kinds or pattern!r}: only {sorted(_LETTERS)} or the letters M * E - are known"
        )
    if hf_config.get("num_hidden_layers", len(letters)) != len(letters):
        raise ValueError(
            f"config.json: num_hidden_layers={hf_config['num_hidden_layers']}, but {len(letters)} layers are listed"
        )
    return letters


def mtp_pattern(hf_config: HfConfig) -> str:
    """One letter per layer of all MTP steps, each predicting one token further; "" without MTP."""
    num_steps = hf_config.get("num_nextn_predict_layers") or 0
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 0:
        raise ValueError(f"config.json: num_nextn_predict_layers={num_steps!r} must be an integer from 0 on")
    kinds = hf_config.get("mtp_layers_block_type")
    letters = hf_config.get("mtp_hybrid_override_pattern") or _MTP_PATTERN
    if isinstance(kinds, list):
        letters = "".join(_LETTERS.get(str(kind), "?") for kind in kinds)
    if num_steps and (not isinstance(letters, str) or not letters or set(letters) - set("*E")):
        # The letters of vLLM's drafter, and of all published models.
        raise ValueError(
            f"config.json: mtp layers {kinds or letters!r}: only attention and moe, or the letters * E, are known"
        )
    return str(letters) * num_steps


def model(hf_config: HfConfig, padded_vocabulary: int | None = None) -> Model:
    sizes = _sizes(hf_config)
    shape = (sizes["vocab_size"], sizes["hidden_size"])
    embedding = Vocabulary(Canonical("backbone.embeddings.weight", shape), padded_vocabulary)
    output = Vocabulary(Canonical("lm_head.weight", shape), padded_vocabulary)
    final_norm = Replicated(Canonical("backbone.norm_f.weight", (sizes["hidden_size"],)))
    layer_rules = {"M": _mamba, "*": _attention, "E": _moe, "-": _mlp}
    return Model(
        first=(Rule(embedding, "embedding.word_embeddings.weight", "model.embed_tokens.weight"),),
        layers=tuple(
            layer_rules[letter](f"backbone.layers.{index}.", sizes)
            for index, letter in enumerate(layer_pattern(hf_config))
        ),
        last=(
            Rule(final_norm, "decoder.final_norm.weight", "model.norm_f.weight"),
            Rule(output, "output_layer.weight", "lm_head.weight"),
        ),
        mtp=_mtp(hf_config, sizes),
    )


def _mtp(hf_config: HfConfig, sizes: Sizes) -> tuple[Rule, ...]:
    """Layers of all MTP steps. Files number them across steps; Megatron from 0.17 counts steps, and layers in each."""
    letters, hidden, rules = mtp_pattern(hf_config), sizes["hidden_size"], list[Rule]()
    steps = optional_integer(hf_config, "num_nextn_predict_layers") if letters else None
    length = len(letters) // (steps or 1)
    for index, letter in enumerate(letters):
        step, place = divmod(index, length)
        hf, megatron, vllm = f"mtp.layers.{index}.", f"{MTP}layers.{step}.", f"{DRAFTER}model.layers.{index}."
        # In the first layer of a step, the embedding of the last token and the hidden state before it become one.
        ends = {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden)} if place == 0 else {}
        ends |= {"final_layernorm": (hidden,)} if place == length - 1 else {}
        for name, shape in ends.items():
            whole = Canonical(f"{hf}{name}.weight", shape)
            cut = ColumnParallel(whole) if name == "eh_proj" else Replicated(whole)
            rules.append(Rule(cut, f"{megatron}{name}.weight", f"{vllm}{name}.weight"))
        for rule in (_attention if letter == "*" else _moe)(hf, sizes):
            inner = f"{megatron}mtp_model_layer.layers.{place}."
            local, key = (None if name is None else inner + name for name in (rule.local, rule.checkpoint))
            rules.append(
                replace(rule, megatron=inner + rule.megatron, local=local, checkpoint=key, vllm=vllm + rule.vllm)
            )
    return tuple(rules)


def _norm(prefix: str, sizes: Sizes, megatron: str, local: str | None = None) -> Rule:
    return Rule(
        Replicated(Canonical(prefix + "norm.weight", (sizes["hidden_size"],))), megatron, "norm.weight", local=local
    )


def _mamba(prefix: str, sizes: Sizes) -> tuple[Rule, ...]:
    heads, groups = sizes["mamba_num_heads"], sizes["n_groups"]
    inner, states = heads * sizes["mamba_head_dim"], groups * sizes["ssm_state_size"]
    conv_sections = (Section("x", inner, heads), Section("B", states, groups), Section("C", states, groups))
    sections = (Section("z", inner, heads), *conv_sections, Section("dt", heads, heads))
    channels = inner + 2 * states

    def tensor(name: str, *shape: int) -> Canonical:
        return Canonical(f"{prefix}mixer.{name}", shape)

    return (
        _norm(prefix, sizes, "mixer.in_proj.layer_norm_weight", local="norm.weight"),
        _same(
            "mixer.in_proj.weight",
            Sections(tensor("in_proj.weight", inner + channels + heads, sizes["hidden_size"]), sections),
        ),
        _same(
            "mixer.conv1d.weight", Sections(tensor("conv1d.weight", channels, 1, sizes["conv_kernel"]), conv_sections)
        ),
        _same("mixer.conv1d.bias", Sections(tensor("conv1d.bias", channels), conv_sections)),
        Rule(ColumnParallel(tensor("A_log", heads), transform="neg_exp"), "mixer.A_log", "mixer.A"),
        _same("mixer.D", ColumnParallel(tensor("D", heads))),
        _same("mixer.dt_bias", ColumnParallel(tensor("dt_bias", heads))),
        _same("mixer.norm.weight", ColumnParallel(tensor("norm.weight", inner))),
        _same("mixer.out_proj.weight", RowParallel(tensor("out_proj.weight", sizes["hidden_size"], inner))),
    )


def _same(name: str, cut: ColumnParallel | RowParallel | Sections) -> Rule:
    return Rule(cut, name, name)


def _attention(prefix: str, sizes: Sizes) -> tuple[Rule, ...]:
    rows, kv_rows = sizes["num_attention_heads"] * sizes["head_dim"], sizes["num_key_value_heads"] * sizes["head_dim"]
    query = Canonical(prefix + "mixer.q_proj.weight", (rows, sizes["hidden_size"]))
    key, value = (Canonical(f"{prefix}mixer.{name}_proj.weight", (kv_rows, sizes["hidden_size"])) for name in "kv")
    output = RowParallel(Canonical(prefix + "mixer.o_proj.weight", (sizes["hidden_size"], rows)))
    return (
        _norm(prefix, sizes, "self_attention.linear_qkv.layer_norm_weight", local="input_layernorm.weight"),
        Rule(Qkv(query, key, value, sizes["head_dim"]), "self_attention.linear_qkv.weight", "mixer.qkv_proj.weight"),
        Rule(output, "self_attention.linear_proj.weight", "mixer.o_proj.weight"),
    )


def _moe(prefix: str, sizes: Sizes) -> tuple[Rule, ...]:
    hidden, shared, shared_width = sizes["hidden_size"], "shared_experts.", sizes["moe_shared_expert_intermediate_size"]
    gate = Canonical(prefix + "mixer.gate.weight", (sizes["n_routed_experts"], hidden))
    bias = Canonical(prefix + "mixer.gate.e_score_correction_bias", (sizes["n_routed_experts"],))
    latent = sizes.get("moe_latent_size")
    projections = {"fc1_latent_proj": (latent, hidden), "fc2_latent_proj": (hidden, latent)} if latent else {}
    return (
        _norm(prefix, sizes, "pre_mlp_layernorm.weight"),
        Rule(Replicated(gate), "mlp.router.weight", "mixer.gate.weight"),
        Rule(Replicated(bias), "mlp.router.expert_bias", "mixer.gate.e_score_correction_bias", dtype="float32"),
        _experts(prefix, sizes, "up_proj", "linear_fc1", "w13_weight"),
        _experts(prefix, sizes, "down_proj", "linear_fc2", "w2_weight"),
        *_dense(
            f"{prefix}mixer.{shared}", hidden, shared_width, f"mlp.{shared}", f"mixer.{shared}", beside_experts=True
        ),
        *(
            Rule(
                Replicated(Canonical(f"{prefix}mixer.{name}.weight", shape)),
                f"mlp.{name}.weight",
                f"mixer.{name}.weight",
            )
            for name, shape in projections.items()
        ),
    )


def _experts(prefix: str, sizes: Sizes, hf: str, megatron: str, vllm: str) -> Rule:
    width = sizes.get("moe_latent_size", sizes["hidden_size"])
    shape = (sizes["moe_intermediate_size"], width) if hf == "up_proj" else (width, sizes["moe_intermediate_size"])
    cut = ColumnParallel if hf == "up_proj" else RowParallel
    experts = Experts(cut(Canonical(f"{prefix}mixer.experts.{{expert}}.{hf}.weight", shape)), sizes["n_routed_experts"])
    return expert_rule(experts, megatron, f"mixer.experts.routed_experts.{vllm}")


def _mlp(prefix: str, sizes: Sizes) -> tuple[Rule, ...]:
    return (
        _norm(prefix, sizes, "mlp.linear_fc1.layer_norm_weight", local="pre_mlp_layernorm.weight"),
        *_dense(f"{prefix}mixer.", sizes["hidden_size"], sizes["intermediate_size"], "mlp.", "mixer."),
    )


def _dense(
    hf: str, hidden: int, width: int, megatron: str, vllm: str, *, beside_experts: bool = False
) -> tuple[Rule, ...]:
    up, down = Canonical(hf + "up_proj.weight", (width, hidden)), Canonical(hf + "down_proj.weight", (hidden, width))
    return (
        Rule(
            ColumnParallel(up),
            megatron + "linear_fc1.weight",
            vllm + "up_proj.weight",
            is_whole_in_groups=beside_experts,
        ),
        Rule(
            RowParallel(down),
            megatron + "linear_fc2.weight",
            vllm + "down_proj.weight",
            is_whole_in_groups=beside_experts,
        ),
    )


def megatron_arguments(hf_config: HfConfig) -> dict[str, dict[str, object]]:
    """Arguments of TransformerConfig ("transformer") and MambaModel ("model") from config.json; plain values.

    `activation_func` is a name: "squared_relu" of megatron.core.activations. `vocab_size` is unpadded.
    """
    sizes, pattern = _sizes(hf_config), layer_pattern(hf_config)
    transformer: dict[str, object] = dict(
        num_layers=len(pattern),
        hidden_size=sizes["hidden_size"],
        # Without dense layers, nobody reads Megatron's default.
        ffn_hidden_size=sizes.get("intermediate_size", 4 * sizes["hidden_size"]),
        num_attention_heads=sizes["num_attention_heads"],
        num_query_groups=sizes["num_key_value_heads"],
        kv_channels=sizes["head_dim"],
        normalization="RMSNorm",
        layernorm_epsilon=_epsilon(hf_config),
        add_bias_linear=False,
        add_qkv_bias=False,
        gated_linear_unit=False,
        activation_func="squared_relu",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        is_hybrid_model=True,
        mamba_num_heads=sizes["mamba_num_heads"],
        mamba_head_dim=sizes["mamba_head_dim"],
        mamba_num_groups=sizes["n_groups"],
        mamba_state_dim=sizes["ssm_state_size"],
    )
    mtp = mtp_pattern(hf_config)
    if "E" in pattern + mtp:
        topk = positive_integer(hf_config, "num_experts_per_tok")
        transformer |= dict(
            num_moe_experts=sizes["n_routed_experts"],
            moe_ffn_hidden_size=sizes["moe_intermediate_size"],
            moe_shared_expert_intermediate_size=sizes["moe_shared_expert_intermediate_size"],
            moe_router_topk=topk,
            **sigmoid_router(hf_config, topk),
        )
        transformer |= {key: sizes[key] for key in ("moe_latent_size",) if key in sizes}
    arguments: dict[str, object] = dict(
        vocab_size=sizes["vocab_size"],
        max_sequence_length=positive_integer(hf_config, "max_position_embeddings"),
        hybrid_override_pattern=pattern,
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
    )
    steps = optional_integer(hf_config, "num_nextn_predict_layers") if mtp else None
    of_steps = {"mtp": {"pattern": mtp[: len(mtp) // steps], "num_steps": steps}} if steps else {}
    return {"transformer": transformer, "model": arguments, **of_steps}


def _epsilon(hf_config: HfConfig) -> float:
    return positive_number(hf_config, "layer_norm_epsilon", _MAMBA_NORM_EPSILON)


def _check_supported(hf_config: HfConfig) -> None:
    # Published files have the size of a head under both names.
    check_settings(hf_config, _SUPPORTED | {"attention_head_dim": (None, hf_config.get("head_dim"))})
    if "M" in layer_pattern(hf_config) and _epsilon(hf_config) != _MAMBA_NORM_EPSILON:
        raise ValueError(
            f"config.json: layer_norm_epsilon={_epsilon(hf_config)}: Megatron's Mamba norm only has "
            f"{_MAMBA_NORM_EPSILON}"
        )
    limit = hf_config.get("time_step_limit")
    if limit is not None and not _is_unlimited(limit):
        raise ValueError(
            f"config.json: time_step_limit={limit!r} is not supported; Megatron and vLLM have no limit, [0.0, Infinity]"
        )


def _is_unlimited(limit: object) -> bool:
    if not isinstance(limit, list | tuple) or len(limit) != 2:
        return False
    low, high = limit
    # transformers 5 writes infinity as {"__float__": "Infinity"}, because JSON has no such number.
    return low == 0 and (high in (math.inf, "Infinity") or high == {"__float__": "Infinity"})


FAMILY = Family(model, megatron_arguments, model_class="mamba", has_ends_everywhere=True)
