# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/config.md, config keys by schema docstrings, and docs/dialect.md, NeMo RL keys by dialect tables."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import get_args, get_origin, get_type_hints

from mrl.config.fields import Only, Range
from mrl.config.schema.data import RowsConfig
from mrl.config.schema.keys import KEYS, SAME_KEYS, fields_of, section_of
from mrl.config.schema.run import RunConfig
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
"""Keys with one possible value, by their type or by a rule of `find_problems`: no code has to read them. So are those
with `Only`.
"""


COLUMNS = ("key", "default", "meaning")


# Sections that share a table: keys that differ in nothing but their section, or its default, are one row.
GROUPS = {
    "Algorithms": ("algorithm", "grpo", "ppo", "distillation", "sft", "dpo", "rm", "on_policy_distillation"),
    "Losses and rewards": ("loss_fn", "value_loss_fn", "reward_penalties"),
    "Models": ("policy", "value", "reference"),
    "Data and environments": ("data", "env", "judges"),
    "The run": ("checkpointing", "logger", "cluster", "deadlines", "profiler", "eval"),
}


def config_tables() -> str:
    """The reference in docs/config.md, as Markdown: a table for each group of sections, a row for each key."""
    parts, left = [], [name for name in fields_of(RunConfig) if name not in SAME_KEYS]
    for title, names in GROUPS.items():
        rows = [row for name in names for row in _rows(RunConfig, name, "")]
        left = [name for name in left if name not in names]
        parts.append(_table(title, COLUMNS, _with_defaults(rows)))
    assert not left, f"sections of no group: {left}"
    return "\n".join(parts)


