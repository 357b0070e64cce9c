# SPDX-License-Identifier: Apache-2.0
"""Groups of keys passed to a library under its own names: known names and values, and those that mrl sets itself."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Literal

import yaml

from mrl.config.errors import REDACTED, NotKnown, Problems, spell
from mrl.config.files import SAFE_LOADER
from mrl.config.schema.megatron import MegatronConfig
from mrl.config.schema.run import RunConfig

Library = Literal[
    "EngineArgs",
    "CompilationConfig",
    "SpeculativeConfig",
    "TransformerConfig",
    "tool_parser",
    "reasoning_parser",
    "CPUAttentionBackend",
]

_ENGINE = "policy.generation.vllm_cfg"
_TABLES = yaml.load(Path(__file__).with_name("arguments.yaml").read_bytes(), Loader=SAFE_LOADER)

KEYS_OF_ENGINE_ARGUMENTS: Mapping[str, str] = _TABLES["engine_keys"]
"""Engine argument -> the key of mrl that it follows from."""
LAYOUT_ARGUMENTS: Mapping[str, object] = _TABLES["engine_layout"]
"""Engine argument on GPUs -> the value under which experts lie as in the checkpoint."""
FIXED_ENGINE_ARGUMENTS: Mapping[str, str] = {
    name: group["reason"] for group in _TABLES["engine_fixed"] for name in group["names"]
}
"""Engine argument with one value that works -> why."""
FIXED_SPECULATIVE_ARGUMENTS: Mapping[str, str] = {
    name: group["reason"] for group in _TABLES["speculative_fixed"] for name in group["names"]
}
"""Field of `speculative_config` with one value that works -> why."""
OVERRIDABLE: frozenset[str] = frozenset(_TABLES["overridable"])
"""Fields of Megatron's TransformerConfig that change how the model is computed, not what."""

UNSAMPLED = (
    "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size",
    "logit_bias", "bad_words", "allowed_token_ids", "min_tokens", "num_beams", "best_of",
)  # fmt: skip
"""Sampling parameters of other libraries, which would draw from a distribution that the trainer does not compute."""
UNSAMPLED_RULE = "rollouts are drawn by temperature, top_p and top_k alone, so that the trainer computes their logprobs"

RESERVED_VARIABLES = re.compile(
    "RAY_.*|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_MAX_CONNECTIONS|MASTER_(ADDR|PORT)|(LOCAL_)?RANK|WORLD_SIZE|PYTHONPATH"
    "|VLLM_ENABLE_V1_MULTIPROCESSING|VLLM_CPU_ATTN_SPLIT_KV|VLLM_PP_LAYER_PARTITION|VLLM_DP_.*"
)
"""Environment variables that place a process or layers, or that mrl needs at its own value."""

DESCRIBED: Mapping[Library, str] = {
    "EngineArgs": "vLLM's engine",
    "CompilationConfig": "vLLM's compilation",
    "SpeculativeConfig": "vLLM's speculation",
    "TransformerConfig": "Megatron's TransformerConfig",
}
_SCALARS = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    dict: "mapping",
    list: "list",
    type(None): "null",
}


