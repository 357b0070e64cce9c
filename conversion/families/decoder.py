# SPDX-License-Identifier: Apache-2.0
"""Transformer decoders (GPTModel): attention with rotary positions, gated MLPs, gated experts, and their tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from conversion.cuts import Canonical, Experts, Gated, Qkv, Replicated, RowParallel, Vocabulary
from conversion.families.common import Family, Model, Rule
from conversion.families.rope import Rope, read_rope
from conversion.families.settings import (
    HfConfig,
    check_multiple,
    choice,
    ignore,
    positive_integer,
    positive_number,
    sigmoid_router,
    softmax_router,
)

# Settings that no converted family uses, with the only values that switch them off; the first is the default.
COMMON_SUPPORTED: dict[str, tuple[object, ...]] = {
    "attention_bias": (False, None),
    "attention_dropout": (0.0, 0, None),
    "dual_chunk_attention_config": (None,),
    "hidden_act": ("silu",),
    "is_causal": (True, None),
    "quantization_config": (None,),
}


@dataclass(frozen=True)
class Moe:
    """Experts of a model: which layers have them, their sizes, and their names."""

    layers: tuple[bool, ...]
    num_experts: int
    width: int
    topk: int
    router: Mapping[str, object] = field(default_factory=dict)
    block: str = "mlp."
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    has_bias: bool = False
    """True if the router adds a bias to the scores by which it chooses."""
    shared: int = 0
    """Width of the MLP that every token passes, all its shared experts together; 0 for none."""
    shared_name: str = "shared_experts"
    is_shared_whole_in_groups: bool = False
    """See `Rule.is_whole_in_groups`."""
    has_shared_gate: bool = False
    """True if each token weighs what it gets from the shared experts."""


@dataclass(frozen=True)
class Decoder:
    """Values of a config.json that rules and arguments need."""

    num_layers: int
    vocabulary: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp: int
    epsilon: float
    max_positions: int
    rope: Rope
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    moe: Moe | None = None

    @classmethod
    def of(
        cls,
        hf_config: HfConfig,
        *,
        head_dim: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        moe: Moe | None = None,
        rope: Rope | None = None,
        mlp: int | None = None,
        has_window_switch: bool = False,
        kinds: tuple[str, ...] = ("full_attention",),
        has_windows: bool = False,
    ) -> Decoder:
        """Sizes of a config.json. `head_dim` is the family's default; None for hidden_size / num_attention_heads.

        `mlp` is the width of dense layers of a family whose config.json has none.
        Rotary positions are those of the config unless `rope` gives them. `has_window_switch`: transformers' class has
        `use_sliding_window`, and drops the window unless it is true. `has_windows`: the family reads the window itself.
        """
        if not has_windows:
            check_no_window(hf_config, has_switch=has_window_switch, allowed=kinds)
        hidden = positive_integer(hf_config, "hidden_size")
        num_heads = positive_integer(hf_config, "num_attention_heads")
        check_multiple(hf_config, "num_attention_heads", "num_key_value_heads")
        return cls(
            num_layers=positive_integer(hf_config, "num_hidden_layers"),
            vocabulary=positive_integer(hf_config, "vocab_size"),
            hidden=hidden,
            num_heads=num_heads,
            num_kv_heads=positive_integer(hf_config, "num_key_value_heads", num_heads),
            head_dim=positive_integer(hf_config, "head_dim", head_dim or hidden // num_heads),
            mlp=mlp or positive_integer(hf_config, "intermediate_size"),
            epsilon=positive_number(hf_config, "rms_norm_eps"),
            max_positions=positive_integer(hf_config, "max_position_embeddings"),
            rope=rope or read_rope(hf_config),
            tied=choice(hf_config, "tie_word_embeddings", default=False),
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            moe=moe,
        )


def with_whole_heads(decoder: Decoder) -> Decoder:
    """The decoder, where the heads together are as wide as the model."""
    if decoder.head_dim * decoder.num_heads != decoder.hidden:
        raise ValueError(
            f"config.json: head_dim={decoder.head_dim} is not supported; vLLM has hidden_size / "
            "num_attention_heads here"
        )
    return decoder


def check_no_window(
    hf_config: HfConfig, *, has_switch: bool = False, allowed: tuple[str, ...] = ("full_attention",)
) -> None:
    """Refuses sliding windows that limit attention. Without a family's switch, vLLM uses any window in config.json."""
    kinds = hf_config.get("layer_types")
    if isinstance(kinds, list) and set(kinds) - set(allowed):
        names = " and ".join(allowed)
        raise ValueError(
            f"config.json: layer_types={sorted(set(map(str, kinds)))}: only {names} {'are' if allowed[1:] else 'is'} "
            "supported"
        )
    window = hf_config.get("sliding_window")
    if has_switch:
        ignore(hf_config, "max_window_layers")
        window = window if hf_config.get("use_sliding_window") else None
    if window is None:
        return
    size = window if isinstance(window, int) and not isinstance(window, bool) else 0
    if has_switch or size < positive_integer(hf_config, "max_position_embeddings"):
        way_out = "use_sliding_window to false" if has_switch else "it to null if the model attends to all tokens"
        raise ValueError(
            f"config.json: sliding_window={window} is in use, which is not supported; only full attention is: set "
            f"{way_out}"
        )


