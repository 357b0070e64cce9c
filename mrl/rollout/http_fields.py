# SPDX-License-Identifier: Apache-2.0
"""Field types of HTTP requests: finds a field of the wrong type before any code reads it. Needs no vLLM."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from mrl.rollout.http_gate import texts_of

MAX_PLACES = 3
"""Places that a refusal names, of all that are wrong."""
_Count = Annotated[int, Field(ge=0)]


class Asked(BaseModel):
    """Fields of a request that mrl itself reads, with OpenAI's types."""

    model_config = ConfigDict(extra="allow")

    messages: list[dict[str, Any]] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    logprobs: bool | _Count | None = None
    session_id: str | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


def find_mistake(body: Mapping[str, object], *kinds: type[BaseModel]) -> str:
    """Name of a field that is not of the type that `kinds` give it, with what they want; "" if all are.

    Each field is checked alone: validators of a whole request assume the types of its fields, and fail elsewhere.
    """
    for name, value in body.items():
        if any(printable(text) != text for text in texts_of({name: value}, with_keys=True) if not text.isascii()):
            return f"{printable(name)}: has half of a character, a lone surrogate of Unicode; send whole characters"
        for kind in kinds:
            if (adapter := _adapters(kind).get(name)) is not None and (mistake := _mistake_of(name, value, adapter)):
                return mistake
    return ""


def described(error: ValidationError, value: object, place: Sequence[str | int] = ()) -> str:
    """Lists the first wrong places in `value`, which stands at `place`, each with the rule that it breaks."""
    found: dict[str, str] = {}
    errors = error.errors(include_url=False, include_input=False)
    # A wrong tag says only that a branch of a union is not the one that was meant.
    for one in sorted(errors, key=lambda one: one["type"] == "literal_error"):
        where = ".".join(map(str, (*place, *_keys(one["loc"], value, is_missing=one["type"] == "missing"))))
        found.setdefault(where, one["msg"].removeprefix("Value error, "))
    places = list(found.items())[:MAX_PLACES]
    return printable("; ".join(f"{where}: {rule}" if where else rule for where, rule in places))


def naming(words: str, body: Mapping[str, object]) -> str:
    """A refusal with the field that it means: words that name none are of who renders or reads the request's text."""
    if set(re.findall(r"\w+", words)) & (body.keys() - {"model"}):
        return words
    return f"{'messages' if 'messages' in body else 'prompt'}: {words}"


def printable(text: str) -> str:
    """The text as UTF-8 can hold it."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@cache
def _adapters(kind: type[BaseModel]) -> dict[str, TypeAdapter[Any]]:
    fields = kind.model_fields.items()
    # Annotations that are known at run time alone.
    return {name: TypeAdapter(Annotated[field.annotation, field]) for name, field in fields}  # pyright: ignore[reportInvalidTypeForm, reportArgumentType]


def _mistake_of(name: str, value: object, adapter: TypeAdapter[Any]) -> str:
    try:
        return next(_mistakes_inside(adapter.validate_python(value), value, (name,)), "")
    except ValidationError as error:
        return described(error, value, (name,))
    except Exception as error:  # vLLM's validators of one field raise what they like
        return f"{name}: {error}"


def _mistakes_inside(checked: object, value: object, place: tuple[str | int, ...]) -> Iterator[str]:
    """Mistakes in what pydantic checks only when it is read: OpenAI's types of messages have `Iterable` for lists."""
    if isinstance(checked, Mapping):
        for key, item in checked.items():
            yield from _mistakes_inside(item, value[key] if isinstance(value, Mapping) else None, (*place, key))
    elif isinstance(checked, list):
        for index, item in enumerate(checked):
            yield from _mistakes_inside(item, value[index] if isinstance(value, list) else None, (*place, index))
    elif isinstance(checked, Iterator):
        if not isinstance(value, list):
            yield f"{'.'.join(map(str, place))}: must be a list"
            return
        try:
            items = list(checked)
        except ValidationError as error:
            yield described(error, value, place)
        else:
            yield from _mistakes_inside(items, value, place)


def _keys(loc: Sequence[str | int], value: object, *, is_missing: bool) -> list[str | int]:
    """The keys and indices of a place, without the names that pydantic gives to the branches of a union."""
    keys: list[str | int] = []
    for number, key in enumerate(loc):
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            value = value[key]
        elif not (is_missing and number == len(loc) - 1):
            continue
        keys.append(key)
    return keys
