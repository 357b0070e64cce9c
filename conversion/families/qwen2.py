"""qwen2: dense decoders with biases on query, key and value (Qwen2, Qwen2.5)."""

from __future__ import annotations

from conversion.families import decoder
from conversion.families.common import Family, HfConfig, Model
from conversion.families.settings import check_settings

# In qwen2, `attention_bias` is not a setting: the biases are always there.
_SUPPORTED = decoder.COMMON_SUPPORTED | {"attention_bias": (True, None)}


def _decoder(hf_config: HfConfig) -> decoder.Decoder:
    check_settings(hf_config, _SUPPORTED)
    found = decoder.Decoder.of(hf_config, qkv_bias=True)
    if found.head_dim * found.num_heads != found.hidden:
        raise ValueError(f"config.json: head_dim={found.head_dim} is not supported for qwen2; vLLM has hidden_size / num_attention_heads")
    return found


def model(hf_config: HfConfig, padded_vocabulary: int | None = None) -> Model:
    """The rules of a config.json."""
    return decoder.build_model(_decoder(hf_config), padded_vocabulary)


def megatron_arguments(hf_config: HfConfig) -> dict[str, dict[str, object]]:
    """Arguments of TransformerConfig and GPTModel that follow from config.json."""
    return decoder.megatron_arguments(_decoder(hf_config))


FAMILY = Family(model, megatron_arguments, model_class="gpt", vllm_layers="model.layers.{layer}.")
