"""The numbers of a model that config rules need, read from its config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from conversion.families.registry import FAMILIES, family
from conversion.files.reading import read_json
from mrl.config.hub import cached_folder, is_hub_id, is_prepared, model_folder
from mrl.config.overridden import overridden_config
from mrl.config.partial import NotKnown
from mrl.config.schema.policy import PolicyConfig, TokenizerConfig
from mrl.config.schema.run import RunConfig


@dataclass(frozen=True)
class ModelSizes:
    """Sizes that parallel layouts must divide, and what routers have. 0 = the model has no such layer."""

    model_class: Literal["mamba", "gpt"]
    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    num_mamba_heads: int
    num_mamba_groups: int
    num_experts: int
    ffn_size: int
    moe_ffn_size: int
    shared_expert_ffn_size: int
    latent_expert_size: int
    has_expert_bias: bool
    has_dense_mlp: bool
    max_sequence_length: int
    num_parameters: int


def use_local_folders(config: RunConfig) -> None:
    """Puts local folders in place of ids of the Hugging Face Hub; they hold config and tokenizer, and weights only if they did before.

    Raises:
        ValueError: naming the key; an id is not in the local Hugging Face cache and cannot be downloaded.
    """
    for key, holder, name in _models(config):
        try:
            setattr(holder, name, str(model_folder(getattr(holder, name), with_weights=False)))
        except ValueError as error:
            raise ValueError(f"{key}={error}") from error


def use_cached_folders(config: RunConfig) -> None:
    """`use_local_folders` as far as the local Hugging Face cache goes; what is not there stays as it is."""
    for _, holder, name in _models(config):
        with suppress(NotKnown):
            if is_hub_id(model := getattr(holder, name)):
                setattr(holder, name, str(cached_folder(model, with_weights=False) or model))


def _models(config: RunConfig) -> list[tuple[str, PolicyConfig | TokenizerConfig, str]]:
    return [("policy.model_name", config.policy, "model_name"), ("policy.tokenizer.name", config.policy.tokenizer, "name")]


def read_model(folder: Path, overrides: Mapping[str, object] = MappingProxyType({})) -> ModelSizes:
    """Sizes of the model in a Hugging Face folder, for training, with `overrides` in its config.json.

    Raises:
        ValueError: config.json is missing, unreadable, incomplete, or of a model that cannot be trained. Says the way out, not the key.
    """
    path = folder / "config.json"
    try:
        hf_config = read_json(path)
    except (OSError, ValueError) as error:
        way_out = (
            "`python -m mrl.prepare tiny` makes it" if is_prepared(str(folder)) else "give the folder of a Hugging Face model, or its id"
        )
        raise ValueError(f"no readable config.json in this folder ({type(error).__name__}); {way_out}") from error
    if not isinstance(hf_config, dict):
        raise ValueError("config.json is not a mapping; give the folder of a Hugging Face model")
    hf_config = overridden_config(hf_config, overrides)
    found = family(hf_config)
    if not found.can_train:
        trained = sorted(model_type for model_type, known in FAMILIES.items() if known.can_train)
        raise ValueError(
            f"config.json: model_type={hf_config['model_type']!r} can be converted, but not trained; give a model of one of {trained}"
        )
    arguments = found.megatron_arguments(hf_config)
    canonical = found.canonical(hf_config)
    # Mixtures of experts alone may state a width that no layer has.
    has_mlp = any(name.endswith("up_proj.weight") and "expert" not in name for name in canonical)

    def size(name: str) -> int:
        value = (arguments["transformer"] | arguments["model"]).get(name, 0)
        assert isinstance(value, int), name
        return value

    return ModelSizes(
        model_class=found.model_class,
        num_layers=size("num_layers"),
        num_attention_heads=size("num_attention_heads"),
        num_query_groups=size("num_query_groups"),
        num_mamba_heads=size("mamba_num_heads"),
        num_mamba_groups=size("mamba_num_groups"),
        num_experts=size("num_moe_experts"),
        ffn_size=size("ffn_hidden_size") if has_mlp else 0,
        moe_ffn_size=size("moe_ffn_hidden_size"),
        shared_expert_ffn_size=size("moe_shared_expert_intermediate_size"),
        latent_expert_size=size("moe_latent_size"),
        has_expert_bias=bool(arguments["transformer"].get("moe_router_enable_expert_bias", False)),
        has_dense_mlp=_has_dense_mlp(arguments),
        max_sequence_length=size("max_sequence_length"),
        num_parameters=sum(math.prod(shape) for shape in canonical.values()),
    )


def _has_dense_mlp(arguments: dict[str, dict[str, object]]) -> bool:
    pattern, frequencies = arguments["model"].get("hybrid_override_pattern"), arguments["transformer"].get("moe_layer_freq")
    if isinstance(pattern, str):
        return "-" in pattern
    return 0 in frequencies if isinstance(frequencies, list) else "num_moe_experts" not in arguments["transformer"]
