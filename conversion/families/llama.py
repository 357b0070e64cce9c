"""llama: dense decoders, with or without the rotary scaling of Llama 3."""

from __future__ import annotations

from conversion.families import decoder
from conversion.families.common import Family, HfConfig, Model
from conversion.families.settings import check_settings

# `bias` and `qkv_bias` are spellings of finetunes that vLLM reads.
_SUPPORTED = decoder.COMMON_SUPPORTED | {"mlp_bias": (False, None), "bias": (False, None), "qkv_bias": (False, None)}


def _decoder(hf_config: HfConfig) -> decoder.Decoder:
    check_settings(hf_config, _SUPPORTED)
    return decoder.Decoder.of(hf_config)


def model(hf_config: HfConfig, padded_vocabulary: int | None = None) -> Model:
    """The rules of a config.json."""
    return decoder.build_model(_decoder(hf_config), padded_vocabulary)


def megatron_arguments(hf_config: HfConfig) -> dict[str, dict[str, object]]:
    """Arguments of TransformerConfig and GPTModel that follow from config.json."""
    return decoder.megatron_arguments(_decoder(hf_config))


FAMILY = Family(model, megatron_arguments, model_class="gpt", vllm_layers="model.layers.{layer}.")
