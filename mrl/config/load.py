"""YAML files and overrides in, a typed `RunConfig` out, and a report of what was said in other words than ours.

Rules between keys are in `mrl.config.rules.checks`, NeMo RL's words in `mrl.config.dialect.translate`.
"""

from __future__ import annotations

import copy
import difflib
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from mrl.config.dialect.data import name_dataset_lists
from mrl.config.dialect.evaluation import is_evaluation, place_evaluation
from mrl.config.dialect.translate import DIALECT_KEYS, Migration, is_foreign, migrate
from mrl.config.errors import ConfigError
from mrl.config.files import Key, Setting, Settings, apply_overrides, describe, find_config, read_settings
from mrl.config.schema.run import KEYS, RunConfig, section_of
from mrl.config.secrets import note_secrets

Section = TypeVar("Section")
Number = int | float

_hints = functools.cache(get_type_hints)

ALGORITHMS: tuple[str, ...] = get_args(_hints(RunConfig)["algorithm"])

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")

# NeMo RL's resolvers. Whole numbers stay whole, because most of what is derived are sizes.
RESOLVERS: dict[str, Callable[[Number, Number], Number]] = {
    "equal": lambda a, b: a == b,
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "div": lambda a, b: a // b if a % b == 0 else a / b,
    "max": lambda a, b: max(a, b),
}


