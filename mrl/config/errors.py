# SPDX-License-Identifier: Apache-2.0
"""Problems of a config: their texts and keys, the error that raises them, and values that they leave unknown."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NoReturn, TypeVar

from mrl.env import is_hidden
from mrl.phases import ModelName

Config = TypeVar("Config")

REDACTED = "<redacted>"
COMMAND_LINE = "command line"

_MENTIONED = re.compile(r"\b[a-z_]+(?:\.\w+)+(?==)")
_PART = re.compile(r"[^.\[\]]+")
_KEY_OF_POLICY = re.compile(r"(?<![\w./=-])policy\.")


class Unprovided(str):
    """A problem with this machine, not with the config: a file, a folder or a disk is still to be provided."""


class Unchecked(Unprovided):
    """A problem that leaves rules unapplied: a model, or a value of the config, is not known."""


class ConfigError(ValueError):
    """A config is wrong. The text has one problem a line."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        return ConfigError, (self.problems,)


class NotKnown(Exception):
    """A rule needs a value that could not be read or resolved."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"{key} is not known")


class Problems:
    """Collects the problems of a config. Every text has the same form: `key=value: rule; way out`."""

    def __init__(self, config: object, origins: Mapping[str, str] = MappingProxyType({})) -> None:
        """`config` is a RunConfig, whose values texts quote. `origins`: where keys were set, inherited files first."""
        self._config = config
        self._origins = origins
        places = dict.fromkeys(origin.partition(":")[0] for origin in origins.values() if not origin.startswith(COMMAND_LINE))
        self._ranks = {place: rank for rank, place in enumerate(reversed(places), start=1)}
        self._texts: dict[str, str | None] = {}

    def add(self, key: str, rule: str, way_out: str, kind: type[str] = str, *, others: Sequence[str] = ()) -> None:
        """Adds a problem with a dotted key's value. `kind` is Unprovided or Unchecked if the config itself is right.

        With `others`, keys that break the rule as well as `key`, the rule says by itself what is wrong, and the text begins with the key
        that the user set last: on the command line, in the file, in a file that it inherits.
        """
        key = self._set_last([key, *others])
        value = value_at(self._config, key)
        if is_hidden(key) and isinstance(value, str):
            value = REDACTED
        text = kind(f"{key}={spell(value)}: {rule}; {way_out}")
        self._texts.setdefault(text, self._set_last([key, *_MENTIONED.findall(rule)]) if kind is str else None)

    def extend(self, texts: Sequence[str]) -> None:
        """Adds problems that are texts already. One that is there stays once."""
        self._texts |= dict.fromkeys(texts)

    @property
    def texts(self) -> list[str]:
        """The problems in the order in which they were added; those that one setting causes are one.

        Joins the reasons of a setting that breaks several rules. Omits what it breaks for other keys.
        """
        groups: dict[str, list[str]] = {}
        for text, cause in self._texts.items():
            groups.setdefault(cause or text, []).append(text)
        return [self._joined(cause, texts) for cause, texts in groups.items()]

    def _joined(self, cause: str, texts: list[str]) -> str:
        own = [text for text in texts if text.startswith(f"{cause}=")]
        first, *rest = own or texts
        return ". Also: ".join([first, *(text.partition(": ")[2] if own else text for text in rest)]) if rest else first

    def _set_last(self, keys: Sequence[str]) -> str:
        return min(keys, key=lambda key: self._rank(self._origins.get(key, "")))

    def _rank(self, origin: str) -> int:
        if origin.startswith(COMMAND_LINE):
            return 0
        return self._ranks.get(origin.partition(":")[0], len(self._ranks) + 1)


def value_at(config: object, key: str) -> object:
    """The value of a dotted key, such as `data.train.datasets[0].repeat`; None also where its section is null."""
    value: object = config
    for name in _PART.findall(key):
        if value is None:
            return None
        value = value[name] if isinstance(value, dict) else value[int(name)] if isinstance(value, list) else getattr(value, name)
    return value


def spell(value: object) -> str:
    """A value as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def hide(config: Config, faults: Mapping[str, str]) -> Config:
    """A copy of a config in which reading one of the keys of `faults` raises NotKnown with the key that is at fault.

    Below a section that is null, reading that section raises it. A key that the schema lacks hides nothing.
    """
    hidden = copy.deepcopy(config) if faults else config
    for key, fault in faults.items():
        section: object = hidden
        name, *rest = key.split(".")
        while rest and dataclasses.is_dataclass(inner := vars(section).get(name)):
            section, name = inner, rest.pop(0)

        def read(_: object, fault: str = fault) -> NoReturn:
            raise NotKnown(fault)

        if name in vars(section):
            kind = type(section)
            object.__setattr__(section, "__class__", type(kind.__name__, (kind,), {name: property(read)}))
    return hidden


def prefix_of(model: ModelName) -> str:
    """Returns the prefix of a model's keys in messages: "policy.", "value.", "teacher.", or one of several teachers."""
    role, _, name = model.partition(":")
    return f"on_policy_distillation, teacher {name}: " if name else {"critic": "value."}.get(role, f"{role}.")


def in_section(text: str, model: ModelName) -> str:
    """A problem of section `policy` as one of a model's section: begins with a key of that, and names others of it."""
    prefix = prefix_of(model)
    inside = prefix if prefix.endswith(".") else ""
    return type(text)(_KEY_OF_POLICY.sub(lambda match: inside if match.start() else prefix, text))
