"""The families of plain transformer decoders: llama, mixtral, qwen2, qwen3 and qwen3_moe. Each is a function that reads its config.json."""

from __future__ import annotations

from conversion.families.decoder import COMMON_SUPPORTED, Decoder, Moe, decoder_family
from conversion.families.settings import HfConfig, check_settings, choice, positive_integer, softmax_router

# transformers' default, whatever the hidden size.
_QWEN3_HEAD_DIM = 128


def llama(hf_config: HfConfig) -> Decoder:
    """Dense decoders, with or without the rotary scaling of Llama 3."""
    # `bias` and `qkv_bias` are spellings of finetunes that vLLM reads.
    check_settings(hf_config, COMMON_SUPPORTED | {key: (False, None) for key in ("mlp_bias", "bias", "qkv_bias")})
    return Decoder.of(hf_config)


def mixtral(hf_config: HfConfig) -> Decoder:
    """Decoders whose layers all have softmax-routed gated experts."""
    check_settings(hf_config, COMMON_SUPPORTED | {"router_jitter_noise": (0.0, 0, None)})
    topk = positive_integer(hf_config, "num_experts_per_tok")
    moe = Moe(
        layers=(True,) * positive_integer(hf_config, "num_hidden_layers"),
        num_experts=positive_integer(hf_config, "num_local_experts"),
        width=positive_integer(hf_config, "intermediate_size"),
        topk=topk,
        router=softmax_router(topk, normalised=True),
        block="block_sparse_moe.",
        names=("w1", "w3", "w2"),
    )
    return Decoder.of(hf_config, moe=moe)


def qwen2(hf_config: HfConfig) -> Decoder:
    """Dense decoders with biases on query, key and value (Qwen2, Qwen2.5)."""
    # In qwen2, `attention_bias` is not a setting: the biases are always there.
    check_settings(hf_config, COMMON_SUPPORTED | {"attention_bias": (True, None)})
    found = Decoder.of(hf_config, qkv_bias=True)
    if found.head_dim * found.num_heads != found.hidden:
        raise ValueError(f"config.json: head_dim={found.head_dim} is not supported for qwen2; vLLM has hidden_size / num_attention_heads")
    return found


def qwen3(hf_config: HfConfig) -> Decoder:
    """Dense decoders with norms on query and key (Qwen3-0.6B to 32B)."""
    check_settings(hf_config, COMMON_SUPPORTED)
    return Decoder.of(hf_config, head_dim=_QWEN3_HEAD_DIM, qk_norm=True)


def qwen3_moe(hf_config: HfConfig) -> Decoder:
    """qwen3 with softmax-routed gated experts (Qwen3-30B-A3B, 235B-A22B)."""
    # vLLM builds a shared expert for this key, which transformers does not know.
    check_settings(hf_config, COMMON_SUPPORTED | {"shared_expert_intermediate_size": (0, None)})
    # transformers 5 writes num_local_experts, the published files have num_experts.
    experts_key = "num_experts" if "num_experts" in hf_config else "num_local_experts"
    step, dense = positive_integer(hf_config, "decoder_sparse_step", 1), hf_config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ValueError(f"config.json: mlp_only_layers={dense!r} must be a list")
    num_layers, topk = positive_integer(hf_config, "num_hidden_layers"), positive_integer(hf_config, "num_experts_per_tok")
    moe = Moe(
        layers=tuple(index not in dense and (index + 1) % step == 0 for index in range(num_layers)),
        num_experts=positive_integer(hf_config, experts_key),
        width=positive_integer(hf_config, "moe_intermediate_size"),
        topk=topk,
        router=softmax_router(topk, normalised=choice(hf_config, "norm_topk_prob", default=False)),
    )
    return Decoder.of(hf_config, qk_norm=True, moe=moe)


DECODERS = {read.__name__: decoder_family(read) for read in (llama, mixtral, qwen2, qwen3, qwen3_moe)}
