"""Rules of the engines' HTTP servers."""

from __future__ import annotations

import difflib
import os

from mrl.config.errors import Unprovided
from mrl.config.passthrough import Library, arguments_of
from mrl.config.rules.ranges import spell
from mrl.config.schema.generation import GenerationConfig

PARSERS_OF_MODELS = {"nemotron_json": "NVIDIA-Nemotron-Nano-9B-v2 and -12B-v2"}
"""Names that plugins in the repositories of models register, and these models."""

_PREFIX = "policy.generation.vllm_cfg"


def find_server_problems(generation: GenerationConfig) -> list[str]:
    """What is wrong with the keys of the HTTP servers, if engines have them."""
    vllm_cfg = generation.vllm_cfg
    if not vllm_cfg.expose_http_server:
        return []
    chat, problems = vllm_cfg.http_server_serving_chat_kwargs, []
    if chat.enable_auto_tools and chat.tool_parser is None:
        problems.append(
            f"{_PREFIX}.http_server_serving_chat_kwargs.enable_auto_tools=true: calls of tools are found by a tool_parser; "
            "name one beside it, for example qwen3_coder"
        )
    problems += _parser("tool_parser", chat.tool_parser, vllm_cfg.tool_parser_plugin)
    problems += _parser("reasoning_parser", chat.reasoning_parser, vllm_cfg.reasoning_parser_plugin)
    low, high = generation.port_range_low, generation.port_range_high
    if low >= high:
        rule = f"must be below policy.generation.port_range_high={high}"
        problems.append(f"policy.generation.port_range_low={low}: {rule}; change one of them")
    return problems


def _parser(kind: Library, name: str | None, plugin: str | None) -> list[str]:
    if plugin is not None and plugin.endswith(".py") and not os.path.isfile(plugin):
        return [f"{_PREFIX}.{kind}_plugin={plugin}: no such file in {os.getcwd()}; correct the path"]
    known = arguments_of(kind)
    if name is None or name in known or plugin is not None:
        return []
    setting = f"{_PREFIX}.http_server_serving_chat_kwargs.{kind}={spell(name)}"
    if name in PARSERS_OF_MODELS:
        return [Unprovided(f"{setting}: its file comes with {PARSERS_OF_MODELS[name]}; name the file in {_PREFIX}.{kind}_plugin")]
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    rule = f"vLLM has no parser of that name, the nearest is {nearest}"
    return [f"{setting}: {rule}; correct it, or name its file in {kind}_plugin"]
