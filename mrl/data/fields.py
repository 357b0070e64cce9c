"""Checked access to the fields of one row: JSON, texts and messages. A `RowError` says what is wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence

MAX_LINE_BYTES = 16 << 20
ROLES = ("system", "developer", "user", "assistant", "tool")
Fields = dict[str, object]
Message = dict[str, object]
"""`role`, `content` (a text, or None beside tool calls), and what else OpenAI's chat format gives a message, e.g. `tool_calls`."""


class RowError(Exception):
    """What is wrong with one row."""


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


def text_of(fields: Fields, keys: Sequence[str]) -> str:
    """The text under the first of `keys` that is there, without surrounding white space; numbers count as text."""
    key = first_key(fields, keys)
    return checked_text(fields[key], key)


def optional_text(fields: Fields, key: str) -> str | None:
    """The text under `key`; None if it is absent or null."""
    return None if fields.get(key) is None else text_of(fields, (key,))


def first_key(fields: Fields, keys: Sequence[str]) -> str:
    """The first of `keys` that is there and not null. Raises RowError if none is."""
    key = next((key for key in keys if fields.get(key) is not None), None)
    if key is None:
        raise RowError(f"no key {' or '.join(keys)} (the row has {', '.join(map(repr, sorted(fields)[:8])) or 'none'})")
    return key


def checked_text(value: object, name: str) -> str:
    """`value` as a text without surrounding white space, which must not be empty; errors call it `name`."""
    text = plain_text(value, name)
    if not text.strip():
        raise RowError(f"{name} is empty")
    return text.strip()


def plain_text(value: object, name: str) -> str:
    """`value` as a text, unchanged; numbers count as text."""
    if isinstance(value, int | float) and not isinstance(value, bool):
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


def messages_of(value: object, name: str) -> list[Message]:
    """A conversation: a list of objects with role and content, at least one. Joins contents in parts; they may only be texts."""
    if not isinstance(value, list) or not value:
        raise RowError(f"{name} must be a list of messages, not {_kind(value)}")
    messages = []
    for index, entry in enumerate(value):
        place = f"{name}[{index}]"
        if not isinstance(entry, dict):
            raise RowError(f"{place} must be an object with role and content, not {_kind(entry)}")
        role, content = entry.get("role"), entry.get("content")
        if role not in ROLES:
            raise RowError(f"{place}.role is {role!r}; use one of {', '.join(ROLES)}")
        if content is None and not entry.get("tool_calls"):
            raise RowError(f"{place} has no content")
        # Tables hold every key that any row has.
        message = {key: value for key, value in entry.items() if value is not None}
        messages.append(message | {"role": role, "content": None if content is None else content_text(content, f"{place}.content")})
    return messages


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


def _kind(value: object) -> str:
    return "empty" if value == [] else "missing" if value is None else type(value).__name__