def decoder_family(read: Callable[[HfConfig], Decoder], **transformer: object) -> Family:
    """The family whose config.json `read` understands. `transformer` are its own fields of TransformerConfig."""

    def model(hf_config: HfConfig, padded_vocabulary: int | None) -> Model:
        decoder, layers = read(hf_config), []
        for index in range(decoder.num_layers):
            prefix = f"model.layers.{index}."
            layers.append((*attention(prefix, decoder), *mlp(prefix, decoder, index)))
        return with_ends(tuple(layers), decoder, padded_vocabulary)

    return Family(
        model,
        lambda hf_config: megatron_arguments(read(hf_config), **transformer),
        model_class="gpt",
    )


def with_ends(layers: tuple[tuple[Rule, ...], ...], decoder: Decoder, padded_vocabulary: int | None) -> Model:
    """The layers between embedding, final norm and output."""
    shape = (decoder.vocabulary, decoder.hidden)
    embedding = Vocabulary(Canonical("model.embed_tokens.weight", shape), padded_vocabulary)
    output = Vocabulary(Canonical("lm_head.weight", shape), padded_vocabulary)
    final_norm = _replicated("model.norm.weight", decoder.hidden)
    rule = Rule(embedding if decoder.tied else output, "output_layer.weight", "lm_head.weight")
    norm_rule = Rule(final_norm, "decoder.final_layernorm.weight", "model.norm.weight")
    return Model(
        first=(Rule(embedding, "embedding.word_embeddings.weight", "model.embed_tokens.weight"),),
        layers=layers,
        last=(norm_rule,) if decoder.tied else (norm_rule, rule),
        tied_output=rule if decoder.tied else None,
    )


def attention(prefix: str, decoder: Decoder) -> tuple[Rule, ...]:
    """Input norm and grouped-query attention."""
    rows, kv_rows = decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
    tails = {"weight": (decoder.hidden,)} | ({"bias": ()} if decoder.qkv_bias else {})
    rules = [
        Rule(
            _replicated(prefix + "input_layernorm.weight", decoder.hidden),
            "self_attention.linear_qkv.layer_norm_weight",
            "input_layernorm.weight",
            local="input_layernorm.weight",
        )
    ]
    for kind, tail in tails.items():
        sizes = {"q": rows, "k": kv_rows, "v": kv_rows}
        query, key, value = (
            Canonical(f"{prefix}self_attn.{name}_proj.{kind}", (size, *tail)) for name, size in sizes.items()
        )
        rules.append(
            Rule(
                Qkv(query, key, value, decoder.head_dim),
                f"self_attention.linear_qkv.{kind}",
                f"self_attn.qkv_proj.{kind}",
            )
        )
    if decoder.qk_norm:
        rules += [
            Rule(
                _replicated(f"{prefix}self_attn.{name}_norm.weight", decoder.head_dim),
                f"self_attention.{name}_layernorm.weight",
                f"self_attn.{name}_norm.weight",
            )
            for name in "qk"
        ]
    output = RowParallel(Canonical(prefix + "self_attn.o_proj.weight", (decoder.hidden, rows)))
    return (*rules, Rule(output, "self_attention.linear_proj.weight", "self_attn.o_proj.weight"))


