# SPDX-License-Identifier: Apache-2.0
"""Checked access to the fields of a row: texts, conversations, calls of tools. A `RowError` says what is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import date, time
from decimal import Decimal
from uuid import UUID

import numpy as np

MAX_LINE_BYTES = 16 << 20
SHAREGPT_ROLES = {"system": "system", "human": "user", "gpt": "assistant", "tool": "tool", "observation": "tool"}
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "environment")
LEADING = ("system", "developer")
REQUEST = "responses_create_params"
"""Key of a NeMo Gym row's request to the Responses API."""
MEDIA = ("images", "image", "videos", "video", "audios", "audio")
"""Refused on messages, unless empty."""
Fields = dict[str, object]
Message = dict[str, object]
"""`role`, `content` (a text, or None with tool calls), and what else OpenAI's chat format gives a message, e.g.
`tool_calls`.
"""


class RowError(Exception):
    """A fault of one row."""


class EndlessRow(Exception):
    """A row on which the chat template takes more time than any row needs.

    It ends the reading, as others would take as long.
    """


def json_object(line: bytes) -> Fields:
    """The object in a line of JSON. Raises RowError if there is none."""
    if len(line) > MAX_LINE_BYTES:
        raise RowError(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
    if b"\0" in line:
        raise RowError(f"NUL byte at column {line.index(0) + 1}")
    try:
        fields = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowError(f"invalid UTF-8 at byte {error.start + 1}: {error.reason}") from error
    except json.JSONDecodeError as error:
        raise RowError(f"invalid JSON at column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise RowError("invalid JSON: nested too deeply") from error
    except ValueError as error:  # a number of more digits than Python converts
        raise RowError(f"invalid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RowError(f"a row must be a JSON object, not {type(fields).__name__}")
    return fields


def as_json(value: object, name: str) -> object:
    """`value` in the types of JSON, the one way for tables and functions of the user; errors call it `name`.

    Bytes are text in UTF-8, dates and times are ISO 8601, a decimal is the number that equals it, and an array of NumPy
    is a list.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise RowError(f"{name} has the key {odd[0]!r:.100}, and keys of JSON are texts; write it as text")
        return {key: as_json(entry, f"{name}.{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(entry, f"{name}[{index}]") for index, entry in enumerate(value)]
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RowError(
                f"{name} is binary, and no text in UTF-8 ({error.reason} at byte {error.start + 1}); remove it"
            ) from error
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biufU":
        return value.tolist()
    if isinstance(value, date | time) and value == value:  # pandas' missing date equals nothing
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, Decimal) and value.is_finite():
        for number in (int(value), float(value)):
            if Decimal(repr(number)) == value:
                return number
    raise RowError(
        f"{name} is {value!r:.100}, a {type(value).__name__}, for which JSON has no form; write it as text or "
        "number, or remove it"
    )


def text_of(fields: Fields, keys: Sequence[str]) -> str:
    """The text under the first of `keys` that is there, with white space; RowError if blank. Numbers count as text."""
    return first_text(fields, keys)[1]


def first_text(fields: Fields, keys: Sequence[str], setting: str = "") -> tuple[str, str]:
    """The first of `keys` that is there and its text; errors as `first_key` and `checked_text` have them."""
    key = first_key(fields, keys, setting)
    return key, checked_text(fields[key], key)


def optional_text(fields: Fields, key: str) -> str | None:
    """The text under `key`, without surrounding white space; None if it is absent or null."""
    return None if fields.get(key) is None else text_of(fields, (key,)).strip()


def first_key(fields: Fields, keys: Sequence[str], setting: str = "") -> str:
    """The first of `keys` that is there and not null. RowError: none is; names the setting that chooses another."""
    key = next((key for key in keys if fields.get(key) is not None), None)
    if key is None:
        way = f"; {setting} names another" if setting else ""
        if null := [key for key in keys if key in fields]:
            raise RowError(f"{' and '.join(null)}: null, so there is none{way}")
        raise RowError(
            f"no key {' or '.join(keys)} (the row has {', '.join(map(repr, sorted(fields)[:8])) or 'none'}){way}"
        )
    return key


def checked_text(value: object, name: str) -> str:
    """`value` as a text of more than white space; errors call it `name`."""
    text = plain_text(value, name)
    if not text.strip():
        raise RowError(f"{name} is empty")
    return text


def plain_text(value: object, name: str) -> str:
    """`value` as a text, unchanged; numbers count as text, in full, as people write them: 0.00001, not 1e-05."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RowError(f"{name} is {value}, as tables write where nothing was given; give a text or a number")
        value = format(Decimal(repr(value)), "f")
    elif isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise RowError(f"{name} must be a string, not {type(value).__name__}")
    if "\0" in value:
        raise RowError(f"{name} contains a NUL character")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(f"{name} contains half of a surrogate pair") from error
    return value


def said(role: str, text: str) -> Message:
    """Makes a message of this role."""
    return {"role": role, "content": text}


def is_conversation(value: object) -> bool:
    """True if a value is a conversation: a list, or the JSON text of messages, as tables store it."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return isinstance(value, list)
    entries = _parsed(value)
    return isinstance(entries, list) and all(
        isinstance(entry, dict) and entry.keys() & {"role", "from"} for entry in entries
    )


def messages_of(value: object, name: str) -> list[Message]:
    """A conversation: list of objects with role and content, or ShareGPT's from and value; not empty. May be JSON text.

    Joins contents in parts; they may only be texts.
    """
    if isinstance(value, str):
        value = _parsed(value)
    if not isinstance(value, list) or not value:
        raise RowError(f"{name} must be a list of messages, not {_kind(value)}")
    return [message_of(entry, f"{name}[{index}]") for index, entry in enumerate(value)]


def message_of(entry: object, name: str) -> Message:
    """Reads one message of a conversation; see `messages_of`."""
    if not isinstance(entry, dict):
        raise RowError(f"{name} must be an object with role and content, not {_kind(entry)}")
    if "role" not in entry and isinstance(entry.get("from"), str):
        rest = {key: part for key, part in entry.items() if key not in ("from", "value")}
        entry = rest | {"role": SHAREGPT_ROLES.get(entry["from"], entry["from"]), "content": entry.get("value")}
    role, content, calls = entry.get("role"), entry.get("content"), entry.get("tool_calls")
    if role not in ROLES:
        raise RowError(f"{name}.role is {role!r}; use one of {', '.join(ROLES)}")
    if entry.get("function_call"):  # as OpenAI's format had it before tools
        calls = [{"type": "function", "function": entry["function_call"]}]
    if content is None and not calls:
        raise RowError(f"{name} has no content")
    if media := [key for key in MEDIA if entry.get(key)]:
        raise RowError(f"{name} has {media[0]}; only text is supported")
    message: Message = {
        key: value for key, value in entry.items() if value is not None and key not in ("tool_calls", "function_call")
    }
    message |= {"role": role, "content": None if content is None else content_text(content, f"{name}.content")}
    if calls:
        message["tool_calls"] = calls_of(calls, name)
    return message


def calls_of(calls: object, name: str) -> list[Fields]:
    """Calls of tools. Their arguments are an object, or one as JSON text."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RowError(f"{name}.tool_calls must be a list of objects, not {_kind(calls)}")
    kept = []
    for call in calls:
        call = {key: value for key, value in call.items() if value is not None}
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(f"{name}.tool_calls: a call has no function.name")
        try:
            arguments = function.get("arguments") or {}
            if not isinstance(json.loads(arguments) if isinstance(arguments, str) else arguments, dict):
                raise ValueError("not an object")
        except ValueError as error:
            raise RowError(
                f"{name}.tool_calls: the arguments of {function['name']} are no JSON object ({error}); correct them"
            ) from error
        kept.append(call)
    return kept


def content_text(content: object, name: str) -> str:
    """The text of a message's content, which is a text or a list of parts of text."""
    if not isinstance(content, list):
        return plain_text(content, name)
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise RowError(f"{name}[{index}] is {kind}; only text is supported")
        texts.append(plain_text(text, f"{name}[{index}]"))
    return "".join(texts)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _kind(value: object) -> str:
    return "empty" if value == [] else "missing" if value is None else type(value).__name__


def agent_of(fields: Fields) -> str | None:
    """`agent_ref.name` of a row, if it has one. RowError: it is no string."""
    agent = fields.get("agent_ref")
    name = agent.get("name") if isinstance(agent, dict) else None
    if name is not None and not isinstance(name, str):
        raise RowError("agent_ref.name must be a string")
    return name
