"""deepseek_v3: multi-latent attention, sigmoid-routed experts in groups, shared experts. Converted only: not trained, not sampled."""

from __future__ import annotations

from dataclasses import dataclass

from conversion.cuts import Canonical, ColumnParallel, Replicated, RowParallel
from conversion.families import decoder
from conversion.families.common import Family, HfConfig, Model, Rule
from conversion.families.settings import check_settings, choice, positive_integer, positive_number, sigmoid_router

_SUPPORTED = decoder.COMMON_SUPPORTED | {
    "moe_layer_freq": (1, None),
    "norm_topk_prob": (True,),
    # Published files count a layer of multi-token prediction here; whoever has none of its tensors sets 0.
    "num_nextn_predict_layers": (0, None),
    "rope_interleave": (True, None),
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
}

# Megatron's names of YaRN's numbers, with transformers' defaults.
_YARN = {
    "original_max_position_embeddings": ("original_max_position_embeddings", None),
    "beta_fast": ("beta_fast", 32.0),
    "beta_slow": ("beta_slow", 1.0),
    "mscale": ("mscale", 1.0),
    "mscale_all_dim": ("mscale_all_dim", None),
}


@dataclass(frozen=True)
class Attention:
    """Sizes of multi-latent attention. `query_rank` is None for a query projection of full rank."""

    query_rank: int | None
    kv_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int


def _attention(hf_config: HfConfig) -> Attention:
    return Attention(
        query_rank=None if hf_config.get("q_lora_rank") is None else positive_integer(hf_config, "q_lora_rank"),
        kv_rank=positive_integer(hf_config, "kv_lora_rank"),
        plain_dim=positive_integer(hf_config, "qk_nope_head_dim"),
        rotary_dim=positive_integer(hf_config, "qk_rope_head_dim"),
        value_dim=positive_integer(hf_config, "v_head_dim"),
    )


