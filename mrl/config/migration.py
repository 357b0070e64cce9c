# SPDX-License-Identifier: Apache-2.0
"""Report of a config in another program's words, and the interface of that program's dialect."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from mrl import rooms
from mrl.config.errors import COMMAND_LINE, Problem
from mrl.config.files import Key, Setting, Settings, describe
from mrl.config.texts import counted

logger = logging.getLogger(__name__)

NUM_NAMED = 8
"""Keys of a section that a line names; a section of NeMo Gym's servers may have a hundred."""

Note = tuple[Key, Setting, str]


@dataclass
class Migration:
    """Report of a config's settings in NeMo RL's terms, and what became of them: one line per key, with its origin."""

    renamed: list[str] = field(default_factory=list)
    translated: list[str] = field(default_factory=list)
    without_effect: list[Note] = field(default_factory=list)
    """Settings that change nothing, and why."""
    different: list[Note] = field(default_factory=list)
    """Settings with which NeMo RL trains, judges, resumes or logs otherwise, and what mrl does."""

    def sections(self) -> dict[str, list[str]]:
        """Groups the lines by the fate of the keys, without empty groups."""
        others = [note for note in self.without_effect if not _is_override(note)]
        found = {"renamed": self.renamed, "translated": self.translated, "without effect": _lines(others)}
        return {title: lines for title, lines in found.items() if lines}

    def idle_overrides(self) -> list[str]:
        """The overrides of the command line that change nothing, and why: whoever wrote them expects something."""
        return [f"{line}; it has no effect" for line in _lines(filter(_is_override, self.without_effect))]

    def differences(self) -> list[str] | None:
        """The lines of `different`; None for a config without any key of NeMo RL's alone."""
        return _lines(self.different) if self.different or self.without_effect or self.sections() else None

    def log(self) -> None:
        """Logs differing keys and idle overrides line by line, and the numbers of all others in one line."""
        for line in self.idle_overrides():
            logger.warning("Config: %s", line)
        for line in self.differences() or ():
            logger.info("Config: other than in NeMo RL: %s", line)
        if found := {title: len(lines) for title, lines in self.sections().items()}:
            counts = ", ".join(f"{count} {title}" for title, count in found.items())
            logger.info("Config: NeMo RL's keys: %s; `--check` lists them", counts)


def _is_override(note: Note) -> bool:
    return note[1].origin == COMMAND_LINE


def _lines(notes: Iterable[Note]) -> list[str]:
    """A line for each note; one for all of a section with one reason."""
    groups: dict[object, list[Note]] = {}
    for key, setting, reason in notes:
        note = (key, setting, reason)
        group = key if _is_override(note) else (key[:2] if len(key) > 2 else key[:1], reason)
        groups.setdefault(group, []).append(note)
    lines = []
    for members in groups.values():
        key, setting, reason = members[0]
        common = os.path.commonprefix([other[:-1] for other, _, _ in members])
        names = [".".join(other[len(common) :]) for other, _, _ in members]
        listed = ", ".join(names[:NUM_NAMED]) + (" ..." if len(names) > NUM_NAMED else "")
        shared = f"{'.'.join(common)}: {counted(len(members), 'key')} ({listed})"
        lines.append(f"{describe(key, setting) if len(members) == 1 else shared}: {reason}")
    return lines


class Dialect(Protocol):
    """Functions that put another program's settings into the words of the schema: `mrl.nemo.dialect.translate`."""

    @property
    def DIALECT_KEYS(self) -> frozenset[str]: ...
    def find_media(self, settings: Settings) -> list[Problem]: ...
    def is_evaluation(self, settings: Settings) -> bool: ...
    def is_foreign(self, key: Key, value: object) -> bool: ...
    def migrate(
        self, settings: Settings, value_of: Callable[[str], object], problems: list[Problem], sections: Sequence[str]
    ) -> tuple[Settings, Migration]: ...
    def place_evaluation(self, settings: Settings) -> None: ...
    def use_own_forms(self, settings: Settings, folder: Path) -> None: ...


def dialect() -> Dialect:
    """The dialect that configs may be written in."""
    return rooms.dialect()
