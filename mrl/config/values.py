# SPDX-License-Identifier: Apache-2.0
"""Config values: expressions resolved by OmegaConf over the schema's defaults, validated by pydantic, key by key."""

from __future__ import annotations

import copy
import difflib
import functools
import math
import re
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, NoReturn, get_args

from omegaconf import Container, DictConfig, Node, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException, UnsupportedInterpolationType
from omegaconf.resolvers import oc
from pydantic import ConfigDict, TypeAdapter, ValidationError

from mrl import env
from mrl.config.errors import NotKnown, Problem, is_required
from mrl.config.files import MAX_DEPTH, Key, Setting, Settings, split_key, wrong
from mrl.config.schema.keys import EVERY_KEY, SAME_KEYS, SCHEMA, SchemaNode
from mrl.config.schema.policy import PolicyConfig
from mrl.config.schema.run import RunConfig
from mrl.config.secrets import note_texts

Number = int | float

MAX_CHARACTERS = 1 << 20
"""Limit of a value with its references written out."""
MAX_EXPRESSION = 2000
"""Characters of a value with an interpolation in it. The grammar of interpolations takes seconds for more."""

REFERENCE = re.compile(r"\$\{([\w.]+)\}")
REFERENCE_OR_SELECT = re.compile(r"\$\{(?:oc\.select:)?\s*([\w.]+)")
_UNSET = re.compile(r"Environment variable '(.+)' not found")
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
    """Keeps the written text of text keys that YAML reads as number or truth value: 0123, 12:30, 1e5, off."""
    for key, setting in settings.items():
        if (value := as_written(setting, key)) != setting.value or type(value) is not type(setting.value):
            settings[key] = replace(setting, value=value)


def as_written(setting: Setting, key: Key) -> object:
    """The value of a setting as one of `key`: texts of texts, and anything else as it is."""
    node: SchemaNode | None = SCHEMA
    for name in key:
        node = node and (node.children.get(name) if node.section else node.of_dict)
    return _texts(setting.value, setting.text, node)


