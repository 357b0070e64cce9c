"""Which family converts which Hugging Face model_type."""

from __future__ import annotations

from conversion.families import deepseek_v3, nemotron_h
from conversion.families.common import Family
from conversion.families.decoders import DECODERS
from conversion.families.settings import HfConfig

MAX_LAYERS = 1000
MAX_EXPERTS = 200_000
"""Of all layers together: ten times those of the largest published models. Each is a tensor or more of every table here."""
_EXPERT_KEYS = ("n_routed_experts", "num_local_experts", "num_experts")

FAMILIES = {"deepseek_v3": deepseek_v3.FAMILY, "nemotron_h": nemotron_h.FAMILY} | DECODERS


def family(hf_config: HfConfig) -> Family:
    """The family of a config.json.

    Raises:
        ValueError: the model_type is not supported, or it has more layers or experts than any model.
    """
    model_type = hf_config.get("model_type")
    found = FAMILIES.get(str(model_type))
    if found is None:
        raise ValueError(f"config.json: model_type={model_type!r} is not supported; use one of {sorted(FAMILIES)}")
    layers = hf_config.get("num_hidden_layers") or len(str(hf_config.get("hybrid_override_pattern") or ""))
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise ValueError(f"config.json: num_hidden_layers={layers} is more than {MAX_LAYERS}; give the config.json of a model")
    for key in _EXPERT_KEYS:
        experts = hf_config.get(key)
        if isinstance(experts, int) and isinstance(layers, int) and experts * max(layers, 1) > MAX_EXPERTS:
            raise ValueError(
                f"config.json: {key}={experts} in {layers} layers are more than {MAX_EXPERTS:,} experts; give the config.json of a model"
            )
    return found
