"""qwen3_moe: qwen3 with softmax-routed gated experts (Qwen3-30B-A3B, 235B-A22B)."""

from __future__ import annotations

from conversion.families import decoder
from conversion.families.common import Family, HfConfig, Model
from conversion.families.settings import check_settings, choice, positive_integer, softmax_router

# vLLM builds a shared expert for this key, which transformers does not know.
_SUPPORTED = decoder.COMMON_SUPPORTED | {"shared_expert_intermediate_size": (0, None)}


def _decoder(hf_config: HfConfig) -> decoder.Decoder:
    check_settings(hf_config, _SUPPORTED)
    # transformers 5 writes num_local_experts, the published files have num_experts.
    experts_key = "num_experts" if "num_experts" in hf_config else "num_local_experts"
    moe = decoder.Moe(
        layers=_moe_layers(hf_config),
        num_experts=positive_integer(hf_config, experts_key),
        width=positive_integer(hf_config, "moe_intermediate_size"),
        topk=positive_integer(hf_config, "num_experts_per_tok"),
    )
    return decoder.Decoder.of(hf_config, qk_norm=True, moe=moe)


def _moe_layers(hf_config: HfConfig) -> tuple[bool, ...]:
    step, dense = positive_integer(hf_config, "decoder_sparse_step", 1), hf_config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ValueError(f"config.json: mlp_only_layers={dense!r} must be a list")
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(positive_integer(hf_config, "num_hidden_layers")))


def model(hf_config: HfConfig, padded_vocabulary: int | None = None) -> Model:
    """The rules of a config.json."""
    return decoder.build_model(_decoder(hf_config), padded_vocabulary)


def megatron_arguments(hf_config: HfConfig) -> dict[str, dict[str, object]]:
    """Arguments of TransformerConfig and GPTModel that follow from config.json."""
    found = _decoder(hf_config)
    assert found.moe is not None
    normalised = choice(hf_config, "norm_topk_prob", default=False)
    return decoder.megatron_arguments(found, **softmax_router(found.moe.topk, normalised=normalised))


FAMILY = Family(model, megatron_arguments, model_class="gpt", vllm_layers="model.layers.{layer}.")
