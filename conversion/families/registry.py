"""Which family converts which Hugging Face model_type."""

from __future__ import annotations

from conversion.families import deepseek_v3, llama, mixtral, nemotron_h, qwen2, qwen3, qwen3_moe
from conversion.families.common import Family, HfConfig

FAMILIES = {
    "deepseek_v3": deepseek_v3.FAMILY,
    "llama": llama.FAMILY,
    "mixtral": mixtral.FAMILY,
    "nemotron_h": nemotron_h.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
}


def family(hf_config: HfConfig) -> Family:
    """The family of a config.json.

    Raises:
        ValueError: the model_type is not supported.
    """
    model_type = hf_config.get("model_type")
    found = FAMILIES.get(str(model_type))
    if found is None:
        raise ValueError(f"config.json: model_type={model_type!r} is not supported; use one of {sorted(FAMILIES)}")
    return found
