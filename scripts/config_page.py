# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/config.md, config keys by the schema's docstrings, and of docs/dialect.md, NeMo RL's keys by the dialect's tables."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import get_args, get_origin, get_type_hints

from mrl.config.dialect.rules import REWRITTEN, TEMPLATE_VARIABLES
from mrl.config.dialect.tables import BY_RULE, GPU_VALUES, NO_EFFECT, REFUSED, RENAMED, SAME_VALUE, VALUES, Foreign
from mrl.config.fields import Only, Range
from mrl.config.schema.data import RowsConfig
from mrl.config.schema.run import KEYS, SAME_KEYS, RunConfig, fields_of, section_of

_TEACHERS = "mrl.config: the teachers' sections are made of it"
_MTP = "a check: a model with one MTP layer repeats it"
IN_CONFIG: dict[str, str] = {
    "policy.megatron_cfg.mtp_use_repeated_layer": _MTP,
    "value.megatron_cfg.mtp_use_repeated_layer": _MTP,
    "on_policy_distillation.non_colocated_teachers.default_teacher_cfg": _TEACHERS,
    "on_policy_distillation.non_colocated_teachers.teacher_overrides": _TEACHERS,
}
"""Keys that say what other keys say, and are looked at where the config is read."""

FIXED = frozenset(
    [
        "policy.megatron_cfg.moe_router_enable_expert_bias",
        "value.megatron_cfg.moe_router_enable_expert_bias",
        "policy.generation.backend",
        "policy.reward_model_cfg.enabled",
        "policy.reward_model_cfg.reward_model_type",
    ]
)
"""Keys with one possible value, by their type or by a rule of `find_problems`: no code has to read them. So are those with `Only`."""


COLUMNS = ("key", "type", "default", "meaning")


def config_tables() -> str:
    """The reference in docs/config.md, as Markdown: a table for each section of the run, a row for each key."""
    own = [row for name in fields_of(RunConfig) for row in _rows(RunConfig, name, "") if section_of(fields_of(RunConfig)[name]) is None]
    parts = [_table("The run", COLUMNS, own)]
    for name, hint in fields_of(RunConfig).items():
        if section_of(hint) is not None and name not in SAME_KEYS:
            parts.append(_table(name, COLUMNS, _merged(_rows(RunConfig, name, ""))))
    return "\n".join(parts)


def dialect_tables() -> str:
    """The tables of docs/dialect.md, as Markdown."""
    parts = [_table("Keys with another name", ("NeMo RL", "here"), [(f"`{old}`", f"`{new}`") for old, new in RENAMED.items()])]
    values = [(f"`{key}`", f"`{old}`", f"`{new}`") for (key, old), new in VALUES.items()]
    parts.append(_table("Values with another name", ("key", "NeMo RL", "here"), values))
    translated = [(f"`{old}`", f"`{new}`: the same value") for old, new in SAME_VALUE.items()]
    translated += [(f"`{old}`", f"`{new}`, by a rule") for old, new in BY_RULE.items()]
    by_rules = (", ".join(f"`{old}`" for old in sorted((*REWRITTEN, *TEMPLATE_VARIABLES))), "by rules of `mrl/config/dialect/rules.py`")
    parts.append(_table("Keys that are translated", ("NeMo RL", "here"), [*sorted(translated), by_rules]))
    parts.append(_foreign("Keys without effect", NO_EFFECT))
    parts.append(_foreign("Keys that are refused", REFUSED))
    refused = [(f"`{key}`", f"`{value}`", entry.reason, entry.way_out) for (key, value), entry in GPU_VALUES.items()]
    parts.append(_table("Values that are refused", ("key", "value", "reason", "way out"), refused))
    return "\n".join(parts)


def unread_keys(readers: Mapping[str, object]) -> set[str]:
    """The keys that no product module reads, less those that a check fixes to one value, and those of `IN_CONFIG`."""
    return KEYS.keys() - readers.keys() - FIXED - IN_CONFIG.keys() - {key for key, marker in markers().items() if isinstance(marker, Only)}