def check_arguments(config: RunConfig, problems: Problems) -> None:
    """Checks arguments passed to each library: it knows their names and values, and mrl does not set them itself."""
    megatron, vllm = config.policy.megatron_cfg, config.policy.generation.vllm_cfg
    prefix, given = "policy.generation.vllm_kwargs", config.policy.generation.vllm_kwargs
    for name, value in given.items():
        instead = KEYS_OF_ENGINE_ARGUMENTS.get(name)
        if config.cluster.gpus_per_node == 0 and name == "kv_cache_memory_bytes":
            instead = f"{_ENGINE}.kv_cache_memory_mib"
        if instead is not None:
            problems.add(f"{prefix}.{name}", f"mrl sets it from {instead}", "set that")
        elif (
            name in LAYOUT_ARGUMENTS and value == LAYOUT_ARGUMENTS[name] and type(value) is type(LAYOUT_ARGUMENTS[name])
        ):
            continue
        elif name in FIXED_ENGINE_ARGUMENTS:
            problems.add(f"{prefix}.{name}", FIXED_ENGINE_ARGUMENTS[name], "remove the key")
        else:
            _check_value("EngineArgs", prefix, name, value, problems)
    if isinstance(compilation := given.get("compilation_config"), Mapping):
        for name, value in compilation.items():
            _check_value("CompilationConfig", f"{prefix}.compilation_config", str(name), value, problems)
    if isinstance(speculation := given.get("speculative_config"), Mapping):
        for name, value in speculation.items():
            if name in FIXED_SPECULATIVE_ARGUMENTS:
                problems.add(f"{prefix}.speculative_config.{name}", FIXED_SPECULATIVE_ARGUMENTS[name], "remove the key")
            else:
                _check_value("SpeculativeConfig", f"{prefix}.speculative_config", str(name), value, problems)
    prefix, own = "policy.megatron_cfg.model_overrides", {field.name for field in fields(MegatronConfig)}
    for name, value in megatron.model_overrides.items():
        if name in own:
            problems.add(f"{prefix}.{name}", "it is a key of its own", f"set policy.megatron_cfg.{name}")
        elif name in arguments_of("TransformerConfig") and name not in OVERRIDABLE:
            rule = (
                "it says what is computed, and trainer and engines take that from the model's config.json and "
                "the keys of policy"
            )
            problems.add(f"{prefix}.{name}", rule, f"remove it (overridable are {', '.join(sorted(OVERRIDABLE))})")
        else:
            _check_value("TransformerConfig", prefix, name, value, problems)
    for prefix, variables in (("policy.megatron_cfg", megatron.env_vars), (_ENGINE, vllm.env_vars)):
        for name, value in (variables or {}).items():  # the problems are without values, which may be secrets
            if RESERVED_VARIABLES.fullmatch(name):
                problems.tell(f"{prefix}.env_vars.{name}", None, "mrl sets this variable itself", "remove it")
            elif not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                problems.tell(f"{prefix}.env_vars.{name}", None, "not a name of an environment variable", "correct it")
            elif value == REDACTED:
                key, rule = f"{prefix}.env_vars.{name}", "the value was hidden when this config was saved"
                problems.tell(key, value, rule, f"give it again, or remove it: '~{key}'")
    _check_remote_code("", config, problems)


@functools.cache
def arguments_of(library: Library) -> dict[str, list[str]]:
    """Maps each argument to the kinds of values it takes, as scripts/library_fields.py found them in the library."""
    content = json.loads(Path(__file__).with_name("library_fields.json").read_text(encoding="utf-8"))
    return content[library]["fields"]


def _check_remote_code(key: str, value: object, problems: Problems) -> None:
    """Adds a problem wherever a key would let a library run Python files of a model's folder, in any group or depth."""
    inner: dict[object, object] = {}
    if is_dataclass(value):
        for section in fields(value):
            with suppress(NotKnown):  # of which there is a problem already
                inner[section.name] = getattr(value, section.name)
    elif isinstance(value, Mapping):
        inner = dict(value)
    elif isinstance(value, list):
        inner = dict(enumerate(value))
    for name, setting in inner.items():
        dotted = f"{key}.{name}".lstrip(".")
        if str(name).replace("-", "_") == "trust_remote_code" and setting not in (None, False):
            rule = (
                "mrl runs no Python files of a model's folder; transformers and vLLM have all model types that "
                "it trains"
            )
            problems.tell(dotted, spell(setting), rule, "remove the key")
        _check_remote_code(dotted, setting, problems)


def _check_value(library: Library, prefix: str, name: str, value: object, problems: Problems) -> None:
    known = arguments_of(library)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        way_out = f"the nearest is {near[0]}" if near else "leave it out"
        if library == "EngineArgs" and name in UNSAMPLED:
            way_out = f"{UNSAMPLED_RULE}: leave it out"
        problems.add(f"{prefix}.{name}", f"no argument of {DESCRIBED[library]}", way_out)
        return
    own = {
        _SCALARS.get(type(value)),
        "number" if type(value) is int else None,
        f"={value}" if isinstance(value, str | int) else None,
    }
    if own.isdisjoint(known[name]):
        kinds = [kind.removeprefix("=") for kind in known[name]]
        problems.add(f"{prefix}.{name}", f"not a value of {DESCRIBED[library]}'s argument", f"use {' or '.join(kinds)}")