def _decoder(hf_config: HfConfig) -> decoder.Decoder:
    check_settings(hf_config, _SUPPORTED)
    num_layers, num_dense = positive_integer(hf_config, "num_hidden_layers"), hf_config.get("first_k_dense_replace")
    if not isinstance(num_dense, int) or num_dense < 0:
        raise ValueError(f"config.json: first_k_dense_replace={num_dense!r} must be a number of layers")
    num_heads, latent = positive_integer(hf_config, "num_attention_heads"), _attention(hf_config)
    return decoder.Decoder(
        num_layers=num_layers,
        vocabulary=positive_integer(hf_config, "vocab_size"),
        hidden=positive_integer(hf_config, "hidden_size"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=latent.plain_dim + latent.rotary_dim,
        mlp=positive_integer(hf_config, "intermediate_size"),
        epsilon=positive_number(hf_config, "rms_norm_eps"),
        max_positions=positive_integer(hf_config, "max_position_embeddings"),
        rope=decoder.Rope(decoder.rope_settings(hf_config)[0]),
        tied=choice(hf_config, "tie_word_embeddings", default=False),
        qk_norm=True,
        moe=decoder.Moe(
            layers=tuple(index >= num_dense for index in range(num_layers)),
            num_experts=positive_integer(hf_config, "n_routed_experts"),
            width=positive_integer(hf_config, "moe_intermediate_size"),
            topk=positive_integer(hf_config, "num_experts_per_tok"),
        ),
    )


def model(hf_config: HfConfig, padded_vocabulary: int | None = None) -> Model:
    """The rules of a config.json."""
    found, latent = _decoder(hf_config), _attention(hf_config)
    shared_width = _shared_width(hf_config)
    layers = tuple(_layer(f"model.layers.{index}.", found, latent, index, shared_width) for index in range(found.num_layers))
    return decoder.with_ends(layers, found, padded_vocabulary)


def _shared_width(hf_config: HfConfig) -> int:
    return positive_integer(hf_config, "moe_intermediate_size") * positive_integer(hf_config, "n_shared_experts")


def _layer(prefix: str, found: decoder.Decoder, latent: Attention, index: int, shared_width: int) -> tuple[Rule, ...]:
    attention, moe = _latent_attention(prefix + "self_attn.", found, latent), found.moe
    norm = Rule(Replicated(Canonical(prefix + "input_layernorm.weight", (found.hidden,))), "input_layernorm.weight")
    assert moe is not None
    if not moe.layers[index]:
        return (norm, *attention, *decoder.dense_mlp(prefix, found))
    bias = Replicated(Canonical(prefix + "mlp.gate.e_score_correction_bias", (moe.num_experts,)))
    return (
        norm,
        *attention,
        *decoder.moe_norm(prefix, found.hidden),
        *decoder.gated_experts(prefix, found.hidden, moe),
        Rule(bias, "mlp.router.expert_bias", dtype="float32"),
        *decoder.gated_mlp(prefix + "mlp.shared_experts.", found.hidden, shared_width, "mlp.shared_experts.", "mlp.shared_experts."),
    )


def _latent_attention(hf: str, found: decoder.Decoder, latent: Attention) -> tuple[Rule, ...]:
    heads = found.num_heads
    query_rows, kv_rows = heads * (latent.plain_dim + latent.rotary_dim), heads * (latent.plain_dim + latent.value_dim)
    rules = []
    if latent.query_rank is None:
        rules.append(_up(hf + "q_proj", "linear_q_proj", query_rows, found.hidden))
    else:
        rules += [
            _down(hf + "q_a_proj", "linear_q_down_proj", latent.query_rank, found.hidden),
            _norm(hf + "q_a_layernorm", "linear_q_up_proj", "q_layernorm", latent.query_rank),
            _up(hf + "q_b_proj", "linear_q_up_proj", query_rows, latent.query_rank),
        ]
    return (
        *rules,
        _down(hf + "kv_a_proj_with_mqa", "linear_kv_down_proj", latent.kv_rank + latent.rotary_dim, found.hidden),
        _norm(hf + "kv_a_layernorm", "linear_kv_up_proj", "kv_layernorm", latent.kv_rank),
        _up(hf + "kv_b_proj", "linear_kv_up_proj", kv_rows, latent.kv_rank),
        Rule(RowParallel(Canonical(hf + "o_proj.weight", (found.hidden, heads * latent.value_dim))), "self_attention.linear_proj.weight"),
    )


def _up(hf: str, megatron: str, *shape: int) -> Rule:
    return Rule(ColumnParallel(Canonical(hf + ".weight", shape)), f"self_attention.{megatron}.weight")


def _down(hf: str, megatron: str, *shape: int) -> Rule:
    # Transformer Engine's specs give every rank all of it, the local ones cut it.
    tensor = Canonical(hf + ".weight", shape)
    return Rule(Replicated(tensor), f"self_attention.{megatron}.weight", local_cut=ColumnParallel(tensor))


def _norm(hf: str, fused: str, local: str, size: int) -> Rule:
    cut = Replicated(Canonical(hf + ".weight", (size,)))
    return Rule(cut, f"self_attention.{fused}.layer_norm_weight", local=f"self_attention.{local}.weight")


def megatron_arguments(hf_config: HfConfig) -> dict[str, dict[str, object]]:
    """Arguments of MLATransformerConfig and GPTModel that follow from config.json."""
    found, latent = _decoder(hf_config), _attention(hf_config)
    assert found.moe is not None
    router = sigmoid_router(
        found.moe.topk,
        scaling=positive_number(hf_config, "routed_scaling_factor", 1.0),
        groups=positive_integer(hf_config, "n_group", 1),
        chosen_groups=positive_integer(hf_config, "topk_group", 1),
    )
    return decoder.megatron_arguments(
        found,
        multi_latent_attention=True,
        q_lora_rank=latent.query_rank,
        kv_lora_rank=latent.kv_rank,
        qk_head_dim=latent.plain_dim,
        qk_pos_emb_head_dim=latent.rotary_dim,
        v_head_dim=latent.value_dim,
        # The width of a head after attention.
        kv_channels=latent.value_dim,
        rotary_base=found.rope.base,
        **_rope_arguments(hf_config),
        moe_shared_expert_intermediate_size=_shared_width(hf_config),
        **router,
    )


def _rope_arguments(hf_config: HfConfig) -> dict[str, object]:
    _, kind, given = decoder.rope_settings(hf_config)
    if kind == "default":
        return dict(rope_type="rope")
    if kind != "yarn":
        raise ValueError(f"config.json: rope_type={kind!r} is not supported for deepseek_v3; only default and yarn are")
    numbers = {name: positive_number(given, key, default) for key, (name, default) in _YARN.items()}
    return dict(rope_type="yarn", rotary_scaling_factor=positive_number(given, "factor"), **numbers)


FAMILY = Family(model, megatron_arguments, model_class="gpt", vllm_layers=None, can_train=False)