def markers(section: type = RunConfig, prefix: str = "") -> dict[str, Range | Only]:
    """By dotted key, the numbers or the only value that the field's type allows."""
    found: dict[str, Range | Only] = {}
    for name, hint in fields_of(section).items():
        if prefix + name in SAME_KEYS:
            continue
        if (inner := section_of(hint)) is not None:
            found |= markers(inner, f"{prefix}{name}.")
        elif (marker := marker_of(hint)) is not None:
            found[prefix + name] = marker
    return found


def marker_of(hint: object) -> Range | Only | None:
    """The marker of a field's type, through `| None`."""
    marks = (mark for part in (hint, *get_args(hint)) for mark in getattr(part, "__metadata__", ()))
    return next((mark for mark in marks if isinstance(mark, Range | Only)), None)


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


def _rows(section: type, name: str, prefix: str) -> list[tuple[str, str, str, str]]:
    """The row of a field, or the rows of all keys below it. Sections of `value` with keys of `policy` are one row."""
    key, hint = f"{prefix}{name}", get_type_hints(section)[name]
    (field,) = (field for field in dataclasses.fields(section) if field.name == name)
    below = section_of(hint)
    if key in SAME_KEYS:
        return [(f"`{key}`", f"keys of `{SAME_KEYS[key]}`", _default(field), manuals(section)[name])]
    if below is not None and prefix == "value.":
        return [(f"`{key}`", f"keys of `policy.{name}`", "", f"As in `policy.{name}`. Defaults from `policy` come from `value`.")]
    if below is not None:
        return [row for inner in dataclasses.fields(below) for row in _rows(below, inner.name, f"{key}.")]
    if _default(field) == f"`${{data.default.{name}}}`" and name in fields_of(RowsConfig):
        return [(f"`{key}`", "as in `data.default`", "`${data.default.…}`", "As in `data.default`.")]
    meaning = _meaning(marker_of(fields_of(section)[name]), manuals(section).get(name, ""))
    return [(f"`{key}`", _type(hint), _default(field), meaning)]


def _meaning(marker: Range | Only | None, manual: str) -> str:
    if isinstance(marker, Only):
        return f"{manual} Only {_yaml(marker.value)}: {marker.reason}."
    return f"{manual} Range: {marker}." if marker is not None else manual


def _type(hint: object) -> str:
    origin = get_origin(hint)
    if origin is None:
        return hint.__name__ if isinstance(hint, type) and hint is not type(None) else "null"
    names = [_yaml(value) if not isinstance(value, type) and get_origin(value) is None else _type(value) for value in get_args(hint)]
    if origin in (list, dict):
        return origin.__name__ + (f" of {names[-1]}" if names[-1] != "Any" else "")
    return " or ".join(dict.fromkeys(names))


def _default(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{_yaml(field.default_factory())}`"
    return "required" if field.default in (dataclasses.MISSING, "???") else f"`{_yaml(field.default)}`"


def _foreign(title: str, entries: Mapping[str, Foreign]) -> str:
    rows = []
    for key, entry in sorted(entries.items()):
        accepted = "any" if entry.same is None else ", ".join(f"`{_yaml(value)}`" for value in entry.same)
        rows.append((f"`{key}{'.*' if entry.is_section else ''}`", accepted, entry.reason, entry.way_out or "–"))
    return _table(title, ("keys", "values accepted", "why", "otherwise"), _merged(rows))


def _merged(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Joins rows that differ in nothing but their first cell, the key."""
    keys: dict[tuple[str, ...], list[str]] = {}
    for key, *rest in rows:
        keys.setdefault(tuple(rest), []).append(key)
    return [(", ".join(names), *rest) for rest, names in keys.items()]


def _table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [f"## {title}", "", f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(_cell, row))} |" for row in rows)]) + "\n"


def _cell(value: object) -> str:
    return re.sub(r"\s+", " ", str(value)).replace("|", "\\|")


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