def _texts(value: object, text: object, node: SchemaNode | None) -> object:
    if node is None:
        return value
    if isinstance(value, dict) and isinstance(text, dict):
        below = node.children if node.section else dict.fromkeys(value, node.of_dict)
        return {name: _texts(inner, text.get(str(name)), below.get(name)) for name, inner in value.items()}
    if isinstance(value, list) and isinstance(text, list):
        return [_texts(inner, written, node.of_list) for inner, written in zip(value, text, strict=True)]
    is_other = isinstance(value, bool | int | float) and isinstance(text, str)
    return text if is_other and node.takes_text else value


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
            references = [other for key in keys for other in REFERENCE_OR_SELECT.findall(texts[key])]
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
        self.content: dict[str, Any] = copy.deepcopy(SCHEMA.default)
        for key, setting in settings.items():
            _put(self.content, key, setting.value)

    @functools.cached_property
    def _config(self) -> DictConfig:
        return OmegaConf.create(self.content)

    def value(self, dotted: str) -> object:
        """The resolved value of a dotted key, such as `data.train.datasets[0].seed`, or None.

        Raises:
            Unresolved: its expression, or one that this refers to, cannot be resolved.
            MissingMandatoryValue: it is required and not set.
        """
        written = self._followed(self.written(dotted))
        if written != "???" and "${" not in repr(written):
            return copy.deepcopy(written)
        try:
            value = OmegaConf.select(self._config, dotted, throw_on_missing=True)
            return OmegaConf.to_container(value, resolve=True) if isinstance(value, Container) else value
        except MissingMandatoryValue:
            raise
        except (OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            is_unknown = isinstance(error, UnsupportedInterpolationType)
            way_out = "give the value itself, as an override" if is_unknown else "correct the expression"
            if (unset := _UNSET.search(reason)) is not None:
                reason = f"the environment has no variable {unset[1]}"
                way_out = "set it, or give the value itself, as an override"
            raise Unresolved(f"{reason}; {way_out}") from error

    def _followed(self, written: object) -> object:
        """The value at the end of plain references, which need no OmegaConf; that of an expression stays."""
        for _ in range(MAX_DEPTH):
            match = REFERENCE.fullmatch(written) if isinstance(written, str) else None
            if match is None:
                break
            section: object = self.content
            *parents, name = split_key(match[1])
            for parent in parents:
                section = section.get(parent) if isinstance(section, dict) else None
            if not isinstance(section, dict) or name not in section:
                break  # OmegaConf says what is not there
            written = section[name]
        return written

    def written(self, dotted: str) -> object:
        """The unresolved value of a dotted key, or None."""
        value: object = self.content
        for name in re.findall(r"[^.\[\]]+", dotted):
            value = (
                value.get(name) if isinstance(value, dict) else value[int(name)] if isinstance(value, list) else None
            )
        return value

    def references(self, dotted: str) -> AbstractSet[str]:
        """The other keys of the schema that a key's expression refers to."""
        written = self.written(dotted)
        return set(REFERENCE.findall(written)) & EVERY_KEY - {dotted} if isinstance(written, str) else set()


def read_config(tree: Tree, settings: Settings, misplaced: set[str]) -> tuple[RunConfig | None, list[Problem]]:
    """The config of a tree, and the problems of its values; no config: the algorithm is not known.

    `settings` has the origins of the values. Keys in `misplaced` have problems already. Reading a value that is not
    known raises NotKnown with the key at fault: that key, or one that its expression refers to.
    """
    reader = _Reader(tree, settings)
    reader.read(SCHEMA, "", tree.content)
    faults, problems = reader.faults(misplaced)
    config = None if "algorithm" in faults else config_of(reader.values, faults)
    assert config is None or isinstance(config, RunConfig)
    return config, problems


def read_teacher(
    tree: Tree, settings: Settings, misplaced: set[str], inherited: Mapping[str, str], prefix: str
) -> tuple[PolicyConfig, list[Problem]]:
    """Section `teacher` of a tree, as `read_config` reads the others.

    `inherited` maps keys whose values are the policy's to the policy's keys: if these are at fault, they have the
    problem. Problems name the other keys with `prefix`.
    """
    reader, section = _Reader(tree, settings, prefix), SCHEMA.children["teacher"]
    reader.read(section, "teacher.", tree.content["teacher"] or {})
    faults, problems = reader.faults(misplaced)
    faults = {key: inherited.get(fault, fault) for key, fault in faults.items()}
    config = _built(section, "teacher.", reader.values, faults)
    assert isinstance(config, PolicyConfig)
    return config, problems


class _Reader:
    """Reads the keys of a tree in one pass: values, and problems of those that are not known."""

    def __init__(self, tree: Tree, settings: Settings, prefix: str = "") -> None:
        """Problems name keys of a teacher with `prefix`."""
        self._tree, self._settings, self._prefix = tree, settings, prefix
        self.values: dict[str, object] = {}
        """Value of each key; None for a section that is null."""
        self.problems: dict[str, Problem] = {}

    def read(self, node: SchemaNode, prefix: str, content: Mapping[str, object]) -> None:
        """Reads a section, whose keys begin with `prefix`. `content` is as written, or resolved below a list."""
        for name, child in node.children.items():
            dotted, written = prefix + name, content.get(name)
            if child.section and isinstance(written, dict) and dotted not in SAME_KEYS:
                self.read(child, f"{dotted}.", written)
                continue
            if child.section:
                self.values[dotted] = None
                continue
            try:
                if (item := child.of_dict) and item.section and isinstance(written, dict):
                    self.values[dotted] = {
                        key: self._item(item, f"{dotted}.{key}", one) for key, one in written.items()
                    }
                    continue
                value = self._tree.value(dotted)
                if (item := child.of_list) and item.section and isinstance(value, list):
                    self.values[dotted] = [
                        self._item(item, f"{dotted}[{place}]", one) for place, one in enumerate(value)
                    ]
                    continue
                if isinstance(value, str) and bool in child.kinds:  # environment variables give text
                    value = {"true": True, "false": False}.get(value.lower(), value)
                if isinstance(value, str) and value.startswith("~/"):  # a folder of this name would be made
                    way_out = f"${{oc.env:HOME}}/{value.removeprefix('~/')}"
                    self._add("value", dotted, value, f"nothing expands ~ here; write the whole path, or {way_out}")
                    continue
                self.values[dotted] = _adapter(child.hint).validate_python(value)
            except MissingMandatoryValue:
                self.problems[dotted] = is_required(self._name(dotted))
            except Unresolved as error:
                self._add("expression", dotted, written, error)
            except ValidationError as error:
                self._add("value", dotted, self._tree.value(dotted), _message(error))

    def _item(self, node: SchemaNode, dotted: str, value: object) -> object:
        names = node.children
        if not isinstance(value, dict):
            self._add("section", dotted, value, f"a section; set one of its keys: {', '.join(names)}")
            return None
        for name in value.keys() - names.keys():
            key, nearest = f"{dotted}.{name}", difflib.get_close_matches(str(name), names, n=1, cutoff=0.0)[0]
            self._add("unknown-key", key, value[name], f"no such key; the nearest is {dotted}.{nearest}")
        self.read(node, f"{dotted}.", value)
        return _built(node, f"{dotted}.", self.values, {})

    def _add(self, id: str, dotted: str, value: object, rule: object) -> None:
        """Adds a problem of a key as set, with its origin. A list's item has the list's origin; a default has none."""
        setting = self._settings.get(split_key(dotted))
        if setting is None:
            above = self._settings.get(split_key(dotted.partition("[")[0]))
            setting = Setting(value, above.origin if above else "", self._name(dotted))
        self.problems[dotted] = wrong(id, split_key(dotted), setting, rule)

    def _name(self, dotted: str) -> str:
        return self._prefix + dotted.removeprefix("teacher.") if self._prefix else dotted

    def faults(self, misplaced: set[str]) -> tuple[dict[str, str], list[Problem]]:
        """The keys of unknown value with their causes, and the problems of the causes that are not `misplaced`."""
        found = faults_of(self._tree, misplaced | {key.partition("[")[0] for key in self.problems})
        causes = [
            problem
            for key, problem in self.problems.items()
            if key not in misplaced and not self._tree.references(key) & found.keys()
        ]
        # Keys that refer to each other in a circle have no other cause.
        return found, causes or ([] if misplaced else list(self.problems.values()))


def faults_of(tree: Tree, wrong: set[str]) -> dict[str, str]:
    """Maps each key of unknown value to its cause: itself, or a key that its expression refers to."""
    if not wrong:
        return {}
    references = {key: others for key in EVERY_KEY if (others := tree.references(key))}
    faults = {key: key for key in sorted(wrong) if not references.get(key, set()) & wrong} or {
        key: key for key in sorted(wrong)
    }
    while followers := {
        key: min(seen) for key, others in references.items() if key not in faults and (seen := others & faults.keys())
    }:
        faults |= {key: faults[other] for key, other in followers.items()}
    return {key: key for key in wrong} | faults


def config_of(values: Mapping[str, object], faults: Mapping[str, str]) -> object:
    """The run's config of these values, by key; null sections have a value, too. Reading a key of `faults` raises
    NotKnown with its cause.
    """
    return _built(SCHEMA, "", values, faults)


def _built(node: SchemaNode, prefix: str, values: Mapping[str, object], faults: Mapping[str, str]) -> object:
    """The section of these values. Reading a key of `faults`, or a null section with such a key, raises NotKnown."""
    found, unknown = dict[str, Any](), dict[str, property]()
    for name, child in node.children.items():
        dotted = prefix + name
        if child.section and dotted not in values and dotted not in faults:
            found[name] = _built(child, f"{dotted}.", values, faults)
            continue
        found[name] = values.get(dotted)
        for key, fault in faults.items():
            if key == dotted or key.startswith(f"{dotted}."):
                unknown[name] = property(functools.partial(_refuse, fault))
    assert node.section is not None
    if not unknown:
        return node.section(**found)
    section = object.__new__(type(node.section.__name__, (node.section,), unknown))
    vars(section).update(found)
    return section


def _refuse(fault: str, _: object) -> NoReturn:
    raise NotKnown(fault)


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[object]:
    # pydantic takes 1 for true unless it is strict.
    return TypeAdapter(hint, config=ConfigDict(strict=bool in (hint, *get_args(hint)), coerce_numbers_to_str=True))


def _message(error: ValidationError) -> str:
    first, *others = error.errors(include_url=False)
    if first["type"].startswith("bool") and others and others[0]["type"] == "literal_error":
        return f"no such value; use {others[0].get('ctx', {})['expected']}, true or false"
    where, context = "".join(f"[{part}] " for part in first["loc"]), first.get("ctx", {})
    if first["type"] == "value_error":
        return where + str(context["error"])
    if first["type"] == "literal_error":
        return f"{where}no such value; use {context['expected']}"
    return where + _MESSAGES.get(first["type"].partition("_")[0], f"{first['msg']}; correct the value")


def _put(content: dict[str, Any], key: Key, value: object) -> None:
    """Puts a value at a key of nested mappings. A section that was null, or that a list item begins, has defaults."""
    node: SchemaNode | None = SCHEMA
    for name in key[:-1]:
        node = node and (node.children.get(name) or node.of_dict)
        if not isinstance(content.get(name), dict):
            content[name] = _defaults(node)
        content = content[name]
    node = node and (node.children.get(key[-1]) or node.of_dict)
    if value == {}:
        if isinstance(content.get(key[-1]), dict):
            return
        value = _defaults(node)
    elif isinstance(value, list) and node and node.of_list and node.of_list.section:
        value = [{**_defaults(node.of_list), **each} if isinstance(each, dict) else each for each in value]
    content[key[-1]] = value


def _defaults(node: SchemaNode | None) -> dict[str, Any]:
    return copy.deepcopy({name: child.default for name, child in node.children.items()}) if node else {}


def _register_resolvers(secrets: set[str]) -> None:
    """Registers NeMo RL's resolvers, and OmegaConf's own so that they add the secrets that they read to `secrets`."""

    def read(name: str, *default: object) -> str | None:
        value = oc.env(name, *default)
        # Paths, sizes and defaults are no secrets, unless the variable is named like a secret.
        if value is not None and (
            env.is_secret_variable(name) or (env.variable(name) and not env.is_public_variable(name, value))
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
