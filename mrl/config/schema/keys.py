# SPDX-License-Identifier: Apache-2.0
"""The schema as data: every key with its type, default and section, built once from the dataclasses of the sections."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from mrl.config.schema.run import RunConfig

LIKE_POLICY = ("value", "teacher")
"""Sections of other models, with keys of `policy`: here a shared class takes defaults from the section instead of
`policy`.
"""


def section_of(hint: object) -> type | None:
    """The section class of a field's type, through `| None`; None for a plain value."""
    candidates = (hint,) if get_origin(hint) in (list, dict) else getattr(hint, "__args__", (hint,))
    return next((kind for kind in candidates if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)


@functools.cache
def fields_of(section: type) -> dict[str, Any]:
    """The fields of a section and their types, with the ranges in `Annotated`."""
    hints = get_type_hints(section, include_extras=True)
    return {each.name: hints[each.name] for each in dataclasses.fields(section)}


SAME_KEYS = {"teacher": "policy"}
"""Sections with the keys of another, whose documentation they share. `mrl.config.load` reads them."""


@dataclass(frozen=True)
class SchemaNode:
    """A key of the schema, a section of keys, or an item of a list or mapping."""

    hint: Any
    kinds: tuple[Any, ...]
    """The types that it allows, without `Annotated`."""
    section: type | None = None
    children: Mapping[str, SchemaNode] = field(default_factory=dict)
    """The fields of a section."""
    default: Any = None
    """The default as it is written: nested mappings for a section. To be copied before it is changed."""
    of_list: SchemaNode | None = None
    of_dict: SchemaNode | None = None

    @property
    def takes_text(self) -> bool:
        return str in self.kinds or any(isinstance(choice, str) for kind in self.kinds for choice in get_args(kind))


def _node(hint: Any, written: Any = None, name: str = "", moves_to: str = "") -> SchemaNode:
    """The node of a type, with a default as it is written; `moves_to` takes the place of `policy` in references."""
    kinds, section = _kinds(hint), section_of(hint)
    moves_to = name if name in SAME_KEYS else moves_to
    holds = {get_origin(kind): _node(get_args(kind)[-1]) for kind in kinds if get_origin(kind) in (list, dict)}
    children = {}
    for each in dataclasses.fields(section) if section else ():
        default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
        default = "???" if default is dataclasses.MISSING else default  # OmegaConf's word for a value to be set
        if moves_to and isinstance(default, str):
            default = default.replace("${policy.", f"${{{moves_to}.")
        moves = name if name in LIKE_POLICY else moves_to
        children[each.name] = _node(fields_of(section)[each.name], default, each.name, moves)
    if dataclasses.is_dataclass(written):
        written = {key: child.default for key, child in children.items()}
    return SchemaNode(hint, kinds, section, children, written, holds.get(list), holds.get(dict))


def _kinds(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) is Annotated:
        return _kinds(get_args(hint)[0])
    is_union = get_origin(hint) in (Union, UnionType)
    return tuple(kind for each in get_args(hint) for kind in _kinds(each)) if is_union else (hint,)


SCHEMA = _node(RunConfig, RunConfig())
"""The whole schema as data, built once: reading a config is a walk over it."""


def _keys(node: SchemaNode, prefix: str = "") -> dict[str, tuple[str, str]]:
    keys: dict[str, tuple[str, str]] = {}
    for name, child in node.children.items():
        if prefix or name not in SAME_KEYS:
            assert node.section is not None
            below = {prefix + name: (node.section.__name__, name)}
            keys |= _keys(child, f"{prefix}{name}.") if child.section else below
    return keys


KEYS: dict[str, tuple[str, str]] = _keys(SCHEMA)
"""Every dotted key with its section class and field, without those of `SAME_KEYS`."""


def keys_of(section: str) -> frozenset[str]:
    """The dotted keys of a section of `SAME_KEYS`."""
    same = f"{SAME_KEYS[section]}."
    return frozenset(f"{section}.{key.removeprefix(same)}" for key in KEYS if key.startswith(same))


EVERY_KEY = frozenset(KEYS).union(*map(keys_of, SAME_KEYS))
