# SPDX-License-Identifier: Apache-2.0
"""Settings and reports that the rules of NeMo RL's dialect read and write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mrl.config.errors import FROM, Problem, spell
from mrl.config.files import Key, Setting, Settings, describe, split_key, wrong
from mrl.config.migration import Note
from mrl.config.values import as_written


@dataclass
class Translation:
    """Result of the rules for the settings of a config. Rules name keys of any model as those of `policy`."""

    written: Settings
    resolve: Callable[[str], object]
    """The resolved value of a dotted key of `written`."""
    section: str = "policy"
    """The model's section to which the rules are applied."""
    settings: Settings = field(default_factory=dict)
    dropped: set[Key] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    without_effect: list[Note] = field(default_factory=list)
    """Keys that nobody takes here, and why."""
    different: list[Note] = field(default_factory=list)
    """Keys with which NeMo RL does something else, and what mrl does."""

    def name(self, key: str) -> str:
        """The key of this section for a key of `policy`; any other key unchanged."""
        return self.section + key.removeprefix("policy") if key.startswith("policy.") else key

    def given(self, key: str) -> Setting | None:
        """The setting of a dotted key, if the config has one."""
        return self.written.get(split_key(self.name(key)))

    def value_of(self, key: str) -> object:
        """The resolved value of a dotted key."""
        return self.resolve(self.name(key))

    def set(self, source: str, setting: Setting, target: str, value: object) -> None:
        """Sets `target` because of `source`, without a line of its own."""
        self.settings[split_key(self.name(target))] = Setting(value, f"{setting.origin}{FROM}{self.name(source)}")

    def put(self, source: str, setting: Setting, target: str, value: object) -> None:
        """Sets `target` because of `source`, and reports it."""
        self.set(source, setting, target, value)
        self.lines.append(f"{describe(split_key(self.name(source)), setting)} -> {self.name(target)}={spell(value)}")

    def put_same(self, source: str, target: str) -> None:
        """Puts the value of `source`, if that is set, at `target`."""
        if (setting := self.given(source)) is not None:
            value = self.value_of(source)
            self.put(
                source, setting, target, as_written(setting, split_key(target)) if value == setting.value else value
            )

    def differ(self, source: str, setting: Setting, how: str) -> None:
        """Reports that mrl reads `source` differently from NeMo RL, and how."""
        self.different.append((split_key(self.name(source)), setting, how))

    def refuse(self, source: str, setting: Setting, rule: str, way_out: str) -> None:
        """Reports that `source` cannot be translated."""
        self.problems.append(wrong("translated", split_key(self.name(source)), setting, rule, way_out))
