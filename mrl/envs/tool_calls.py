# SPDX-License-Identifier: Apache-2.0
"""Tool calls in the XML that Nemotron 3 and Qwen3-Coder write (vLLM's parser `qwen3_coder`)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|$)", re.DOTALL)
FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^<>]+)>")
END_OF_PARAMETER = "</parameter>"


@dataclass(frozen=True)
class ToolCall:
    """One call."""

    name: str
    arguments: Mapping[str, object]
    error: str = ""
    """Why it cannot be carried out; then name and arguments are as far as they could be read."""


def tool_calls(text: str, tools: Sequence[object] = ()) -> list[ToolCall]:
    """The calls of a text, in order, broken ones with their error. Arguments get the types that the `tools` of the row declare.

    `tools` as OpenAI's Responses or Chat Completions declare them.
    """
    plain = [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in tools]
    types = dict[str, Mapping[str, object]]()
    for tool in plain:
        if isinstance(tool, dict):
            parameters = tool.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            schemas = properties.items() if isinstance(properties, dict) else ()
            types[str(tool.get("name"))] = {key: schema.get("type") for key, schema in schemas if isinstance(schema, dict)}
    return [_call(block, types) for block in BLOCK.findall(text)]


def _call(block: str, types: Mapping[str, Mapping[str, object]]) -> ToolCall:
    found = FUNCTION.fullmatch(block)
    if found is None:
        return ToolCall("", {}, error="not a call: write <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>")
    name, body = found.groups()
    arguments: dict[str, object] = {}
    position, has_other = 0, False
    while (opened := PARAMETER.search(body, position)) and (end := body.find(END_OF_PARAMETER, opened.end())) >= 0:
        key, value = opened[1], body[opened.end() : end].removeprefix("\n").removesuffix("\n")
        has_other = has_other or not body[position : opened.start()].isspace() and position < opened.start()
        position = end + len(END_OF_PARAMETER)
        kind = types.get(name, {}).get(key)
        try:
            # Models write Python's True as well.
            arguments[key] = value if kind in (None, "string") else json.loads(value.lower() if kind == "boolean" else value)
        except (ValueError, RecursionError):
            return ToolCall(name, arguments, error=f"argument {key}: {value!r:.100} is no {kind}")
    if has_other or body[position:].strip():
        return ToolCall(name, arguments, error="text outside of the parameters")
    return ToolCall(name, arguments)
