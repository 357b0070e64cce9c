"""Rules of the engines and their HTTP servers."""

from __future__ import annotations

import difflib
import os

from mrl.config.errors import Problems, Unprovided
from mrl.config.passthrough import Library, arguments_of
from mrl.config.schema.run import RunConfig

PARSERS_OF_MODELS = {"nemotron_json": "NVIDIA-Nemotron-Nano-9B-v2 and -12B-v2"}
"""Names that plugins in the repositories of models register, and these models."""

_GENERATION, _ENGINE = "policy.generation", "policy.generation.vllm_cfg"


def check_lengths(config: RunConfig, problems: Problems) -> None:
    """Adds a problem if rollouts are longer than the sequences that are trained."""
    total, generation = config.policy.max_total_sequence_length, config.policy.generation
    if generation.max_new_tokens > total:
        rule = f"must be at most policy.max_total_sequence_length={total}, which holds prompt and rollout"
        problems.add(f"{_GENERATION}.max_new_tokens", rule, "lower the one or raise the other")
    if generation.vllm_cfg.max_model_len > total:
        rule = f"must be at most policy.max_total_sequence_length={total}"
        problems.add(f"{_ENGINE}.max_model_len", rule, "leave it out, and it follows the latter")


def check_engines(config: RunConfig, problems: Problems) -> None:
    """Adds a problem for every key of the engines that they cannot follow on these hosts."""
    generation, vllm = config.policy.generation, config.policy.generation.vllm_cfg
    if config.cluster.gpus_per_node == 0 and not vllm.enforce_eager:
        problems.add(f"{_ENGINE}.enforce_eager", "CUDA graphs need GPUs, and cluster.gpus_per_node=0", "set it to true")
    if config.cluster.gpus_per_node == 0 and vllm.kv_cache_dtype != "auto":
        rule = "engines on hosts without GPUs keep keys and values in the model's type, and cluster.gpus_per_node=0"
        problems.add(f"{_ENGINE}.kv_cache_dtype", rule, "set it to auto")
    if vllm.max_num_batched_tokens < vllm.max_num_seqs:
        rule = f"every one of policy.generation.vllm_cfg.max_num_seqs={vllm.max_num_seqs} rollouts needs a token of a step"
        problems.add(f"{_ENGINE}.max_num_batched_tokens", rule, f"use at least {vllm.max_num_seqs}")
    if vllm.load_format == "dummy":
        rule = "the first refit proves the conversion tables on the model's weights, as vLLM's own loader read them"
        problems.add(f"{_ENGINE}.load_format", rule, "leave it out")
    if "" in (generation.stop_strings or ()):
        problems.add(f"{_GENERATION}.stop_strings", "every text ends with an empty one", "leave that out")


def check_servers(config: RunConfig, problems: Problems) -> None:
    """Adds a problem for every key with which the engines' HTTP servers could not start, if there are any."""
    generation, vllm = config.policy.generation, config.policy.generation.vllm_cfg
    if not vllm.expose_http_server:
        return
    chat, prefix = vllm.http_server_serving_chat_kwargs, f"{_ENGINE}.http_server_serving_chat_kwargs"
    if chat.enable_auto_tools and chat.tool_parser is None:
        rule = "a tool_parser finds calls of tools"
        problems.add(f"{prefix}.enable_auto_tools", rule, "name one beside it, for example qwen3_coder")
    _check_parser("tool_parser", chat.tool_parser, vllm.tool_parser_plugin, problems)
    _check_parser("reasoning_parser", chat.reasoning_parser, vllm.reasoning_parser_plugin, problems)
    if generation.port_range_low >= generation.port_range_high:
        rule = f"must be below policy.generation.port_range_high={generation.port_range_high}"
        problems.add(f"{_GENERATION}.port_range_low", rule, "change one of them")


def _check_parser(kind: Library, name: str | None, plugin: str | None, problems: Problems) -> None:
    key, known = f"{_ENGINE}.http_server_serving_chat_kwargs.{kind}", arguments_of(kind)
    if plugin is not None and plugin.endswith(".py") and not os.path.isfile(plugin):
        problems.add(f"{_ENGINE}.{kind}_plugin", f"no such file in {os.getcwd()}", "correct the path")
    elif name is None or name in known or plugin is not None:
        return
    elif name in PARSERS_OF_MODELS:
        problems.add(key, f"its file comes with {PARSERS_OF_MODELS[name]}", f"name the file in {_ENGINE}.{kind}_plugin", Unprovided)
    else:
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        rule = f"vLLM has no parser of that name, the nearest is {nearest}"
        problems.add(key, rule, f"correct it, or name its file in {kind}_plugin")
