# SPDX-License-Identifier: Apache-2.0
"""Tools and calls without the nulls that tables fill in: `datasets` exports them to JSON lines, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mrl.data.fields import Fields, Message

_DATA = ("default", "const", "enum", "examples")
"""Keywords of JSON Schema whose values are any JSON (draft 2020-12, Validation 6.1 and 9). Under all others a null
means nothing.
"""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are schemas by names, which may be those of keywords."""


def schema_as_written(schema: object) -> object:
    """A tool, or any other schema, without the nulls that no schema has; `default: null` and `const: null` stay."""
    if isinstance(schema, list):
        return [schema_as_written(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            value = {name: schema_as_written(part) for name, part in value.items() if part is not None}
        if key in _DATA or value is not None:
            kept[key] = value if key in _DATA or key in _NAMED else schema_as_written(value)
    return kept


def calls_as_written(messages: Sequence[Message], tools: Sequence[Fields]) -> list[Message]:
    """The messages, their calls without null arguments that the tool lacks. Without properties a tool may have any."""
    functions = [tool.get("function", tool) for tool in tools]
    schemas = {str(entry.get("name")): entry.get("parameters") for entry in functions if isinstance(entry, dict)}

    def written(call: Fields) -> Fields:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
            return call
        shown = function | {"arguments": _known(function["arguments"], schemas.get(str(function.get("name"))))}
        return call | {"function": shown} if "function" in call else shown

    calls = [message.get("tool_calls") for message in messages]
    return [
        message | {"tool_calls": [written(call) for call in entries]} if isinstance(entries, list) else message
        for message, entries in zip(messages, calls, strict=True)
    ]


def _known(value: object, schema: object) -> object:
    known = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(value, dict) or not isinstance(known, dict):
        return value
    return {key: _known(entry, known.get(key)) for key, entry in value.items() if entry is not None or key in known}
