# SPDX-License-Identifier: Apache-2.0
"""Problems of a config as data, the error that raises them, and values that they leave unknown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from mrl.config.schema.keys import KEYS, SCHEMA
from mrl.config.schema.policy import PolicyConfig
from mrl.config.schema.run import RunConfig
from mrl.env import is_hidden
from mrl.phases import ModelName

Kind = Literal["refused", "to be provided", "not checked"]

REDACTED = "<redacted>"
COMMAND_LINE = "command line"
FROM = ", from "
"""Stands in the origin of a setting before the key that the user wrote, where that is another one."""

_MENTIONED = re.compile(r"\b[a-z_]+(?:\.\w+)+(?==)")
_PART = re.compile(r"[^.\[\]]+")
_OF_POLICY = SCHEMA.children["policy"].children
_PLACE = re.compile(r"(.+?):(\d+)(?=,|$)")


@dataclass(frozen=True)
class Problem:
    """A fault of a config, its files or this machine. `str` gives what users read: `key=value: rule; way out`."""

    id: str = field(compare=False)
    """Stable name of the rule: its group and the key of the schema, such as `batches/grpo.num_prompts_per_step`."""
    key: str
    """The key as it was written; "" if the fault is none of a key."""
    value: str | None
    """The value as YAML writes it; None if it is not told."""
    rule: str
    """The broken rule. Where it begins with the key, the text begins with it."""
    way_out: str = ""
    kind: Kind = "refused"
    """to be provided: this machine lacks a file, a folder or a disk. not checked: something is unknown that
    rules need.
    """
    origin: str = field(default="", compare=False)
    """Place where the key was set: `file:line`, or the command line."""
    says_origin: bool = False
    also: tuple[Problem, ...] = ()
    """Other faults that the same setting causes."""

    @property
    def sentence(self) -> str:
        return f"{self.rule}; {self.way_out}" if self.way_out else self.rule

    def __str__(self) -> str:
        value = "" if self.value is None else f"={self.value}"
        origin = f" ({self.origin})" if self.origin and (self.says_origin or FROM in self.origin) else ""
        is_named = not self.key or self.rule.startswith(f"{self.key} ")
        start = "" if is_named else f"{self.key}{value}{origin}: "
        others = [other.sentence if other.key == self.key else str(other) for other in self.also]
        return ". Also: ".join([start + self.sentence, *others])

    def as_json(self) -> dict[str, object]:
        """The problem as `--check --json` prints it; `file` and `line` are null where no file sets the key."""
        place = _PLACE.match(self.origin)
        names = ("id", "kind", "key", "value", "rule", "way_out")
        return {
            **{name: getattr(self, name) for name in names},
            "file": place and place[1],
            "line": place and int(place[2]),
            "text": str(self),
            "also": [other.as_json() for other in self.also],
        }


def told(text: object, id: str, kind: Kind = "refused") -> Problem:
    """A problem of no single key, such as an exception that says all of it."""
    return Problem(id, "", None, str(text), kind=kind)


def is_required(key: str) -> Problem:
    """The problem of a key that has to be set and is not."""
    rule = f"{key} is required and has no default"
    return Problem("required", key, None, rule, f"set it in the config file or as {key}=VALUE")


class ConfigError(ValueError):
    """A config is wrong. The text has one problem a line."""

    def __init__(self, problems: Iterable[Problem | str]) -> None:
        """Texts are problems of no single key."""
        self.problems = tuple(told(problem, "run") if isinstance(problem, str) else problem for problem in problems)
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return ConfigError, (self.problems,)


class NotKnown(Exception):
    """A rule needs a value that could not be read or resolved."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"{key} is not known")


