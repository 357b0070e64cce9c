"""qwen3: dense decoders with norms on query and key (Qwen3-0.6B to 32B)."""

from __future__ import annotations

from conversion.families import decoder
from conversion.families.common import Family, HfConfig, Model
from conversion.families.settings import check_settings

# transformers' default, whatever the hidden size.
_HEAD_DIM = 128


def _decoder(hf_config: HfConfig) -> decoder.Decoder:
    check_settings(hf_config, decoder.COMMON_SUPPORTED)
    return decoder.Decoder.of(hf_config, head_dim=_HEAD_DIM, qk_norm=True)


def model(hf_config: HfConfig, padded_vocabulary: int | None = None) -> Model:
    """The rules of a config.json."""
    return decoder.build_model(_decoder(hf_config), padded_vocabulary)


def megatron_arguments(hf_config: HfConfig) -> dict[str, dict[str, object]]:
    """Arguments of TransformerConfig and GPTModel that follow from config.json."""
    return decoder.megatron_arguments(_decoder(hf_config))


FAMILY = Family(model, megatron_arguments, model_class="gpt", vllm_layers="model.layers.{layer}.")
