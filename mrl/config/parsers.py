# SPDX-License-Identifier: Apache-2.0
"""vLLM's parsers of tool calls and thoughts, by the marks in a model's chat template."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from conversion.files.hf_folder import read_config
from conversion.files.reading import read_file, read_json
from mrl.config.errors import Problems
from mrl.config.schema.run import RunConfig

CHAT = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"
TOOL_PARSER = f"{CHAT}.tool_parser"

# Marks as the parsers of vLLM 0.32 search for them. A format whose mark begins others' stands after them.
TOOL_CALLS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"<TOOLCALL>", ("nemotron_json",)),
    (r"<｜DSML｜function_calls>", ("deepseek_v32",)),
    (r"<｜DSML｜tool_?calls>", ("deepseek_v4", "deepseek_v41")),
    (r"<｜tool▁calls▁begin｜>(?s:.)*```json", ("deepseek_v3",)),
    (r"<｜tool▁calls▁begin｜>", ("deepseek_v31",)),
    (r"<｜tool_calls_begin｜>", ("step3",)),
    (r"<\|tool_calls_section_begin\|>", ("kimi_k2",)),
    (r"<minimax:tool_call>", ("minimax_m2",)),
    (r"\]<\]minimax\[>\[", ("minimax_m3",)),
    (r"<seed:tool_call>", ("seed_oss",)),
    (r"<longcat_tool_call>", ("longcat",)),
    (r"<dots_function_call>", ("dots",)),
    (r"<start_function_call>", ("functiongemma",)),
    (r"<\|tool_call>", ("gemma4",)),
    (r"<\|tool_call_start\|>", ("lfm2",)),
    (r"<\|tools_prefix\|>", ("apertus",)),
    (r"<\|START_ACTION\|>", ("cohere_command3", "cohere_command4")),
    (r"<\|action_start\|>", ("internlm",)),
    (r"to=functions", ("openai",)),
    (r"\[TOOL_CALLS\]", ("mistral",)),
    (r"<tool_sep|<tool_calls", ()),  # Hunyuan's and Jamba's, which one mark does not tell apart
    (r"<arg_key>", ("glm45", "glm47", "poolside_v1", "ling3")),
    (r"<function_calls>", ("olmo3",)),
    (r"<function=[\s\S]*<parameter=", ("qwen3_coder", "qwen3_xml", "step3p5", "mimo")),
    (r"<tool_call>", ("hermes", "qwen3_json", "granite4", "ernie45")),
    (r"<\|tool_call\|>", ("granite", "phi4_mini_json")),
    (r"<\|python_tag\|>|\"parameters\": ", ("llama3_json", "llama4_json")),
)
"""Mark in a template -> the parsers that read this format, the first of which is chosen. The first mark found
counts.
"""
_THINK = (
    "deepseek_r1 deepseek_v3 ernie45 glm45 glm47 holo2 kimi_k2 mimo minimax_m2 nemotron_v3 olmo3 qwen3 step3 step3p5"
)
THOUGHTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"<seed:think>", ("seed_oss",)),
    (r"\[THINK\]", ("mistral",)),
    (r"<\|channel\|>", ("openai_gptoss",)),
    (r"<\|channel>", ("gemma4",)),
    (r"<\|START_THINKING\|>", ("cohere_command3", "cohere_command4")),
    (r"<think>|</think>", tuple(_THINK.split())),
)
"""The same for thoughts."""
UNTAUGHT = {"nemotron_h": "qwen3_coder"}
"""model_type -> tool parser of the family, for a template that shows the model no tools."""
SIMPLE = "hermes"
"""The same for other families: the parser that needs no token of its own."""


def served_text(config: RunConfig) -> str | None:
    """The chat template of conversations over HTTP; None if its file is not here. Of several templates, that
    for tools.
    """
    chosen = config.policy.generation.vllm_cfg.http_server_serving_chat_kwargs.chat_template
    if chosen is None:
        return ""
    if chosen != "default":
        path = Path(chosen)
        if not chosen.endswith(".jinja"):
            return chosen
        return read_file(path).decode(errors="replace") if path.is_file() else None
    folder = Path(config.policy.tokenizer.name)
    for path in (folder / "additional_chat_templates/tool_use.jinja", folder / "chat_template.jinja"):
        if path.is_file():
            return read_file(path).decode(errors="replace")
    found: object = None
    for name in ("tokenizer_config.json", "chat_template.json"):
        if found is None and (folder / name).is_file() and isinstance(fields := read_json(folder / name), dict):
            found = fields.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("tool_use", named.get("default"))
    return found if isinstance(found, str) else None


def readers(template: str, marks: tuple[tuple[str, tuple[str, ...]], ...]) -> tuple[str, ...]:
    """vLLM's names of the parsers for `template`; empty if no mark identifies one."""
    return next((names for mark, names in marks if re.search(mark, template)), ())


def shows_tools(config: RunConfig) -> bool | None:
    """True if the template of conversations over HTTP reads a request's tools; None if it is not here."""
    template = served_text(config)
    return None if template is None else bool(re.search(r"\btools\b", template))


def tool_parser_of(config: RunConfig) -> str | None:
    """The parser of the tool calls that the model is shown; None if the template is not here, or has another format."""
    template = served_text(config)
    if template is None:
        return None
    if names := readers(template, TOOL_CALLS):
        return names[0]
    if shows_tools(config):
        return None
    with suppress(OSError, ValueError):
        return UNTAUGHT.get(str(read_config(Path(config.policy.model_name) / "config.json").get("model_type")), SIMPLE)
    return SIMPLE


def check_formats(config: RunConfig, problems: Problems) -> None:
    """Checks that the parsers of tool calls and thoughts fit the chat template."""
    vllm = config.policy.generation.vllm_cfg
    chat, template = vllm.http_server_serving_chat_kwargs, None
    if vllm.expose_http_server:
        template = served_text(config)
    if template is None:
        return
    where = f"the chat template of {config.policy.tokenizer.name}"
    if chat.enable_auto_tools and chat.tool_parser is None and tool_parser_of(config) is None:
        rule = f"the format of tool calls in {where} is not known, and a request with tools needs {CHAT}.tool_parser"
        way_out = (
            f"set {CHAT}.enable_auto_tools=true and {CHAT}.tool_parser=NAME, one of vLLM's, or "
            f"{CHAT}.enable_auto_tools=false"
        )
        problems.add(
            f"{CHAT}.tool_parser", rule, f"{way_out} if nobody sends tools", others=[f"{CHAT}.enable_auto_tools"]
        )
    kinds = (("tool_parser", chat.tool_parser, TOOL_CALLS), ("reasoning_parser", chat.reasoning_parser, THOUGHTS))
    for kind, name, marks in kinds:
        known = {reader for _, names in marks for reader in names}
        written = readers(template, marks)
        if name in known and written and name not in written:
            what = "tool calls" if kind == "tool_parser" else "thoughts"
            rule = f"{where} writes {what} in another format, and the parser would find none"
            problems.add(
                f"{CHAT}.{kind}", rule, f"use {written[0]}, or give that format's template in {CHAT}.chat_template"
            )
