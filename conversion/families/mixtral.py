"""mixtral: decoders whose layers all have softmax-routed gated experts."""

from __future__ import annotations

from conversion.families import decoder
from conversion.families.common import Family, HfConfig, Model
from conversion.families.settings import check_settings, positive_integer, softmax_router

_SUPPORTED = decoder.COMMON_SUPPORTED | {"router_jitter_noise": (0.0, 0, None)}


def _decoder(hf_config: HfConfig) -> decoder.Decoder:
    check_settings(hf_config, _SUPPORTED)
    moe = decoder.Moe(
        layers=(True,) * positive_integer(hf_config, "num_hidden_layers"),
        num_experts=positive_integer(hf_config, "num_local_experts"),
        width=positive_integer(hf_config, "intermediate_size"),
        topk=positive_integer(hf_config, "num_experts_per_tok"),
        block="block_sparse_moe.",
        names=("w1", "w3", "w2"),
    )
    return decoder.Decoder.of(hf_config, moe=moe)


def model(hf_config: HfConfig, padded_vocabulary: int | None = None) -> Model:
    """The rules of a config.json."""
    return decoder.build_model(_decoder(hf_config), padded_vocabulary)


def megatron_arguments(hf_config: HfConfig) -> dict[str, dict[str, object]]:
    """Arguments of TransformerConfig and GPTModel that follow from config.json."""
    found = _decoder(hf_config)
    assert found.moe is not None
    return decoder.megatron_arguments(found, **softmax_router(found.moe.topk, normalised=True))


FAMILY = Family(model, megatron_arguments, model_class="gpt", vllm_layers="model.layers.{layer}.")