def mlp(prefix: str, decoder: Decoder, index: int) -> tuple[Rule, ...]:
    """Norm and MLP, or experts, of a layer. Megatron never fuses the norm before experts into a linear layer."""
    norm = _replicated(prefix + "post_attention_layernorm.weight", decoder.hidden)
    vllm = "post_attention_layernorm.weight"
    if decoder.moe is not None and decoder.moe.layers[index]:
        return (Rule(norm, "pre_mlp_layernorm.weight", vllm), *gated_experts(prefix, decoder.hidden, decoder.moe))
    return (
        Rule(norm, "mlp.linear_fc1.layer_norm_weight", vllm, local="pre_mlp_layernorm.weight"),
        *gated_mlp(prefix + "mlp.", decoder.hidden, decoder.mlp, "mlp.", "mlp."),
    )


def gated_mlp(
    hf: str, hidden: int, width: int, megatron: str, vllm: str, *, is_whole_in_groups: bool = False
) -> tuple[Rule, ...]:
    """Both linear layers of a gated MLP; prefixes for each holder."""
    return (
        Rule(
            _gated(hf, ("gate_proj", "up_proj"), width, hidden),
            megatron + "linear_fc1.weight",
            vllm + "gate_up_proj.weight",
            is_whole_in_groups=is_whole_in_groups,
        ),
        Rule(
            RowParallel(Canonical(hf + "down_proj.weight", (hidden, width))),
            megatron + "linear_fc2.weight",
            vllm + "down_proj.weight",
            is_whole_in_groups=is_whole_in_groups,
        ),
    )


def gated_experts(prefix: str, hidden: int, moe: Moe) -> tuple[Rule, ...]:
    """Router, gated experts and shared experts of a layer."""
    block = prefix + moe.block
    gate, up, down = moe.names
    expert = block + "experts.{expert}."
    first = Experts(_gated(expert, (gate, up), moe.width, hidden), moe.num_experts)
    second = Experts(RowParallel(Canonical(f"{expert}{down}.weight", (hidden, moe.width))), moe.num_experts)
    rules = [
        Rule(
            _replicated(block + "gate.weight", moe.num_experts, hidden), "mlp.router.weight", moe.block + "gate.weight"
        )
    ]
    vllm = moe.block + "experts.routed_experts."
    rules += [
        expert_rule(first, "linear_fc1", vllm + "w13_weight"),
        expert_rule(second, "linear_fc2", vllm + "w2_weight"),
    ]
    if moe.has_bias:
        bias = "gate.e_score_correction_bias"
        rules.append(
            Rule(
                _replicated(block + bias, moe.num_experts), "mlp.router.expert_bias", moe.block + bias, dtype="float32"
            )
        )
    if moe.shared:
        shared, is_whole = moe.shared_name + ".", moe.is_shared_whole_in_groups
        rules += gated_mlp(
            block + shared,
            hidden,
            moe.shared,
            "mlp.shared_experts.",
            moe.block + shared,
            is_whole_in_groups=is_whole,
        )
    if moe.has_shared_gate:
        gate = f"{moe.shared_name}_gate.weight"
        rules.append(Rule(_replicated(block + gate, 1, hidden), "mlp.shared_experts.gate_weight", moe.block + gate))
    return tuple(rules)