def _with_defaults(rows: Iterable[tuple[str, str, str, str]]) -> list[tuple[str, ...]]:
    """Joins rows of one type and meaning; their defaults stand in the order of the keys, or once if they are equal."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for key, kind, default, meaning in rows:
        found.setdefault((kind, meaning), []).append((key, default))
    return [
        (
            ", ".join(key for key, _ in keys),
            _typed(kind, ", ".join(defaults if len({*defaults}) > 1 else defaults[:1])),
            meaning,
        )
        for (kind, meaning), keys in found.items()
        for defaults in [[default for _, default in keys]]
    ]


def _typed(kind: str, default: str) -> str:
    """The default behind its type and limits; the type of a number or a truth value shows in the default itself."""
    name, _, limits = kind.partition(", ")
    shows = name in ("bool", "int", "float") and "null" not in default and "required" not in default
    return ", ".join(filter(None, [default if shows else f"{name}: {default}".removesuffix(": "), limits]))


def dialect_tables() -> str:
    """The tables of docs/dialect.md, as Markdown. `--check` says of each key of a file why, and the way out."""
    values = [(f"`{key}`", f"`{old}`", f"`{new}`") for (key, old), new in VALUES.items()]
    by_rules = [
        (f"`{old}`", "by rules of `mrl/nemo/dialect/rules.py`") for old in sorted((*REWRITTEN, *TEMPLATE_VARIABLES))
    ]
    named = [*_renamed({**RENAMED, **SAME_VALUE}), *_renamed(BY_RULE, " by a rule"), *_merged(by_rules)]
    without = [
        (_section(key), _written(key, entry)) for key, entry in sorted(NO_EFFECT.items()) if key not in DIFFERENT
    ]
    different = [(_written(key, entry) + _same_values(entry), entry.reason) for key, entry in sorted(DIFFERENT.items())]
    sections = {name: ", ".join(key for section, key in without if section == name) for name, _ in without}
    refused = [(f"`{key}` ({value})", entry.reason) for (key, value), entry in GPU_VALUES.items()]
    refused += [(_written(key, entry) + _other_values(entry), entry.reason) for key, entry in sorted(REFUSED.items())]
    return "\n".join(
        [
            _table("Values with another name", ("key", "NeMo RL", "here"), _merged(values)),
            _table("Keys with another name", ("NeMo RL", "here"), named),
            _table("Keys without effect", ("section", "keys"), sections.items()),
            _table("Keys with which NeMo RL does something else", ("keys", "here, at every value"), _merged(different)),
            _table("Keys and values that are refused", ("keys (values)", "why"), _merged(refused)),
        ]
    )


def _renamed(names: Mapping[str, str], how: str = "") -> list[tuple[str, ...]]:
    """Rows of old and new names; those of one section that keep their last part are one row."""
    rows = []
    for old, new in sorted(names.items(), key=lambda item: item[1]):
        section, _, last = new.rpartition(".")
        rows.append((f"`{old}`", (f"`{section}.…`" if old.rpartition(".")[2] == last else f"`{new}`") + how))
    return _merged(rows)


def _written(key: str, entry: Foreign) -> str:
    return f"`{key}{'.*' if entry.is_section else ''}`"


def _section(key: str) -> str:
    return ".".join(key.split(".")[: 2 if key.startswith("policy.") and key.count(".") > 1 else 1])


def _same_values(entry: Foreign) -> str:
    """The values of a key with which NeMo RL does the same."""
    return f" (not at {', '.join(map(_yaml, entry.same_at))})" if entry.same_at else ""


def _other_values(entry: Foreign) -> str:
    """The values of a key that are refused."""
    if not isinstance(entry.refused, str):
        return f" ({', '.join(map(_yaml, entry.refused))})"
    return f" (all but {', '.join(_yaml(value) for value in entry.same)})" if entry.same else ""


def unread_keys(readers: Mapping[str, object]) -> set[str]:
    """The keys that no product module reads, less those that a check fixes to one value, and those of `IN_CONFIG`."""
    return (
        KEYS.keys()
        - readers.keys()
        - FIXED
        - IN_CONFIG.keys()
        - {key for key, marker in markers().items() if isinstance(marker, Only)}
    )


def markers(section: type = RunConfig, prefix: str = "") -> dict[str, Range | Only]:
    """Limits by dotted key: the numbers or the only value that the field's type allows."""
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
        return [
            (
                f"`{key}`",
                f"keys of `policy.{name}`",
                "",
                f"As in `policy.{name}`. Defaults from `policy` come from `value`.",
            )
        ]
    item = get_args(hint)[-1] if get_origin(hint) is dict else None
    if isinstance(item, type) and dataclasses.is_dataclass(item):
        rows = [row for inner in dataclasses.fields(item) for row in _rows(item, inner.name, f"{key}.NAME.")]
        return [(f"`{key}`", "sections by name", "`{}`", manuals(section)[name]), *rows]
    if below is not None:
        return [row for inner in dataclasses.fields(below) for row in _rows(below, inner.name, f"{key}.")]
    if _default(field) == f"`${{data.default.{name}}}`" and name in fields_of(RowsConfig):
        return [(f"`{key}`", "as in `data.default`", "`${data.default.…}`", "As in `data.default`.")]
    marker, manual = marker_of(fields_of(section)[name]), manuals(section).get(name, "")
    limits = f", {marker}" if isinstance(marker, Range) else ""
    meaning = f"{manual} Only {_yaml(marker.value)}: {marker.reason}." if isinstance(marker, Only) else manual
    return [(f"`{key}`", _type(hint) + limits, _default(field), meaning)]


def _type(hint: object) -> str:
    origin = get_origin(hint)
    if origin is None:
        return hint.__name__ if isinstance(hint, type) and hint is not type(None) else "null"
    names = [
        _yaml(value) if not isinstance(value, type) and get_origin(value) is None else _type(value)
        for value in get_args(hint)
    ]
    if origin in (list, dict):
        return origin.__name__ + (f" of {names[-1]}" if names[-1] != "Any" else "")
    return " or ".join(dict.fromkeys(names))


def _default(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{_yaml(field.default_factory())}`"
    return "required" if field.default in (dataclasses.MISSING, "???") else f"`{_yaml(field.default)}`"


def _merged(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Joins rows that differ in nothing but their first cell, the key."""
    keys: dict[tuple[str, ...], list[str]] = {}
    for key, *rest in rows:
        keys.setdefault(tuple(rest), []).append(key)
    return [(", ".join(names), *rest) for rest, names in keys.items()]


def _table(title: str, columns: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [f"## {title}", f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(_cell, row))} |" for row in rows)]) + "\n"


def _cell(value: object) -> str:
    return re.sub(r"\s+", " ", str(value)).replace("|", "\\|")


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
