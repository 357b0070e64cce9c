# SPDX-License-Identifier: Apache-2.0
"""Config files as settings: which key is set to what, and where. Knows YAML, not the schema."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from omegaconf._yaml import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

import mrl
from conversion.files.reading import read_file
from mrl.config.errors import REDACTED, ConfigError, Problem, spell, told
from mrl.env import is_hidden
from mrl.rooms import renamed_keys

logger = logging.getLogger(__name__)

SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader where PyYAML has it: ten times as fast."""

REPLACES = "_override_"
"""NeMo RL's mark in a section: with `true`, the section replaces the inherited one."""

MAX_FILE_BYTES = 4 << 20
"""Limit of a config file; the longest recipe has 60 KB."""
MAX_DEPTH = 64
MAX_NODES = 200_000
"""Limit of a file with its aliases written out; the longest recipe has a few thousand."""
MAX_DIGITS = 1000
MAX_DESCRIBED = 80
"""Characters of a value in a message: a chat template would fill the screen."""

_NEMO_RL_FOLDERS = ("examples/configs", "examples/nemo_gym")

_DIGITS = re.compile(r"[-+.:_0-9a-fA-FoxX]+")
_RELATIVE = re.compile(r"\$\{(\.+)([\w.]+)\}")
_ABSOLUTE = re.compile(r"\$\{([\w.]+)\}")

Key = tuple[str, ...]
"""A dotted key, split at its dots."""


@dataclass(frozen=True)
class Setting:
    """A value as written, interpolations unresolved, the file and line or override that set it; empty for a default."""

    value: object
    origin: str
    written_as: str = ""
    text: object = None
    """The value with its numbers and truth values as the texts that are written; None where nobody wrote it."""


SELF = "_self_"
"""The config itself among its `defaults`."""

Settings = dict[Key, Setting]
"""Settings by leaf key; no key is the start of another."""


def split_key(dotted: str) -> Key:
    """The parts of a dotted key."""
    return tuple(dotted.split("."))