def load_config(name: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of the file that `find_config(name)` gives, with `overrides` applied in order: plain dataclasses, all values resolved.

    Raises:
        ConfigError: with every problem of the files, the overrides and the types at once.
    """
    return load_run(name, overrides)[0]


def load_run(name: str | Path, overrides: Sequence[str] = (), *, to_evaluate: bool = False) -> tuple[RunConfig, Migration]:
    """`load_config`, and what became of the keys that NeMo RL has and the schema has not. Its evaluation files are read `to_evaluate`.

    Raises:
        ConfigError: as `load_config`.
    """
    config, migration, problems = read_run(name, overrides, to_evaluate=to_evaluate)
    if config is None or problems:
        raise ConfigError(problems)
    return config, migration


def read_run(
    name: str | Path, overrides: Sequence[str] = (), *, to_evaluate: bool = False
) -> tuple[RunConfig | None, Migration, list[str]]:
    """`load_run` with the problems told instead of raised; the config is None if they leave values unknown.

    Raises:
        ConfigError: a file is missing or unreadable, or says how to evaluate and not how to train.
    """
    settings = read_settings(find_config(name))
    note_secrets((key.rpartition(".")[2], text) for key, _, text in (override.partition("=") for override in overrides))
    problems = apply_overrides(settings, list(overrides)) + choose_algorithm(settings)
    if is_evaluation(settings):
        if not to_evaluate:
            raise ConfigError([f"{name} says how to evaluate, and nothing of training; run `python -m mrl.evaluate {name}`"])
        place_evaluation(settings)
    name_dataset_lists(settings)
    note_secrets((key[-1], setting.value) for key, setting in settings.items())
    known: Settings = {}
    for key, setting in settings.items():
        if (problem := None if is_foreign(key, setting.value) else _misfit(key, setting)) is None:
            known[key] = setting
        else:
            problems.append(f"{describe(key, setting)}: {problem}")
    resolver = _Resolver(known, problems)
    refused: list[str] = []
    translated, migration = migrate(known, resolver, refused)
    tree = _typed_tree(known, translated, problems)
    unresolved: dict[Key, str] = {}
    config = _build(RunConfig, tree, (), unresolved, problems)
    problems += [f"{describe(key, translated[key])}: {reason}" for key, reason in unresolved.items() if key in translated]
    if not problems:  # a default fails because it follows a key that failed: news only where nothing else is
        problems = [f"{'.'.join(key)}: {reason}" for key, reason in unresolved.items()]
    return None if problems else config, migration, list(dict.fromkeys([*problems, *refused]))


def choose_algorithm(settings: Settings) -> list[str]:
    """Sets `algorithm`, if nothing sets it, to the one whose section is there; grpo wins. Returns the problem if two others are."""
    given = [name for name in ALGORITHMS if any(key[0] == name for key in settings)]
    if not given or ("algorithm",) in settings or "grpo" in given:
        return []
    if len(given) > 1:
        return [f"algorithm is not set, and there are sections of {' and '.join(given)}; set algorithm to one of them"]
    settings[("algorithm",)] = Setting(given[0], f"section {given[0]}")
    return []


class _Resolver:
    """The value of a dotted key as the settings give it, by the schema's defaults where they do not."""

    def __init__(self, settings: Settings, problems: list[str]) -> None:
        plain = OmegaConf.to_container(_defaults(), resolve=False)
        assert isinstance(plain, dict)
        for key, setting in settings.items():
            _put(plain, key, setting.value)
        self._tree = OmegaConf.create(plain)
        self._settings = settings
        self._problems = problems

    def __call__(self, dotted: str) -> object:
        try:
            value = OmegaConf.select(self._tree, dotted)
            return OmegaConf.to_container(value, resolve=True) if isinstance(value, Container) else value
        except (OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
            key = tuple(dotted.split("."))
            if key in self._settings:
                self._problems.append(f"{describe(key, self._settings[key])}: {_reason(error)}; correct the expression")
            return None


def _put(plain: dict[Any, Any], key: Key, value: object) -> None:
    for name in key[:-1]:
        if not isinstance(plain.get(name), dict):
            plain[name] = {}
        plain = plain[name]
    if value != {} or not isinstance(plain.get(key[-1]), dict):
        plain[key[-1]] = value


def _typed_tree(known: Settings, translated: Settings, problems: list[str]) -> DictConfig:
    """The schema's defaults with the translated settings put over them; one that does not fit is reported and left out.

    Of the others, those that expressions name stand beside them untyped.
    """
    tree = copy.deepcopy(_defaults())
    named = {name for setting in known.values() for name in _REFERENCE.findall(str(setting.value))}
    rest = {key: known[key] for name in sorted(named) if (key := tuple(name.split("."))) in known and key not in translated}
    for key, setting in (*rest.items(), *translated.items()):
        try:
            for depth in range(1, len(key)):
                if OmegaConf.select(tree, ".".join(key[:depth])) is None:
                    OmegaConf.update(tree, ".".join(key[:depth]), {}, force_add=True)
            OmegaConf.update(tree, ".".join(key), setting.value, force_add=True)
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            if key in translated:
                problems.append(f"{describe(key, setting)}: {_reason(error)}; correct the value")
    return tree


@functools.cache
def _defaults() -> DictConfig:
    """The schema as OmegaConf sees it, with our resolvers known. Building it takes longer than all else here."""
    for name, resolver in RESOLVERS.items():
        OmegaConf.register_resolver(name, resolver, replace=True)
    return OmegaConf.structured(RunConfig)


def _misfit(key: Key, setting: Setting) -> str | None:
    """Why a setting cannot go into the schema, as far as its key tells and OmegaConf would be too lenient; None if it can."""
    section: type = RunConfig
    for depth, name in enumerate(key):
        hints = _hints(section)
        if name not in hints:
            return f"no such key; the nearest is {nearest_key(_first_unknown(key))}"
        inner = section_of(hints[name])
        if inner is None:
            is_mapping = any(getattr(kind, "__origin__", kind) is dict for kind in (hints[name], *get_args(hints[name])))
            if depth + 1 < len(key) and not is_mapping:
                return f"{'.'.join(key[: depth + 1])} is a value and has no keys below it"
            return None if is_mapping else _misfit_value(hints[name], setting.value)
        section = inner
    if setting.value is None and type(None) in get_args(_hints(_parent(key))[key[-1]]):
        return None
    return None if setting.value == {} else f"a section; set one of its keys: {', '.join(_hints(section))}"


def _parent(key: Key) -> type:
    section: type = RunConfig
    for name in key[:-1]:
        section = section_of(_hints(section)[name]) or section
    return section


def _misfit_value(hint: object, value: object) -> str | None:
    kinds = get_args(hint) or (hint,)
    if isinstance(value, bool) and bool not in kinds:
        return "true and false do not fit here; write a value of the type that the key's manual names"
    fits = isinstance(value, bool) or type(value) in kinds or (isinstance(value, str) and "${" in value)
    return "must be true or false" if bool in kinds and not fits else None


def nearest_key(key: Key) -> str:
    """The known key that was most likely meant: a sibling spelt alike, the same name elsewhere, or the closest of all."""
    *parents, name = key
    prefix = "".join(f"{parent}." for parent in parents)
    known = _known_keys()
    siblings = list(dict.fromkeys(other.removeprefix(prefix).split(".")[0] for other in known if other.startswith(prefix)))
    if alike := difflib.get_close_matches(name, siblings, n=1, cutoff=0.7):
        return prefix + alike[0]
    if elsewhere := [other for other in known if name in other.split(".")]:
        return difflib.get_close_matches(prefix + name, elsewhere, n=1, cutoff=0.0)[0]
    return difflib.get_close_matches(prefix + name, known, n=1, cutoff=0.0)[0]


def _first_unknown(key: Key) -> Key:
    """The shortest beginning of a key that no known key begins with."""
    beginnings = (key[:depth] for depth in range(1, len(key)))
    return next((start for start in beginnings if not any(known.startswith(".".join(start) + ".") for known in _known_keys())), key)


@functools.cache
def _known_keys() -> list[str]:
    return [*KEYS, *sorted(DIALECT_KEYS - KEYS.keys())]


def _build(section: type[Section], tree: DictConfig, key: Key, unresolved: dict[Key, str], missing: list[str]) -> Section:
    """The section at `key` as a plain dataclass. What cannot be resolved or is missing is left out and told in the last two arguments."""
    values: dict[str, object] = {}
    for name, hint in _hints(section).items():
        inner, place = section_of(hint), (*key, name)
        dotted = ".".join(place)
        if inner is not None:
            values[name] = None if OmegaConf.select(tree, dotted) is None else _build(inner, tree, place, unresolved, missing)
            continue
        try:
            value = OmegaConf.select(tree, dotted, throw_on_missing=True)
            values[name] = OmegaConf.to_object(value) if isinstance(value, Container) else value
        except MissingMandatoryValue:
            missing.append(f"{dotted} is required and has no default; set it in the config file or as {dotted}=VALUE")
        except (OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
            unresolved[place] = f"{_reason(error)}; correct the expression"
    return section(**values)


def _reason(error: Exception) -> str:
    # OmegaConf appends the full key and the object's type on further lines.
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
