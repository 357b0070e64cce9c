"""NeMo RL's dialect: what becomes of keys that have another name, another place or no meaning here, and the report of it.

Every key of NeMo RL is a field of the schema or stands in exactly one table of tables.yaml. docs/config.md shows the tables.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path

from mrl import env
from mrl.config.dialect.rules import REWRITTEN, TRANSLATED_SECTIONS, translate
from mrl.config.dialect.tables import FOREIGN, RENAMED, TRANSLATED, VALUES, Foreign
from mrl.config.files import COMMAND_LINE, Key, Setting, Settings, describe, find_prompt_file

logger = logging.getLogger(__name__)

DIALECT_KEYS = frozenset([*FOREIGN, *TRANSLATED, *REWRITTEN, *RENAMED])
"""Every key that is accepted in a config beside those of the schema."""

PROMPT_FILES = ("prompt_file", "system_prompt_file")
HF_HOME = "${oc.env:HF_HOME}"

SECTION_DEPTH = 2
"""Parts of a key that name its section in the report: `policy.dtensor_cfg`, `grpo`."""


@dataclass(frozen=True)
class WithoutEffect:
    """A setting that changes nothing, and why."""

    key: Key
    setting: Setting
    reason: str


@dataclass
class Migration:
    """What a config said in NeMo RL's terms, and what became of it: one line per key, with its origin."""

    renamed: list[str] = field(default_factory=list)
    translated: list[str] = field(default_factory=list)
    without_effect: list[WithoutEffect] = field(default_factory=list)

    def sections(self) -> dict[str, list[str]]:
        """The lines by what became of the keys, empty groups left out."""
        groups = {"renamed": self.renamed, "translated": self.translated, "without effect": _by_section(self.without_effect)}
        return {title: lines for title, lines in groups.items() if lines}

    def log(self) -> None:
        """Logs what was renamed and translated line by line, and of what has no effect only the number."""
        for line in (*self.renamed, *self.translated):
            logger.info("Config: %s", line)
        if self.without_effect:
            logger.info("Config: %d keys have no effect here; `--check` lists them with the reasons", len(self.without_effect))


def name_dataset_lists(settings: Settings) -> None:
    """Moves a list at `data.train` or `data.validation` to the key `datasets` below, in place."""
    for key in (("data", "train"), ("data", "validation")):
        if key in settings and isinstance(settings[key].value, list):
            settings[(*key, "datasets")] = settings.pop(key)


def use_hf_home(settings: Settings) -> None:
    """Writes out HF_HOME where that variable is not set, in place: the folder that the Hugging Face libraries use then."""
    for key, setting in settings.items():
        if isinstance(setting.value, str) and HF_HOME in setting.value and not env.HF_HOME.read():
            home = str(Path("~/.cache/huggingface").expanduser())
            settings[key] = replace(setting, value=setting.value.replace(HF_HOME, home))


def entry_of(key: Key) -> Foreign | None:
    """What the tables say about a key; None if it is not in them."""
    if (found := FOREIGN.get(".".join(key))) is not None:
        return found
    sections = (FOREIGN.get(".".join(key[:depth])) for depth in range(len(key) - 1, 0, -1))
    return next((entry for entry in sections if entry is not None and entry.is_section), None)


def is_foreign(setting_key: Key, value: object) -> bool:
    """Whether a setting belongs to the dialect alone: a key of its tables, or an empty section of them."""
    dotted = ".".join(setting_key)
    if entry_of(setting_key) is not None or is_translated(setting_key):
        return True
    return value in (None, {}) and any(known.startswith(f"{dotted}.") for known in DIALECT_KEYS)


def is_translated(key: Key) -> bool:
    """Whether other keys take the place of this one."""
    dotted = ".".join(key)
    return dotted in TRANSLATED or dotted in REWRITTEN or dotted.startswith(tuple(f"{section}." for section in TRANSLATED_SECTIONS))


def migrate(settings: Settings, value_of: Callable[[str], object], problems: list[str]) -> tuple[Settings, Migration]:
    """The settings that the schema takes, and the report. `value_of` resolves a key of `settings`; problems are added to `problems`."""
    report = Migration()
    report.renamed += [f"{describe(key, setting)} -> {'.'.join(key)}" for key, setting in settings.items() if setting.written_as]
    translation = translate(settings, value_of)
    report.translated += translation.lines
    problems += translation.problems
    _report_dropped(settings, translation.dropped, report)
    kept: Settings = {}
    for key, setting in settings.items():
        if key in translation.dropped or is_translated(key):
            continue
        if (entry := entry_of(key)) is not None:
            _judge(key, setting, entry, value_of, report, problems)
        elif not is_foreign(key, setting.value):
            kept[key] = _new_value(key, setting, report)
    return kept | translation.settings, report


def _new_value(key: Key, setting: Setting, report: Migration) -> Setting:
    old = setting.value
    new = VALUES.get(".".join(key), {}).get(old, old) if isinstance(old, Hashable) else old
    if key[0] == "data" and key[-1] in PROMPT_FILES and isinstance(old, str):
        new = find_prompt_file(old)
    if new == old:
        return setting
    report.translated.append(f"{describe(key, setting)} -> {new}")
    return Setting(new, setting.origin)


def _judge(key: Key, setting: Setting, entry: Foreign, value_of: Callable[[str], object], report: Migration, problems: list[str]) -> None:
    # What has no effect at any value need not be an expression that can be resolved here.
    value = setting.value if entry.same is None else value_of(".".join(key))
    same = [value_of(other[2:-1]) if isinstance(other, str) and other.startswith("${") else other for other in entry.same or ()]
    if entry.same is None or value in same:
        report.without_effect.append(WithoutEffect(key, setting, entry.reason))
    else:
        problems.append(f"{describe(key, Setting(value, setting.origin))}: {entry.reason}; {entry.way_out}")


def _report_dropped(settings: Settings, dropped: set[Key], report: Migration) -> None:
    for key, setting in settings.items():
        if key in dropped and setting.value not in (None, {}):
            active = "policy.dtensor_cfg" if key[:2] == ("policy", "megatron_cfg") else "policy.megatron_cfg"
            report.without_effect.append(WithoutEffect(key, setting, f"{active} is the backend that is enabled"))


def _by_section(entries: list[WithoutEffect]) -> list[str]:
    """One line for each entry, and one for all those of a section that have one reason and stand in files: a command line expects more."""
    groups: dict[object, list[WithoutEffect]] = {}
    for entry in entries:
        is_alone = entry.setting.origin == COMMAND_LINE
        groups.setdefault(entry.key if is_alone else (entry.key[:SECTION_DEPTH], entry.reason), []).append(entry)
    lines = []
    for group in groups.values():
        first = group[0]
        shared = ".".join(os.path.commonprefix([entry.key[:-1] for entry in group]))
        lines.append(f"{describe(first.key, first.setting) if len(group) == 1 else f'{shared}: {len(group)} keys'}: {first.reason}")
    return lines
