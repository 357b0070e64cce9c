# SPDX-License-Identifier: Apache-2.0
"""Config files and command-line overrides as settings: which key is set to what, and where. Knows YAML, not the schema."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import mrl
from conversion.files.reading import read_file
from mrl.config.dialect.tables import RENAMED, SAFE_LOADER
from mrl.config.errors import COMMAND_LINE, REDACTED, ConfigError, spell
from mrl.env import SECRET_NAME

logger = logging.getLogger(__name__)

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
# Parts of a value: quoted texts, references, keys that a value follows without a space, and single characters.
_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_PART = re.compile(rf"{_QUOTED}|\$\{{[^{{}}]*\}}|[\w.-]+:(?=[^\s/]|/[^/])|\s+|.", re.DOTALL)
# YAML takes them for numbers: of base 8, 16 and 60.
_TEXT_TO_HYDRA = re.compile(r"[-+]?0[\d_]+|[-+]?0[xob][\da-fA-F_]+|[-+]?\d+(:\d+)+(\.\d*)?")

Key = tuple[str, ...]
"""A dotted key, split at its dots."""


@dataclass(frozen=True)
class Setting:
    """A value as written, interpolations unresolved, and the file and line or the override that gave it; empty for a default."""

    value: object
    origin: str
    written_as: str = ""


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


def find_config(name: str | Path) -> Path:
    """The config file that `name` stands for: a path as given or in the working directory, else the name of a packaged config.

    Of a path into NeMo RL's examples that is not there, the name decides, and a log line says so.
    """
    for path in (Path(name), packaged_configs() / name):
        if os.path.isfile(path):
            return path.absolute()
    packaged_config = packaged_configs() / Path(name).name
    if Path(name).parent.as_posix().endswith(_NEMO_RL_FOLDERS) and os.path.isfile(packaged_config):
        logger.info("Config: %s is not here; taking %s, which comes with mrl", name, packaged_config)
        return packaged_config.absolute()
    packaged = ", ".join(sorted(path.name for path in packaged_configs().glob("*.yaml"))) or "none"
    raise ConfigError([f"config {name}: no such file in {Path.cwd()}, and no packaged config of that name; packaged are {packaged}"])


def read_settings(path: Path, inherited_by: tuple[Path, ...] = ()) -> Settings:
    """Settings of a config file over those of its `defaults`, a file name or a list of them relative to the file; later ones win."""
    if path in inherited_by:
        chain = " -> ".join(file.name for file in (*inherited_by, path))
        raise ConfigError([f"{path}: defaults={path.name} leads back to itself ({chain}); remove one of them"])
    content, lines = _read_yaml(path)
    defaults = content.pop("defaults", None)
    own: Settings = {}
    for name, value in content.items():
        for key, setting in flatten(value, (name,), path.name).items():
            # A dot in a name at the top stands for a level, as on the command line.
            setting = Setting(setting.value, f"{path.name}:{lines[key]}" if key in lines else path.name)
            key = (*name.split("."), *key[1:])
            own[key] = setting
            if key[-1] == REPLACES and not isinstance(setting.value, bool):
                raise ConfigError([f"{describe(key, setting)}: it marks a section to replace; set it to true or false"])
    own = _rename(own)
    settings: Settings = {}
    for base in [] if defaults is None else defaults if isinstance(defaults, list) else [defaults]:
        beside = path.parent / str(base)
        overlay(settings, read_settings(beside if os.path.isfile(beside) else find_config(str(base)), (*inherited_by, path)))
    overlay(settings, own)
    return settings


def sections_of(settings: Settings) -> set[str]:
    """The sections in which settings were written: keys that PPO has in common with GRPO may stand below either."""
    return {(setting.written_as or key[0]).partition(".")[0] for key, setting in settings.items()}


def overlay(settings: Settings, top: Settings) -> None:
    """Merges the settings of `top` into `settings` in place: a section is merged unless it is marked to replace, anything else replaced."""
    replaced = [key[:-1] for key, setting in top.items() if key[-1] == REPLACES and setting.value is True]
    for other in [other for other in settings if any(other[: len(section)] == section for section in replaced)]:
        del settings[other]
    for key, setting in top.items():
        if key[-1] == REPLACES:
            continue
        below = [other for other in settings if other[: len(key)] == key]
        if setting.value == {} and below:
            continue
        above = [other for other in settings if len(other) < len(key) and key[: len(other)] == other]
        for other in (*below, *above):
            del settings[other]
        settings[key] = setting


def apply_overrides(settings: Settings, overrides: list[str]) -> list[str]:
    """Applies `a.b=c`, `+a.b=c` (new key), `++a.b=c` (new or not), `~a.b` (back to the default) in order, in place.

    Returns the problems found. Whether a key exists at all is the schema's business.
    """
    problems = []
    for override in overrides:
        try:
            problem = _apply_override(settings, override)
        except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
            problem = f"override {override}: the value cannot be read ({_one_line(error)}); correct or quote it"
        problems += [problem] if problem else []
    return problems


def _apply_override(settings: Settings, override: str) -> str | None:
    body = override.lstrip("+~")
    sign = override[: len(override) - len(body)]
    name, equals, text = body.partition("=")
    if sign not in ("", "+", "++", "~") or (sign != "~" and not equals) or not all(part.strip() == part != "" for part in name.split(".")):
        return f"override {override}: write key=value, +key=value, ++key=value or ~key, with dots between the parts of a key"
    key = split_key(RENAMED.get(name, name))
    below = [other for other in settings if other[: len(key)] == key]
    if sign == "~":
        if not below:
            return f"override {override}: no config file sets {name}, so there is nothing to remove; drop the override"
        if equals and [settings[other].value for other in below] != [_parse_value(text)]:
            return f"override {override}: {name} has another value; write ~{name} to remove it whatever it is"
        for other in below:
            del settings[other]
        return None
    if sign == "+" and below:
        return f"override {override}: {name} is already set by {settings[below[0]].origin}; write {name}={text} to replace it"
    new = _rename(flatten(_parse_value(text), split_key(name), COMMAND_LINE))
    for written, setting in new.items():
        other = settings.get(written)
        if other is not None and other.origin == COMMAND_LINE and other.written_as != setting.written_as and other.value != setting.value:
            return _two_names(written, other, setting)
    overlay(settings, new)
    return None


def describe(key: Key, setting: Setting) -> str:
    """A setting as a message names it: key, value and origin."""
    text = REDACTED if SECRET_NAME.search(key[-1]) and isinstance(setting.value, str) else shorten(setting.value)
    origin = f" ({setting.origin})" if setting.origin else ""
    return f"{setting.written_as or '.'.join(key)}={text}{origin}"


def shorten(value: object) -> str:
    """A value as messages write it."""
    text = spell(value)
    return text if len(text) <= MAX_DESCRIBED and "\n" not in text else repr(text[:MAX_DESCRIBED])[1:-1] + "..."


def _parse_value(text: str) -> object:
    """The value of an override, as Hydra reads it: of YAML numbers, truth values, null, lists and mappings; else a text as it stands."""
    if re.fullmatch(_QUOTED, text, re.DOTALL):
        return text[1:-1].replace(f"\\{text[0]}", text[0])
    if text.startswith(("{", "[")):
        text = _spaced(text)
    elif text == "" or "\n" in text or " #" in text or _TEXT_TO_HYDRA.fullmatch(text):
        return text
    check_yaml(text)
    # OmegaConf's YAML, not PyYAML's, for which 1e-5 is a string.
    parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    assert isinstance(parsed, dict)
    value = parsed["value"]
    return text if isinstance(value, dict | list) and not text.startswith(("{", "[")) else value


def _spaced(text: str) -> str:
    """`{a:1}`, which Hydra takes for a mapping, as `{a: 1}`, which YAML does."""
    made, opened, is_key_next = "", "", False
    for part in _PART.findall(text):
        made += f"{part} " if is_key_next and part.endswith(":") else part
        opened = opened[:-1] if part in "]}" else opened + part if part in "[{" else opened
        if not part.isspace():
            is_key_next = opened.endswith("{") and part in "{,"
    return made


def _read_yaml(path: Path) -> tuple[dict[str, object], dict[Key, int]]:
    """Reads a YAML file, interpolations unresolved, and the line of each key."""
    try:
        text = read_file(path, MAX_FILE_BYTES).decode()
        check_yaml(text)
        loaded = OmegaConf.load(path)
        node = yaml.compose(text, Loader=SAFE_LOADER)
        content = OmegaConf.to_container(loaded, resolve=False)
    except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError([f"{path}: not readable as a config ({_one_line(error)}); correct or replace the file"]) from error
    if not isinstance(loaded, DictConfig) or not isinstance(content, dict):
        raise ConfigError([f"{path}: a config is a mapping of sections, this is a {type(content).__name__}; see the packaged configs"])
    lines: dict[Key, int] = {}
    nodes: list[tuple[Key, yaml.Node | None]] = [((), node)]
    while nodes:
        key, node = nodes.pop()
        for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(name, yaml.ScalarNode):
                lines[*key, name.value] = name.start_mark.line + 1
                nodes.append(((*key, name.value), value))
    return {str(name): value for name, value in content.items()}, lines


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
                raise ValueError(f"a number of {len(event.value):,} digits at line {event.start_mark.line + 1}; write a smaller one")
        outer, count = opened[-1]
        opened[-1] = outer, count + size
        if len(opened) > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep at line {event.start_mark.line + 1}; write it flatter")
        if count + size > MAX_NODES:
            raise ValueError(f"more than {MAX_NODES:,} values with its aliases written out; write fewer")


def _rename(flat: Settings) -> Settings:
    """Renames settings, and the references in them, to their present names."""
    renamed: Settings = {}
    for key, setting in flat.items():
        value, dotted = setting.value, ".".join(key)
        if isinstance(value, str):
            value = _RELATIVE.sub(lambda match, key=key: "${" + ".".join((*key[: -len(match[1])], match[2])) + "}", value)
            value = _ABSOLUTE.sub(lambda match: "${" + RENAMED.get(match[1], match[1]) + "}", value)
        name = RENAMED.get(dotted)
        setting = Setting(value, setting.origin, dotted if name else "")
        target = split_key(name) if name else key
        if (other := renamed.get(target)) is not None and other.value != setting.value:
            raise ConfigError([_two_names(target, other, setting)])
        renamed[target] = setting
    return renamed


def _two_names(key: Key, first: Setting, second: Setting) -> str:
    return f"{describe(key, first)} and {describe(key, second)}: two names of {'.'.join(key)} with two values; keep one of them"


def flatten(value: object, key: Key, origin: str) -> Settings:
    """The settings of nested mappings, `key` in front of each key."""
    if not isinstance(value, dict) or not value:
        return {key: Setting(value, origin)}
    settings: Settings = {}
    for name, inner in value.items():
        settings |= flatten(inner, (*key, str(name)), origin)
    return settings


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