def packaged_configs() -> Path:
    """Folder of the configs that come with mrl: inside the package when installed, next to it in a checkout."""
    package = Path(mrl.__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def find_config(name: str | Path, asked_by: Path | None = None) -> Path:
    """The config file that `name` stands for: a path as given or in the working directory, else a packaged config.

    Of a path into NeMo RL's examples that is not there, the name decides, and a log line says so. `asked_by` is the
    file whose `defaults` name it.
    """
    for path in (Path(name), packaged_configs() / name):
        if os.path.isfile(path):
            return path.absolute()
    packaged_config = packaged_configs() / Path(name).name
    if Path(name).parent.as_posix().endswith(_NEMO_RL_FOLDERS) and os.path.isfile(packaged_config):
        logger.info("Config: %s is not here; taking %s, which comes with mrl", name, packaged_config)
        return packaged_config.absolute()
    if "=" in str(name):
        text = f"the first argument names the config, and {name} is an override: write CONFIG {name}"
        raise ConfigError([told(text, "file")])
    packaged = sorted(path.name for path in packaged_configs().glob("*.yaml"))
    folder = (asked_by or Path(name)).parent
    there = [str(path) if asked_by is None else path.name for path in sorted(folder.glob("*.yaml"))]
    near = get_close_matches(str(name), [*there, *packaged], n=1)
    asked = f"{asked_by}: defaults: " if asked_by is not None else ""
    raise ConfigError(
        [
            told(
                f"{asked}config {name}: no such file in {folder.absolute()}, and no packaged config of that name; "
                f"packaged are {', '.join(packaged) or 'none'}" + (f"; the nearest is {near[0]}" if near else ""),
                "file",
            )
        ]
    )


def read_settings(path: Path, inherited_by: tuple[Path, ...] = ()) -> Settings:
    """Settings of a config file over those of its `defaults`, one or more file names relative to it; later ones win."""
    if path in inherited_by:
        chain = " -> ".join(file.name for file in (*inherited_by, path))
        raise ConfigError(
            [told(f"{path}: defaults={path.name} leads back to itself ({chain}); remove one of them", "file")]
        )
    content, places = _read_yaml(path)
    defaults = content.pop("defaults", None)
    own: Settings = {}
    for name, value in content.items():
        for key, setting in flatten(value, (name,), path.name).items():
            line, text = places.get(key, (0, None))
            setting = Setting(setting.value, f"{path.name}:{line}" if line else path.name, text=text)
            # A dot in a name at the top stands for a level, as on the command line.
            key = (*name.split("."), *key[1:])
            own[key] = setting
            if key[-1] == REPLACES and not isinstance(setting.value, bool):
                raise ConfigError(
                    [wrong("value", key, setting, "it marks a section to replace", "set it to true or false")]
                )
    own = rename(own)
    settings: Settings = {}
    bases = [] if defaults is None else defaults if isinstance(defaults, list) else [defaults]
    if bases[-1:] == [SELF]:  # as Hydra's files say that their own keys win
        bases = bases[:-1]
    if SELF in bases:
        raise ConfigError(
            [told(f"{path}: defaults: {SELF} comes last, as a file's own keys always win; move it", "file")]
        )
    for base in bases:
        beside = path.parent / str(base)
        overlay(
            settings,
            read_settings(beside if os.path.isfile(beside) else find_config(str(base), path), (*inherited_by, path)),
        )
    overlay(settings, own)
    return settings


def sections_of(settings: Settings) -> set[str]:
    """The sections in which settings were written: keys that PPO has in common with GRPO may stand below either."""
    return {(setting.written_as or key[0]).partition(".")[0] for key, setting in settings.items()}


def overlay(settings: Settings, top: Settings) -> None:
    """Merges `top` into `settings` in place: a section is merged unless marked to replace, anything else replaced."""
    replaced = [key[:-1] for key, setting in top.items() if key[-1] == REPLACES and setting.value is True]
    for other in [other for other in settings if any(other[: len(section)] == section for section in replaced)]:
        del settings[other]
    for key, setting in top.items():
        if key[-1] == REPLACES:
            continue
        below = [other for other in settings if other[: len(key)] == key]
        if setting.value == {} and any(len(other) > len(key) for other in below):
            continue
        above = [other for other in settings if len(other) < len(key) and key[: len(other)] == other]
        for other in (*below, *above):
            del settings[other]
        settings[key] = setting


def describe(key: Key, setting: Setting) -> str:
    """A setting as a message names it: key, value and origin."""
    origin = f" ({setting.origin})" if setting.origin else ""
    return f"{setting.written_as or '.'.join(key)}={_shown(key, setting)}{origin}"


def wrong(id: str, key: Key, setting: Setting, rule: object, way_out: str = "") -> Problem:
    """A problem of a setting, which it names as `describe` does. `rule` may be an error whose text has the way out,
    too.
    """
    if not way_out:
        rule, _, way_out = str(rule).partition("; ")
    name, shown = setting.written_as or ".".join(key), _shown(key, setting)
    return Problem(id, name, shown, str(rule), way_out, origin=setting.origin, says_origin=True)


def _shown(key: Key, setting: Setting) -> str:
    is_secret = is_hidden(".".join(key), setting.value) and setting.value not in (None, {})
    return REDACTED if is_secret else shorten(setting.value)


def shorten(value: object) -> str:
    """A value as messages write it."""
    text = spell(value)
    return text if len(text) <= MAX_DESCRIBED and "\n" not in text else repr(text[:MAX_DESCRIBED])[1:-1] + "..."


def _read_yaml(path: Path) -> tuple[dict[str, object], dict[Key, tuple[int, object]]]:
    """Reads a YAML file, interpolations unresolved, and the line of each key with the text of its value."""
    try:
        text = read_file(path, MAX_FILE_BYTES).decode()
        check_yaml(text)
        loader = get_yaml_loader()(text)  # OmegaConf's: for PyYAML's, 1e-5 is a text
        node = loader.get_single_node()
        loaded = loader.construct_document(node) if node else {}
        content = (
            OmegaConf.to_container(OmegaConf.create(loaded), resolve=False) if isinstance(loaded, dict) else loaded
        )
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark is not None else path
        reason = getattr(error, "problem", None) or one_line(error)
        if mark is not None and "cannot start any token" in reason and text[mark.index : mark.index + 1] == "\t":
            reason = "a tab, and YAML indents by spaces"
        fault = f"{place}: not readable as a config ({reason}); correct or replace the file"
        raise ConfigError([told(fault, "file")]) from error
    if not isinstance(content, dict):
        text = (
            f"{path}: a config is a mapping of sections, this is a {type(content).__name__}; see the packaged configs"
        )
        raise ConfigError([told(text, "file")])
    places: dict[Key, tuple[int, object]] = {}
    nodes: list[tuple[Key, yaml.Node | None]] = [((), node)]
    while nodes:
        key, node = nodes.pop()
        for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(name, yaml.ScalarNode):
                places[*key, name.value] = name.start_mark.line + 1, _written(value)
                nodes.append(((*key, name.value), value))
    return {str(name): value for name, value in content.items()}, places


def _written(node: yaml.Node) -> object:
    if isinstance(node, yaml.MappingNode):
        return {name.value: _written(value) for name, value in node.value if isinstance(name, yaml.ScalarNode)}
    return [_written(item) for item in node.value] if isinstance(node, yaml.SequenceNode) else node.value


def read_yaml(text: str) -> object:
    """The value of a YAML text of others. ValueError: it has none that can be loaded within seconds."""
    try:
        check_yaml(text)
        return yaml.load(text, SAFE_LOADER)
    except yaml.YAMLError as error:
        raise ValueError(one_line(error)) from error


def check_yaml(text: str) -> None:
    """Raises ValueError or yaml.YAMLError unless a YAML text can be loaded within seconds."""
    # Parsing gives one event after the other. Loading recurses, and writes out every alias.
    sizes: dict[str, int] = {}
    opened: list[tuple[str | None, int]] = [(None, 0)]
    for event in yaml.parse(text, Loader=SAFE_LOADER):
        size = 0
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = opened.pop()
            sizes |= {anchor: size} if anchor else {}
        elif isinstance(event, yaml.AliasEvent):
            size = sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
            if len(event.value) > MAX_DIGITS and not event.style and _DIGITS.fullmatch(event.value):
                raise ValueError(
                    f"a number of {len(event.value):,} digits at line {event.start_mark.line + 1}; write a smaller one"
                )
        outer, count = opened[-1]
        opened[-1] = outer, count + size
        if len(opened) > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep at line {event.start_mark.line + 1}; write it flatter")
        if count + size > MAX_NODES:
            raise ValueError(f"more than {MAX_NODES:,} values with its aliases written out; write fewer")


def rename(flat: Settings) -> Settings:
    """Renames settings, and the references in them, to their present names.

    Raises:
        ConfigError: both names of one key are set, to two values.
    """
    renamed: Settings = {}
    for key, setting in flat.items():
        value, dotted = setting.value, ".".join(key)
        if isinstance(value, str):
            value = _RELATIVE.sub(
                lambda match, key=key: "${" + ".".join((*key[: -len(match[1])], match[2])) + "}", value
            )
            value = _ABSOLUTE.sub(lambda match: "${" + renamed_keys().get(match[1], match[1]) + "}", value)
        name = renamed_keys().get(dotted)
        setting = replace(setting, value=value, written_as=dotted if name else "")
        target = split_key(name) if name else key
        if (other := renamed.get(target)) is not None and other.value != setting.value:
            raise ConfigError([two_names(target, other, setting)])
        renamed[target] = setting
    return renamed


def two_names(key: Key, first: Setting, second: Setting) -> Problem:
    """The problem of a key that is set by two of its names."""
    both, name = f"{describe(key, first)} and {describe(key, second)}", ".".join(key)
    return told(f"{both}: two names of {name} with two values; keep one of them", "two-names")


def flatten(value: object, key: Key, origin: str, text: object = None) -> Settings:
    """The settings of nested mappings, `key` in front of each key. `text` is `Setting.text` of the whole."""
    if not isinstance(value, dict) or not value:
        return {key: Setting(value, origin, text=text)}
    settings: Settings = {}
    texts = text if isinstance(text, dict) else {}
    for name, inner in value.items():
        settings |= flatten(inner, (*key, str(name)), origin, texts.get(name))
    return settings


def one_line(error: Exception) -> str:
    """The text of an error without line breaks."""
    return " ".join(str(error).split())