def softmax_experts(hf_config: HfConfig) -> Moe:
    """Experts as Qwen has them: in every layer but some, chosen by a softmax."""
    # transformers 5 writes num_local_experts, the published files have num_experts.
    experts_key = "num_experts" if "num_experts" in hf_config else "num_local_experts"
    step, dense = positive_integer(hf_config, "decoder_sparse_step", 1), hf_config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ValueError(f"config.json: mlp_only_layers={dense!r} must be a list")
    num_layers = positive_integer(hf_config, "num_hidden_layers")
    topk = positive_integer(hf_config, "num_experts_per_tok")
    return Moe(
        layers=tuple(index not in dense and (index + 1) % step == 0 for index in range(num_layers)),
        num_experts=positive_integer(hf_config, experts_key),
        width=positive_integer(hf_config, "moe_intermediate_size"),
        topk=topk,
        router=softmax_router(topk, normalised=choice(hf_config, "norm_topk_prob", default=False)),
    )


def sigmoid_experts(hf_config: HfConfig) -> Moe:
    """Experts as in DeepSeek V3: after the first layers, chosen by sigmoid scores and a bias, beside shared experts."""
    num_dense = hf_config.get("first_k_dense_replace")
    if not isinstance(num_dense, int) or num_dense < 0:
        raise ValueError(f"config.json: first_k_dense_replace={num_dense!r} must be a number of layers")
    width = positive_integer(hf_config, "moe_intermediate_size")
    topk = positive_integer(hf_config, "num_experts_per_tok")
    return Moe(
        layers=tuple(index >= num_dense for index in range(positive_integer(hf_config, "num_hidden_layers"))),
        num_experts=positive_integer(hf_config, "n_routed_experts"),
        width=width,
        topk=topk,
        router=sigmoid_router(hf_config, topk),
        has_bias=True,
        shared=width * positive_integer(hf_config, "n_shared_experts"),
    )


def expert_rule(cut: Experts, megatron: str, vllm: str) -> Rule:
    """One linear layer of all experts."""
    local, key = f"mlp.experts.local_experts.{{expert}}.{megatron}.weight", f"mlp.experts.experts.{megatron}.weight"
    return Rule(cut, f"mlp.experts.{megatron}.weight{{expert}}", vllm, local=local, checkpoint=key)


def _gated(hf: str, names: tuple[str, str], width: int, hidden: int) -> Gated:
    gate, up = (Canonical(f"{hf}{name}.weight", (width, hidden)) for name in names)
    return Gated(gate, up)


def _replicated(name: str, *shape: int) -> Replicated:
    return Replicated(Canonical(name, shape))


def megatron_arguments(decoder: Decoder, **transformer: object) -> dict[str, dict[str, object]]:
    """Arguments of TransformerConfig ("transformer") and GPTModel ("model"), attributes of the former ("attributes").

    All are plain values. `transformer` are the family's own. `activation_func` is a name: "silu" of torch. `vocab_size`
    is unpadded.
    """
    arguments: dict[str, object] = dict(
        num_layers=decoder.num_layers,
        hidden_size=decoder.hidden,
        ffn_hidden_size=decoder.mlp,
        num_attention_heads=decoder.num_heads,
        num_query_groups=decoder.num_kv_heads,
        kv_channels=decoder.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=decoder.epsilon,
        add_bias_linear=False,
        add_qkv_bias=decoder.qkv_bias,
        qk_layernorm=decoder.qk_norm,
        gated_linear_unit=True,
        activation_func="silu",
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    moe = decoder.moe
    if moe is not None:
        arguments |= dict(
            num_moe_experts=moe.num_experts, moe_ffn_hidden_size=moe.width, moe_router_topk=moe.topk, **moe.router
        )
        if not all(moe.layers):
            arguments["moe_layer_freq"] = [int(has_experts) for has_experts in moe.layers]
        if moe.shared:
            arguments |= dict(
                moe_shared_expert_intermediate_size=moe.shared, moe_shared_expert_gate=moe.has_shared_gate
            )
    model: dict[str, object] = dict(
        vocab_size=decoder.vocabulary,
        max_sequence_length=decoder.max_positions,
        position_embedding_type="rope",
        rotary_base=decoder.rope.base,
        rotary_percent=decoder.rope.percent,
        share_embeddings_and_output_weights=decoder.tied,
    )
    return {
        "transformer": arguments | transformer,
        "model": model | dict(decoder.rope.model),
        "attributes": dict(decoder.rope.attributes),
    }
