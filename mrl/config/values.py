# SPDX-License-Identifier: Apache-2.0
"""Config values: expressions resolved by OmegaConf over the schema's defaults, validated by pydantic, key by key."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from omegaconf import Container, DictConfig, Node, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from omegaconf.resolvers import oc
from pydantic import ConfigDict, TypeAdapter, ValidationError

from mrl import env
from mrl.config.errors import Problem, is_required
from mrl.config.files import MAX_DEPTH, Key, Setting, Settings, split_key, wrong
from mrl.config.schema.run import KEYS, LIKE_POLICY, SAME_KEYS, RunConfig, fields_of, section_of
from mrl.config.secrets import note_texts

Section = TypeVar("Section")
Number = int | float

MAX_CHARACTERS = 1 << 20
"""Limit of a value with its references written out."""
MAX_EXPRESSION = 2000
"""Characters of a value with an interpolation in it. The grammar of interpolations takes seconds for more."""

REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_REFERENCE_OR_SELECT = re.compile(r"\$\{(?:oc\.select:)?\s*([\w.]+)")
_NUMBER = re.compile(r"[-+]?\d{1,30}(\.\d{0,30})?([eE][-+]?\d{1,3})?")

_MESSAGES = {
    "int": "must be a whole number; correct the value",
    "float": "must be a number; correct the value",
    "bool": "must be true or false; correct the value",
    "string": "must be a text; correct the value",
    "list": "must be a list; correct the value",
    "dict": "must be a mapping; correct the value",
}


def keep_texts(settings: Settings) -> None:
    """Gives text keys what is written, not the number or truth value that YAML makes of it: 0123, 12:30, 1e5, off."""
    for key, setting in settings.items():
        if (value := as_written(setting, ".".join(key))) != setting.value or type(value) is not type(setting.value):
            settings[key] = replace(setting, value=value)


def as_written(setting: Setting, dotted: str) -> object:
    """The value of a setting as one of the key `dotted`: texts of texts, and anything else as it is."""
    hint: object = RunConfig
    for name in dotted.split("."):
        section = section_of(hint)
        hint = fields_of(section).get(name) if section else _inner(hint, dict)
    return _texts(setting.value, setting.text, hint)


def _texts(value: object, text: object, hint: object) -> object:
    if isinstance(value, dict) and isinstance(text, dict):
        section = section_of(hint)
        hints = fields_of(section) if section else dict.fromkeys(value, _inner(hint, dict))
        return {name: _texts(inner, text.get(str(name)), hints.get(name)) for name, inner in value.items()}
    if isinstance(value, list) and isinstance(text, list):
        return [_texts(inner, written, _inner(hint, list)) for inner, written in zip(value, text, strict=True)]
    is_text = str in _kinds(hint) or any(isinstance(choice, str) for kind in _kinds(hint) for choice in get_args(kind))
    return text if isinstance(value, bool | int | float) and isinstance(text, str) and is_text else value


def _kinds(hint: object) -> list[Any]:
    """The types that a hint allows, without `Annotated` and `| None`."""
    if get_origin(hint) is Annotated:
        return _kinds(get_args(hint)[0])
    return (
        [kind for each in get_args(hint) for kind in _kinds(each)] if get_origin(hint) in (Union, UnionType) else [hint]
    )


def _inner(hint: object, container: type) -> object:
    """The type of what a list or mapping holds; None for any other hint."""
    return next((get_args(kind)[-1] for kind in _kinds(hint) if get_origin(kind) is container), None)


class Unresolved(ValueError):
    """An expression cannot be resolved. The text says why."""


def find_long_expressions(values: Mapping[str, object]) -> list[Problem]:
    """A problem for every key whose value has too long an expression, or grows too long with references written out."""
    texts = {key: str(value) for key, value in values.items()}
    known: dict[str, int] = {}

    def length(name: str, above: tuple[str, ...]) -> int:
        """Characters that replace a reference to a key or a section. Other code refuses circular references."""
        if name in above or len(above) > MAX_DEPTH:
            return 0
        if name not in known:
            keys = [name] if name in texts else [key for key in texts if key.startswith(f"{name}.")]
            references = [other for key in keys for other in _REFERENCE_OR_SELECT.findall(texts[key])]
            known[name] = sum(len(texts[key]) for key in keys) + sum(
                length(other, (*above, name)) for other in references
            )
        return known[name]

    problems = []
    for key, text in texts.items():
        if "${" in text and len(text) > MAX_EXPRESSION:
            rule = f"an expression of {len(text):,} characters"
            problems.append(Problem("expression", key, None, rule, f"write at most {MAX_EXPRESSION:,}"))
        elif "${" in text and length(key, ()) > MAX_CHARACTERS:
            rule = f"with its references written out, a value of more than {MAX_CHARACTERS:,} characters"
            problems.append(Problem("expression", key, None, rule, "refer to fewer"))
    return problems


class Tree:
    """Settings over the schema's defaults, as they are written."""

    def __init__(self, settings: Settings, secrets: set[str]) -> None:
        """Secrets that values are read from are added to `secrets`."""
        _register_resolvers(secrets)
        self._content = copy.deepcopy(_defaults(RunConfig))
        for key, setting in settings.items():
            _put(self._content, key, setting.value)

    @functools.cached_property
    def _config(self) -> DictConfig:
        return OmegaConf.create(self._content)

    def value(self, dotted: str) -> object:
        """The resolved value of a dotted key, such as `data.train.datasets[0].seed`; None if there is none.

        Raises:
            Unresolved: its expression, or one that this refers to, cannot be resolved.
            MissingMandatoryValue: it is required and not set.
        """
        written = self.written(dotted)
        if written != "???" and "${" not in repr(written):
            return copy.deepcopy(written)
        try:
            value = OmegaConf.select(self._config, dotted, throw_on_missing=True)
            return OmegaConf.to_container(value, resolve=True) if isinstance(value, Container) else value
        except MissingMandatoryValue:
            raise
        except (OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise Unresolved(f"{reason}; correct the expression") from error

    def written(self, dotted: str) -> object:
        """The unresolved value of a dotted key; None if there is none."""
        value: object = self._content
        for name in re.findall(r"[^.\[\]]+", dotted):
            value = (
                value.get(name) if isinstance(value, dict) else value[int(name)] if isinstance(value, list) else None
            )
        return value

    def references(self, dotted: str) -> frozenset[str]:
        """The other keys of the schema that a key's expression refers to."""
        written = self.written(dotted)
        return (
            frozenset(REFERENCE.findall(written)) & KEYS.keys() - {dotted} if isinstance(written, str) else frozenset()
        )


class ValueReader:
    """Reads the sections of a config from a tree, and collects the problems of their values."""

    def __init__(self, tree: Tree, settings: Settings, misplaced: set[str]) -> None:
        """`settings` has the origins of the values. Keys in `misplaced` have problems already."""
        self._tree, self._settings, self._misplaced = tree, settings, misplaced
        self._problems: dict[str, Problem] = {}

    def section(self, kind: type[Section], prefix: str = "") -> Section:
        """The section whose keys begin with `prefix`. Values that are not known are left at their defaults."""
        values: dict[str, object] = {}
        for name, hint in fields_of(kind).items():
            dotted, inner, item = prefix + name, section_of(hint), _item_section(hint)
            if dotted in SAME_KEYS:
                values[name] = None
                continue
            if inner is not None:
                values[name] = None if self._tree.written(dotted) is None else self.section(inner, f"{dotted}.")
                continue
            try:
                value = self._tree.value(dotted)
                if item is not None and isinstance(value, list):
                    values[name] = [self._item(item, f"{dotted}[{index}]", each) for index, each in enumerate(value)]
                    continue
                if isinstance(value, str) and bool in (hint, *get_args(hint)):  # environment variables give text
                    value = {"true": True, "false": False}.get(value.lower(), value)
                values[name] = _adapter(hint).validate_python(value)
            except MissingMandatoryValue:
                self._problems[dotted] = is_required(dotted)
            except Unresolved as error:
                self._add("expression", dotted, self._tree.written(dotted), error)
            except ValidationError as error:
                self._add("value", dotted, self._tree.value(dotted), _message(error))
        return kind(**values)

    def problems(self) -> list[Problem]:
        """Lists the problems, except those that another key causes."""
        faults = self.faults()
        causes = [
            problem
            for key, problem in self._problems.items()
            if key not in self._misplaced and not self._tree.references(key) & faults.keys()
        ]
        # Keys that refer to each other in a circle have no other cause.
        return causes or ([] if self._misplaced else list(self._problems.values()))

    def faults(self) -> dict[str, str]:
        """Maps each key of unknown value to its cause: itself, or a key that its expression refers to."""
        references = {key: others for key in KEYS if (others := self._tree.references(key))}
        wrong = {*self._misplaced, *(key.partition("[")[0] for key in self._problems)}
        faults = {key: key for key in sorted(wrong) if not references.get(key, frozenset()) & wrong} or {
            key: key for key in sorted(wrong)
        }
        while followers := {
            key: min(seen)
            for key, others in references.items()
            if key not in faults and (seen := others & faults.keys())
        }:
            faults |= {key: faults[other] for key, other in followers.items()}
        return {key: key for key in wrong} | faults

    def _item(self, kind: type[Section], dotted: str, value: object) -> Section:
        names = fields_of(kind)
        if not isinstance(value, dict):
            self._add("section", dotted, value, f"a section; set one of its keys: {', '.join(names)}")
            return kind()
        for name in value.keys() - names.keys():
            key, nearest = f"{dotted}.{name}", difflib.get_close_matches(str(name), names, n=1, cutoff=0.0)[0]
            self._add("unknown-key", key, value[name], f"no such key; the nearest is {dotted}.{nearest}")
        return self.section(kind, f"{dotted}.")

    def _add(self, id: str, dotted: str, value: object, rule: object) -> None:
        """Adds a problem of a key as set, with its origin. A list's item has the list's origin; a default has none."""
        setting = self._settings.get(split_key(dotted))
        if setting is None:
            above = self._settings.get(split_key(dotted.partition("[")[0]))
            setting = Setting(value, above.origin if above else "")
        self._problems[dotted] = wrong(id, split_key(dotted), setting, rule)


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[object]:
    # pydantic takes 1 for true unless it is strict.
    return TypeAdapter(hint, config=ConfigDict(strict=bool in (hint, *get_args(hint)), coerce_numbers_to_str=True))


def _message(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where, context = "".join(f"[{part}] " for part in first["loc"]), first.get("ctx", {})
    if first["type"] == "value_error":
        return where + str(context["error"])
    if first["type"] == "literal_error":
        return f"{where}no such value; use {context['expected']}"
    return where + _MESSAGES.get(first["type"].partition("_")[0], f"{first['msg']}; correct the value")


def _item_section(hint: object) -> type | None:
    """The section class of the items of a list; None for any other field."""
    return section_of(_inner(hint, list))


@functools.cache
def _defaults(section: type) -> dict[str, Any]:
    """The defaults of a section as they are written."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        inner = section_of(fields_of(section)[field.name])
        if field.default_factory is dataclasses.MISSING:
            found[field.name] = field.default
        else:
            found[field.name] = copy.deepcopy(_defaults(inner)) if inner else field.default_factory()
    for name in LIKE_POLICY if section is RunConfig else ():
        found[name] = {
            key: _moved(value, name) if isinstance(value, dict) else value for key, value in found[name].items()
        }
    return found


def _moved(content: dict[str, Any], section: str) -> dict[str, Any]:
    """The defaults of a class, with references to `policy` replaced by `section`."""
    return {
        key: _moved(value, section)
        if isinstance(value, dict)
        else value.replace("${policy.", f"${{{section}.")
        if isinstance(value, str)
        else value
        for key, value in content.items()
    }


def _put(content: dict[str, Any], key: Key, value: object) -> None:
    """Puts a value at a key of nested mappings. A section that was null, or that a list item begins, has defaults."""
    section: type | None = RunConfig
    for name in key[:-1]:
        section = section_of(fields_of(section).get(name)) if section else None
        if not isinstance(content.get(name), dict):
            content[name] = copy.deepcopy(_defaults(section)) if section else {}
        content = content[name]
    hint = fields_of(section).get(key[-1]) if section else None
    inner, item = section_of(hint), _item_section(hint)
    if value == {} and isinstance(content.get(key[-1]), dict):
        return
    if value == {} and inner is not None:
        value = copy.deepcopy(_defaults(inner))
    elif isinstance(value, list) and item is not None:
        value = [{**_defaults(item), **each} if isinstance(each, dict) else each for each in value]
    content[key[-1]] = value


def _register_resolvers(secrets: set[str]) -> None:
    """Registers NeMo RL's resolvers, and OmegaConf's own so that they add the secrets that they read to `secrets`."""

    def read(name: str, *default: object) -> str | None:
        value = oc.env(name, *default)
        # Paths, sizes and defaults are no secrets, unless the variable is named like a secret.
        if value is not None and (
            env.is_secret_variable(name) or (env.variable(name) and not env.is_public_variable(name))
        ):
            note_texts(value, secrets)
        return value

    def decode(text: str | None, _parent_: Container, _node_: Node) -> object:
        value = oc.decode(text, _parent_, _node_)
        if any(secret in str(text) for secret in secrets):  # without the quotes a secret is another text
            note_texts(value, secrets)
        return value

    OmegaConf.register_resolver("oc.env", read, replace=True, annotation_validation="off")
    OmegaConf.register_resolver("oc.decode", decode, replace=True, annotation_validation="off")
    for name, resolver in RESOLVERS.items():
        OmegaConf.register_resolver(name, resolver, replace=True)


def _of_numbers(operation: Callable[[Number, Number], Number]) -> Callable[[object, object], Number]:
    """An operation on numbers, which returns only numbers a key can have. OmegaConf would add warnings to errors."""

    def number(value: object) -> Number:
        if isinstance(value, str) and _NUMBER.fullmatch(value):  # environment variables give text
            return float(value) if "." in value or "e" in value.lower() else int(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{str(value)[:40]!r} is not a number")
        return value

    def checked(a: object, b: object) -> Number:
        result = operation(number(a), number(b))
        if isinstance(result, int) and abs(result) >= 1 << 63:
            raise ValueError("the result has more than 64 bits")
        return result

    return checked


# NeMo RL's resolvers. Whole numbers stay whole, because most of what is derived are sizes.
RESOLVERS: dict[str, Callable[..., object]] = {
    "equal": lambda a, b: a == b,
    "mul": _of_numbers(lambda a, b: a * b),
    "add": _of_numbers(lambda a, b: a + b),
    "div": _of_numbers(lambda a, b: a // b if a % b == 0 else a / b),
    "max": _of_numbers(max),
    # Not NeMo RL's, for configs that fit hosts with and without GPUs.
    "gcd": _of_numbers(lambda a, b: math.gcd(int(a), int(b))),
    "if": lambda condition, a, b: a if condition else b,
}
