# SPDX-License-Identifier: Apache-2.0
"""Families by Hugging Face model_type. Those of plain transformer decoders are a function each, reading config.json."""

from __future__ import annotations

import functools
import importlib.metadata
import json
from dataclasses import replace

from conversion.families import deepseek_v3, glm4_moe, gpt_oss, nemotron_h, qwen2_moe, qwen3_5, qwen3_next
from conversion.families.common import Family, Model
from conversion.families.decoder import (
    COMMON_SUPPORTED,
    Decoder,
    Moe,
    decoder_family,
    softmax_experts,
    with_whole_heads,
)
from conversion.families.settings import (
    HfConfig,
    Settings,
    check_settings,
    known_keys,
    positive_integer,
    refuse_unread,
    softmax_router,
)

ENTRY_POINT_GROUP = "mrl.families"
MAX_LAYERS = 1000
MAX_EXPERTS = 200_000
"""Limit for all layers together: ten times the largest published models. Each expert is one or more tensors of every
table here.
"""
_EXPERT_KEYS = ("n_routed_experts", "num_local_experts", "num_experts")

_WITH_IMAGES = ("qwen3_5", "qwen3_5_moe")
_ONLY_IN_CODE = {"kimi_k2": "deepseek_v3"}
"""Names that only the Python code of published folders knows -> the family that the model is."""

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
    return with_whole_heads(Decoder.of(hf_config, qkv_bias=True, has_window_switch=True))


def qwen3(hf_config: HfConfig) -> Decoder:
    """Dense decoders with norms on query and key (Qwen3-0.6B to 32B)."""
    check_settings(hf_config, COMMON_SUPPORTED)
    return Decoder.of(hf_config, head_dim=_QWEN3_HEAD_DIM, qk_norm=True, has_window_switch=True)


def qwen3_moe(hf_config: HfConfig) -> Decoder:
    """qwen3 with softmax-routed gated experts (Qwen3-30B-A3B, 235B-A22B)."""
    # vLLM builds a shared expert for this key, which transformers does not know.
    check_settings(hf_config, COMMON_SUPPORTED | {"shared_expert_intermediate_size": (0, None)})
    return Decoder.of(hf_config, qk_norm=True, moe=softmax_experts(hf_config), has_window_switch=True)


_FAMILIES: dict[str, Family] = {
    "deepseek_v3": deepseek_v3.FAMILY,
    "glm4_moe": glm4_moe.FAMILY,
    "gpt_oss": gpt_oss.FAMILY,
    "nemotron_h": nemotron_h.FAMILY,
    "qwen2_moe": qwen2_moe.FAMILY,
    "qwen3_5_moe_text": qwen3_5.WITH_EXPERTS,
    "qwen3_5_text": qwen3_5.DENSE,
    "qwen3_next": qwen3_next.FAMILY,
} | {read.__name__: decoder_family(read) for read in (llama, qwen2, qwen3)}
_FAMILIES |= {read.__name__: replace(decoder_family(read), has_ends_everywhere=True) for read in (mixtral, qwen3_moe)}


def _checked(model_type: str, found: Family) -> Family:
    """The family with transformers' values for keys that config.json lacks, and without keys that only others read."""
    known = known_keys()
    keys = known[model_type]
    off = {**known["engine"], **keys["off"]}

    @functools.lru_cache(maxsize=16)
    def check(config_key: str) -> None:
        values = json.loads(config_key)
        settings = Settings(values, keys["defaults"])
        found.model(settings, None)
        found.megatron_arguments(settings)
        # transformers keeps both names in one place, so the one that stands last counts.
        for alias, name in keys["aliases"].items():
            if alias in values and name in values and values[alias] != values[name]:
                raise ValueError(
                    f"config.json: {alias}={values[alias]!r} and {name}={values[name]!r} are one setting of "
                    f"{model_type}; leave out one"
                )
            settings.read |= {alias} if name in values else set()
        refuse_unread(values, settings.read, off, of=model_type)

    def model(hf_config: HfConfig, padded_vocabulary: int | None) -> Model:
        check(json.dumps(hf_config, sort_keys=True))
        return found.model(Settings(hf_config, keys["defaults"]), padded_vocabulary)

    def megatron_arguments(hf_config: HfConfig) -> dict[str, dict[str, object]]:
        check(json.dumps(hf_config, sort_keys=True))
        return found.megatron_arguments(Settings(hf_config, keys["defaults"]))

    return replace(found, model=model, megatron_arguments=megatron_arguments)


FAMILIES = {model_type: _checked(model_type, found) for model_type, found in _FAMILIES.items()}


@functools.cache
def installed_family(model_type: str) -> Family | None:
    """The family of this name that an installed package offers under the entry point group `mrl.families`."""
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=model_type):
        try:
            found = point.load()
        except Exception as error:  # importing a module runs the user's code
            raise ValueError(
                f"entry point {point.value} of {ENTRY_POINT_GROUP}: {type(error).__name__}: {error}"
            ) from error
        if isinstance(found, Family):
            return found
        raise ValueError(
            f"entry point {point.value} of {ENTRY_POINT_GROUP} is a {type(found).__name__}; make it a "
            "conversion.families.common.Family, for example decoder_family(read) of a function read(hf_config) -> "
            "Decoder"
        )
    return None


def family(hf_config: HfConfig) -> Family:
    """The family of a config.json."""
    model_type = hf_config.get("model_type")
    if model_type in _WITH_IMAGES:
        raise ValueError(
            f"config.json: model_type={model_type!r} is a text model with a vision tower, which mrl does not train; "
            "save the text model alone: AutoModelForCausalLM.from_pretrained(FOLDER, dtype='auto').save_pretrained("
            "NEW_FOLDER, save_original_format=False), and its tokenizer"
        )
    if (known := _ONLY_IN_CODE.get(str(model_type))) is not None:
        raise ValueError(
            f"config.json: model_type={model_type!r} is a name for {known!r} that transformers does not know, and mrl "
            f"runs no code of a model's folder; write {known!r}"
        )
    found = FAMILIES.get(str(model_type)) or installed_family(str(model_type))
    if found is None:
        raise ValueError(
            f"config.json: model_type={model_type!r} is not supported; use one of {sorted(FAMILIES)}, or add a "
            "family of your own"
        )
    layers = hf_config.get("num_hidden_layers") or len(str(hf_config.get("hybrid_override_pattern") or ""))
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise ValueError(
            f"config.json: num_hidden_layers={layers} is more than {MAX_LAYERS}; give the config.json of a model"
        )
    for key in _EXPERT_KEYS:
        experts = hf_config.get(key)
        if isinstance(experts, int) and isinstance(layers, int) and experts * max(layers, 1) > MAX_EXPERTS:
            raise ValueError(
                f"config.json: {key}={experts} in {layers} layers are more than {MAX_EXPERTS:,} experts; give the "
                "config.json of a model"
            )
    return found
