# SPDX-License-Identifier: Apache-2.0
"""Tool calls in the formats that models write, by the names of vLLM's parsers, which need vLLM and a tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mrl.envs.task import DEFAULT_TOOL_PARSER, RowFault

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
    """Reason why it cannot be carried out; then name and arguments are as far as they could be read."""


Types = Mapping[str, Mapping[str, object]]
"""Types that a row declares, by tool and argument."""


def declared_tools(fields: Mapping[str, object]) -> list[object]:
    """The tools of a row, from its own fields or its NeMo Gym request."""
    request = fields.get("responses_create_params")
    tools = fields.get("tools") or (request.get("tools") if isinstance(request, dict) else None)
    return tools if isinstance(tools, list) else []


def tool_calls(text: str, tools: Sequence[object] = (), parser: str = DEFAULT_TOOL_PARSER) -> list[ToolCall]:
    """A text's calls, in order, broken ones with errors. XML arguments get the types that the row's `tools` declare.

    `tools` as OpenAI's Responses or Chat Completions declare them; a RowFault says that nobody here reads the format of
    `parser`.
    """
    if parser not in READERS:
        raise RowFault(
            f"calls of tools in the format of tool_parser={parser} cannot be read; use one of {', '.join(READERS)}"
        )
    plain = [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in tools]
    types = dict[str, Mapping[str, object]]()
    for tool in plain:
        if isinstance(tool, dict):
            parameters = tool.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            schemas = properties.items() if isinstance(properties, dict) else ()
            types[str(tool.get("name"))] = {
                key: schema.get("type") for key, schema in schemas if isinstance(schema, dict)
            }
    try:
        return READERS[parser](text, types)
    except (ValueError, RecursionError) as error:
        return [ToolCall("", {}, error=f"not a call: no JSON: {error}")]


def _call(block: str, types: Types) -> ToolCall:
    found = FUNCTION.fullmatch(block)
    if found is None:
        return ToolCall(
            "",
            {},
            error="not a call: write <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>",
        )
    name, body = found.groups()
    arguments: dict[str, object] = {}
    position, has_other = 0, False
    while (opened := PARAMETER.search(body, position)) and (end := body.find(END_OF_PARAMETER, opened.end())) >= 0:
        key, value = opened[1], body[opened.end() : end].removeprefix("\n").removesuffix("\n")
        has_other = has_other or not body[position : opened.start()].isspace() and position < opened.start()
        position = end + len(END_OF_PARAMETER)
        kind = types.get(name, {}).get(key)
        try:
            arguments[key] = (
                value if kind in (None, "string") else json.loads(value.lower() if kind == "boolean" else value)
            )
        except (ValueError, RecursionError):
            return ToolCall(name, arguments, error=f"argument {key}: {value!r:.100} is no {kind}")
    if has_other or body[position:].strip():
        return ToolCall(name, arguments, error="text outside of the parameters")
    return ToolCall(name, arguments)


def _json_calls(entries: Sequence[object], keys: Sequence[str] = ("arguments",)) -> list[ToolCall]:
    """Reads calls that are objects with a name and arguments. As in vLLM, one malformed call discards all."""
    calls = []
    for entry in entries:
        key = next((key for key in keys if isinstance(entry, dict) and key in entry), None)
        if not isinstance(entry, dict) or key is None or not isinstance(entry.get("name"), str):
            return [ToolCall("", {}, error=f"not a call: {entry!r:.100} has no name or no {keys[0]}")]
        calls.append(_with_arguments(entry["name"], entry[key]))
    return calls


def _with_arguments(name: str, arguments: object) -> ToolCall:
    if isinstance(arguments, dict):
        return ToolCall(name, arguments)
    return ToolCall(name, {}, error=f"not a call: the arguments {arguments!r:.100} of {name} are no object")


def _hermes(text: str, types: Types) -> list[ToolCall]:
    return _json_calls([json.loads(inside.partition("</tool_call>")[0]) for inside in text.split("<tool_call>")[1:]])


def _nemotron_json(text: str, types: Types) -> list[ToolCall]:
    """Reads the first list of calls; skips objects in it that are no calls."""
    block, mark, _ = text.partition("<TOOLCALL>")[2].partition("</TOOLCALL>")
    if not mark:
        return []
    block = block.strip()
    entries = json.loads(f"{'' if block.startswith('[') else '['}{block}{'' if block.endswith(']') else ']'}")
    good = [entry for entry in entries if isinstance(entry, dict) and {"name", "arguments"} <= entry.keys()]
    return _json_calls(
        [
            {**one, "arguments": json.loads(one["arguments"])} if isinstance(one["arguments"], str) else one
            for one in good
        ]
    )


def _llama_json(text: str, types: Types) -> list[ToolCall]:
    """Reads objects with a name anywhere in the text; any other brace discards all."""
    entries, position = list[object](), text.find("{")
    while position >= 0:
        try:
            entry, end = json.JSONDecoder().raw_decode(text, position)
        except (ValueError, RecursionError):
            return []
        entries.append(entry)
        position = text.find("{", end)
    calls = _json_calls(entries, ("arguments", "parameters"))
    return [] if any(not call.name for call in calls) else calls


def _mistral(text: str, types: Types) -> list[ToolCall]:
    """Reads a list of objects after the mark (until v7), or a name and an object after each mark (since v11)."""
    calls = []
    for part in map(str.strip, text.split("[TOOL_CALLS]")[1:]):
        if part.startswith(("[", "{")):
            entries, _ = json.JSONDecoder().raw_decode(part)
            calls += _json_calls(entries if isinstance(entries, list) else [entries])
            continue
        name, _, rest = part.partition("{")
        arguments, _ = json.JSONDecoder().raw_decode("{" + rest)
        calls.append(_with_arguments(name.replace("[ARGS]", "").strip(), arguments))
    return calls


def _xml(text: str, types: Types) -> list[ToolCall]:
    return [_call(block, types) for block in BLOCK.findall(text)]


READERS: Mapping[str, Callable[[str, Types], list[ToolCall]]] = {
    **dict.fromkeys(("qwen3_coder", "qwen3_xml"), _xml),
    **dict.fromkeys(("hermes", "qwen3_json"), _hermes),
    "nemotron_json": _nemotron_json,
    **dict.fromkeys(("llama3_json", "llama4_json"), _llama_json),
    "mistral": _mistral,
}
"""Parsers by their name in vLLM; `mrl.config.schema.env` lists the names."""