class Problems:
    """Collects the problems of a config, or of the section of one of its models."""

    def __init__(
        self, config: RunConfig, origins: Mapping[str, str] = MappingProxyType({}), model: ModelName = "policy"
    ) -> None:
        """Texts quote values of `config`. `origins`: where keys were set, inherited files first.

        Rules of every model's section read `section`, and write its keys with `at` in front.
        """
        self._config, self._origins, self.model = config, origins, model
        self._prefix = prefix_of(model)
        self.at = self._prefix if self._prefix.endswith(".") else ""
        files = (origin.partition(":")[0] for origin in origins.values() if not origin.startswith(COMMAND_LINE))
        self._ranks = {place: rank for rank, place in enumerate(reversed(dict.fromkeys(files)), start=1)}
        self._causes: dict[Problem, str | None] = {}
        self.group = ""
        """Name of the rules that are applied at present, with which ids begin."""

    @property
    def section(self) -> PolicyConfig:
        """The model's keys, in the form of the policy's."""
        return self._config.policy if self.model == "policy" else self._config.model(self.model)

    def name(self, key: str) -> str:
        """A key as problems name it. Rules may write it as one of `policy`."""
        rest = self._rest(key)
        return key if rest is None else self._prefix + rest

    def is_of_section(self, problem: Problem) -> bool:
        return problem.key.startswith(self._prefix)

    def _rest(self, key: str) -> str | None:
        """The part of a key below the model's section; None for a key of the run."""
        is_inside = key.startswith(self._prefix) or (not self.at and key.partition(".")[0] in _OF_POLICY)
        return key.removeprefix(self._prefix) if is_inside else None

    def _value(self, key: str) -> object:
        rest = self._rest(key)
        return value_at(self._config, key) if rest is None else value_at(self.section, rest)

    def _origin(self, key: str) -> str:
        rest = self._rest(key)
        names = (key,) if rest is None else (self._prefix + rest, f"policy.{rest}")
        return next((self._origins[name] for name in names if name in self._origins), "")

    def add(self, key: str, rule: str, way_out: str, kind: Kind = "refused", *, others: Sequence[str] = ()) -> None:
        """Adds a problem with the value of a dotted key.

        With `others`, keys that break the rule as well, the rule says by itself what is wrong, and the text begins with
        the key that the user set last: on the command line, in the file, in a file that it inherits.
        """
        last = self._set_last([key, *others])
        value = self._value(last)
        shown = REDACTED if is_hidden(last) and isinstance(value, str) else spell(value)
        problem = Problem(self._id(key), self.name(last), shown, rule, way_out, kind, self._origin(last))
        cause = self.name(self._set_last([last, *_MENTIONED.findall(rule)])) if kind == "refused" else None
        self._causes.setdefault(problem, cause)

    def tell(self, key: str, value: object, rule: object, way_out: str = "", kind: Kind = "refused") -> None:
        """Adds a problem with a `value` that is told apart, or none; other problems are not joined to it.

        `rule` may be an error whose text has the way out, too.
        """
        shown = None if value is None else str(value)
        if not way_out:
            rule, _, way_out = str(rule).partition("; ")
        self.extend([Problem(self._id(key), self.name(key), shown, str(rule), way_out, kind, self._origin(key))])

    def extend(self, problems: Iterable[Problem]) -> None:
        """Adds problems that are complete. One that is there stays once."""
        self._causes |= dict.fromkeys(problems)

    @property
    def merged(self) -> list[Problem]:
        """The problems in the order in which they were added; those that one setting causes are one.

        Joins the reasons of a setting that breaks several rules. Omits what it breaks for other keys.
        """
        groups: dict[object, list[Problem]] = {}
        for problem, cause in self._causes.items():
            groups.setdefault(cause or problem, []).append(problem)
        merged = []
        for cause, problems in groups.items():
            first, *rest = [problem for problem in problems if problem.key == cause] or problems
            merged.append(replace(first, also=tuple(rest)) if rest else first)
        return merged

    def _id(self, key: str) -> str:
        """The id of a rule about `key`, without indices and names that users give."""
        rest = self._rest(key)
        parts = re.sub(r"\[\d+\]", "", key if rest is None else f"policy.{rest}").split(".")
        beginnings = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        known = next((beginning for beginning in beginnings if beginning in KEYS), ".".join(parts))
        return "/".join([*self.group.replace(" ", "-").replace("'", "").split(), known])

    def _set_last(self, keys: Sequence[str]) -> str:
        return min(keys, key=lambda key: self._rank(self._origin(key)))

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
        value = (
            value[name]
            if isinstance(value, dict)
            else value[int(name)]
            if isinstance(value, list)
            else getattr(value, name)
        )
    return value


def spell(value: object) -> str:
    """A value as YAML writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def prefix_of(model: ModelName) -> str:
    """The prefix of a model's keys in messages: "policy.", "value.", "teacher.", or one of several teachers."""
    role, _, name = model.partition(":")
    return f"on_policy_distillation, teacher {name}: " if name else {"critic": "value."}.get(role, f"{role}.")
