# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.keys [NAME ...]`: explains config keys: default, limits, meaning. Also says what NeMo RL's become.

Reads the fields of mrl/config/schema and the strings below them, and the tables of mrl/nemo/dialect.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import logging
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from mrl.config.errors import spell
from mrl.config.fields import Only, Range
from mrl.config.schema.keys import SAME_KEYS, fields_of, section_of
from mrl.config.schema.run import RunConfig
from mrl.config.secrets import start_logging
from mrl.nemo.dialect.rules import REWRITTEN, TEMPLATE_VARIABLES
from mrl.nemo.dialect.tables import (
    BY_RULE,
    DIFFERENT,
    GPU_VALUES,
    NO_EFFECT,
    REFUSED,
    RENAMED,
    SAME_VALUE,
    VALUES,
    Foreign,
)

logger = logging.getLogger(__name__)

WIDTH = 120
NUM_NEAREST = 3


@dataclass(frozen=True)
class Manual:
    """One key as its manual has it; `same_as` names the section whose keys it shares."""

    key: str
    default: str
    kind: str
    meaning: str
    same_as: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code, 2 for a name that no key has."""
    parser = argparse.ArgumentParser(prog="python -m mrl.keys", description="Explain config keys.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="a key, a section, or a part of their names; default: every key of mrl"
    )
    options = parser.parse_args(arguments)
    start_logging(stream=sys.stdout)
    own = {each.key: described(each) for each in all_manuals()}
    known = {**own, **foreign_keys()}
    if not options.names:
        logger.info("%s", "\n".join(own.values()))
        return 0
    for name in options.names:
        found = matching(name, known)
        if not found:
            near = difflib.get_close_matches(name, known, NUM_NEAREST)
            logger.error("%s: no key has this in its name%s", name, f"; the nearest: {', '.join(near)}" if near else "")
            return 2
        logger.info("%s", "\n".join(found))
    return 0


def matching(name: str, known: Mapping[str, str]) -> list[str]:
    """The manuals of a key, of a section's keys, of keys with `name` in theirs, or of what a key is part of."""
    section = [text for key, text in known.items() if key == name or key.startswith(f"{name}.")]
    if found := section or [text for key, text in known.items() if name in key]:
        return found
    parts = name.split(".")
    above = (".".join(parts[:size]) for size in range(len(parts) - 1, 0, -1))
    return next(([known[key]] for key in above if key in known), [])


def described(manual: Manual) -> str:
    """A key's manual as text: key, default and limits on the first line, the meaning below."""
    head = f"{manual.key}: {manual.kind}" if manual.same_as else f"{manual.key}={manual.default}  ({manual.kind})"
    return f"{head}\n{_wrapped(manual.meaning)}"


def _wrapped(text: str) -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent="    ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def foreign_keys() -> dict[str, str]:
    """NeMo RL's keys that the schema lacks, and values with another name here, with what becomes of them."""
    said = {old: f"Here {new}." for old, new in {**RENAMED, **SAME_VALUE}.items()}
    said |= {old: f"Becomes {new} by a rule." for old, new in BY_RULE.items()}
    said |= dict.fromkeys((*REWRITTEN, *TEMPLATE_VARIABLES), "Rewritten by rules of mrl/nemo/dialect/rules.py.")
    said |= {key: f"Without effect: {entry.reason}." for key, entry in NO_EFFECT.items()}
    said |= {key: f"Here, and not in NeMo RL: {entry.reason}{same_values(entry)}." for key, entry in DIFFERENT.items()}
    said |= {key: f"Refused{_other_values(entry)}: {entry.reason}." for key, entry in REFUSED.items()}
    said |= {f"{key}={spell(old)}": f"Here {key}={spell(new)}." for (key, old), new in VALUES.items()}
    said |= {f"{key}={spell(old)}": f"Refused: {entry.reason}." for (key, old), entry in GPU_VALUES.items()}
    return {key: f"{key}  (NeMo RL's)\n{_wrapped(said[key])}" for key in sorted(said)}


def same_values(entry: Foreign) -> str:
    """The values of a key with which NeMo RL does the same, in brackets."""
    return f" (the same at {', '.join(map(spell, entry.same_at))})" if entry.same_at else ""


def _other_values(entry: Foreign) -> str:
    """The values of a key that are refused."""
    if not isinstance(entry.refused, str):
        return f" at {', '.join(map(spell, entry.refused))}"
    return f" but at {', '.join(map(spell, filter(_is_spelt, entry.same)))}" if entry.same else ""


def _is_spelt(value: object) -> bool:
    return value != ""


def all_manuals() -> Iterator[Manual]:
    """The manual of every key of the schema, in its order."""
    for name in fields_of(RunConfig):
        yield from _manuals(RunConfig, name, "")


def manuals(section: type) -> dict[str, str]:
    """The string below each field of a section, and of what it inherits from."""
    if section is object:
        return {}
    (definition,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(definition, ast.ClassDef)
    found = {name: text for base in section.__bases__ for name, text in manuals(base).items()}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            found[field.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return found


def marker_of(hint: object) -> Range | Only | None:
    """The marker of a field's type, through `| None`."""
    marks = (mark for part in (hint, *get_args(hint)) for mark in getattr(part, "__metadata__", ()))
    return next((mark for mark in marks if isinstance(mark, Range | Only)), None)


def _manuals(section: type, name: str, prefix: str) -> list[Manual]:
    """The manual of a field, or of all keys below it. Sections of `value` with keys of `policy` are one entry."""
    key, hint = f"{prefix}{name}", get_type_hints(section)[name]
    (field,) = (field for field in dataclasses.fields(section) if field.name == name)
    below, text = section_of(hint), manuals(section).get(name, "")
    if key in SAME_KEYS:
        return [_shared(key, SAME_KEYS[key], text)]
    if below is not None and prefix == "value.":
        return [_shared(key, f"policy.{name}", "Defaults from policy come from value.")]
    item = get_args(hint)[-1] if get_origin(hint) is dict else None
    if isinstance(item, type) and dataclasses.is_dataclass(item):
        inner = [each for field in dataclasses.fields(item) for each in _manuals(item, field.name, f"{key}.NAME.")]
        return [Manual(key, "{}", "sections by name", text), *inner]
    if below is not None:
        return [each for field in dataclasses.fields(below) for each in _manuals(below, field.name, f"{key}.")]
    marker = marker_of(fields_of(section)[name])
    limits = f", {marker}" if isinstance(marker, Range) else ""
    meaning = f"{text} Only {spell(marker.value)}: {marker.reason}." if isinstance(marker, Only) else text
    return [Manual(key, _default(field), _type(hint) + limits, meaning)]


def _shared(key: str, of: str, text: str) -> Manual:
    return Manual(key, "", f"keys of {of}", text, same_as=of)


def _type(hint: object) -> str:
    origin = get_origin(hint)
    if origin is None:
        return hint.__name__ if isinstance(hint, type) and hint is not type(None) else "null"
    names = [
        spell(value) if not isinstance(value, type) and get_origin(value) is None else _type(value)
        for value in get_args(hint)
    ]
    if origin in (list, dict):
        return origin.__name__ + (f" of {names[-1]}" if names[-1] != "Any" else "")
    return " or ".join(dict.fromkeys(names))


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return spell(field.default_factory())
    return "required" if field.default in (dataclasses.MISSING, "???") else spell(field.default)
