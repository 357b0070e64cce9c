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

from mrl.config.bounds import Number, find_long_expressions, of_numbers
from mrl.config.dialect.data import name_dataset_lists, use_hf_home
from mrl.config.dialect.evaluation import ask_only, is_evaluation, place_evaluation
from mrl.config.dialect.translate import DIALECT_KEYS, Migration, is_foreign, migrate
from mrl.config.errors import ConfigError
from mrl.config.files import Key, Setting, Settings, apply_overrides, describe, find_config, read_settings
from mrl.config.partial import hide
from mrl.config.schema.run import KEYS, RunConfig, section_of
from mrl.config.secrets import note_secrets, register_resolvers

Section = TypeVar("Section")

_hints = functools.cache(get_type_hints)

ALGORITHMS: tuple[str, ...] = get_args(_hints(RunConfig)["algorithm"])

MISSING_ALGORITHMS = {"ppo": "PPO", "distillation": "distillation", "on_policy_distillation": "distillation"}
"""Section of NeMo RL -> its algorithm."""

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")

# NeMo RL's resolvers. Whole numbers stay whole, because most of what is derived are sizes.
RESOLVERS: dict[str, Callable[[object, object], Number]] = {
    "equal": lambda a, b: a == b,
    "mul": of_numbers(lambda a, b: a * b),
    "add": of_numbers(lambda a, b: a + b),
    "div": of_numbers(lambda a, b: a // b if a % b == 0 else a / b),
    "max": of_numbers(max),
}


def load_config(name: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of the file that `find_config(name)` gives, with `overrides` applied in order: plain dataclasses, all values resolved.

    Raises:
        ConfigError: with every problem of the files, the overrides and the types at once.
    """
    return load_run(name, overrides)[0]


def load_run(name: str | Path, overrides: Sequence[str] = (), *, to_evaluate: bool = False) -> tuple[RunConfig, Migration]:
    """`load_config`, and what became of the keys that NeMo RL has and the schema has not. `to_evaluate`, the config only samples.

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
    """`load_run` with the problems told instead of raised. Values that they leave unknown are hidden; no config if that is the algorithm.

    Raises:
        ConfigError: a file is missing or unreadable, says how to evaluate and not how to train, or has expressions without end.
    """
    settings = read_settings(find_config(name))
    note_secrets((key.rpartition(".")[2], text) for key, _, text in (override.partition("=") for override in overrides))
    problems = apply_overrides(settings, list(overrides))
    if long := find_long_expressions({".".join(key): setting.value for key, setting in settings.items()}):
        raise ConfigError(long)
    if algorithm_problems := choose_algorithm(settings):
        return None, Migration(), [*problems, *algorithm_problems]
    if is_evaluation(settings):
        if not to_evaluate:
            raise ConfigError([f"{name} says how to evaluate, and nothing of training; run `python -m mrl.evaluate {name}`"])
        place_evaluation(settings)
    if to_evaluate:
        ask_only(settings)
    name_dataset_lists(settings)
    use_hf_home(settings)
    note_secrets((key[-1], setting.value) for key, setting in settings.items())
    known, unknown, unread = _sort_out(settings, problems)
    resolver = _Resolver(known | unknown, problems)
    refused: list[str] = []
    translated, migration = migrate(known, resolver, refused)
    tree = _typed_tree(known | unknown, translated, problems, unread)
    unresolved: dict[Key, str] = {}
    expressions = _expressions(tree)
    config = _build(RunConfig, tree, (), unresolved, problems, unread)
    for key, reason in unresolved.items():
        if key in translated and not expressions.get(".".join(key), frozenset()) & unread:
            problems.append(f"{describe(key, translated[key])}: {reason}")
    if not problems:  # a default fails because it follows a key that failed: news only where nothing else is
        problems = [f"{'.'.join(key)}: {reason}" for key, reason in unresolved.items()]
    faults = {key: key for key in (*unread, *(".".join(key) for key in unresolved))}
    while followers := {
        key: min(others & faults.keys()) for key, others in expressions.items() if key not in faults and others & faults.keys()
    }:
        faults |= {key: faults[other] for key, other in followers.items()}
    return None if "algorithm" in faults else hide(config, faults), migration, list(dict.fromkeys([*problems, *refused]))


def _sort_out(settings: Settings, problems: list[str]) -> tuple[Settings, Settings, set[str]]:
    """The settings that are good, those of unknown keys, and the keys whose values are not.

    Tells of every bad value, and once of every unknown section.
    """
    known: Settings = {}
    unknown: Settings = {}
    unread: set[str] = set()
    starts: dict[Key, list[Key]] = {}
    for key, setting in settings.items():
        if is_foreign(key, setting.value):
            known[key] = setting
        elif _is_unknown(key):
            unknown[key] = setting
            starts.setdefault(_first_unknown(key), []).append(key)
        elif (problem := _misfit(key, setting)) is not None:
            unread.add(".".join(key))
            problems.append(f"{describe(key, setting)}: {problem}")
        else:
            known[key] = setting
    for start, keys in starts.items():
        nearest, first = nearest_key(start), settings[keys[0]]
        hint = f"; the nearest is {nearest}" if nearest else ", and none that is spelt alike; docs/config.md lists them"
        if len(keys) == 1:
            problems.append(f"{describe(keys[0], first)}: no such key{hint}")
        else:
            problems.append(f"{'.'.join(start)} ({first.origin}): no such section, with {len(keys)} keys{hint}")
    return known, unknown, unread


def choose_algorithm(settings: Settings) -> list[str]:
    """Sets `algorithm`, if nothing sets it, to the one whose section is there; grpo wins.

    Returns the problem if two others are, or the section of an algorithm that mrl has not.
    """
    for key, setting in settings.items():
        if key[0] in MISSING_ALGORITHMS and setting.value not in (None, {}):
            return [f"{key[0]} ({setting.origin}): mrl has no {MISSING_ALGORITHMS[key[0]]}; algorithms are {', '.join(ALGORITHMS)}"]
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


def _typed_tree(known: Settings, translated: Settings, problems: list[str], unread: set[str]) -> DictConfig:
    """The schema's defaults with the translated settings put over them; one that does not fit is reported, left out, and `unread`.

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
                unread.add(".".join(key))
                problems.append(f"{describe(key, setting)}: {_reason(error)}; correct the value")
    return tree


@functools.cache
def _defaults() -> DictConfig:
    """The schema as OmegaConf sees it, with our resolvers known. Building it takes longer than all else here."""
    register_resolvers()
    for name, resolver in RESOLVERS.items():
        OmegaConf.register_resolver(name, resolver, replace=True)
    return OmegaConf.structured(RunConfig)


def _is_unknown(key: Key) -> bool:
    """Whether the schema has no such key, and no value above it."""
    section: type | None = RunConfig
    for name in key:
        if section is None:
            return False
        hints = _hints(section)
        if name not in hints:
            return True
        section = section_of(hints[name])
    return False


def _misfit(key: Key, setting: Setting) -> str | None:
    """Why a setting of a known key cannot go into the schema, where OmegaConf would be too lenient; None if it can."""
    section: type = RunConfig
    for depth, name in enumerate(key):
        hints = _hints(section)
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


def nearest_key(key: Key) -> str | None:
    """The known key that was most likely meant: a sibling spelt alike, the same name elsewhere, or one alike; None if none is."""
    *parents, name = key
    prefix = "".join(f"{parent}." for parent in parents)
    known = _known_keys()
    siblings = list(dict.fromkeys(other.removeprefix(prefix).split(".")[0] for other in known if other.startswith(prefix)))
    if alike := difflib.get_close_matches(name, siblings, n=1, cutoff=0.7):
        return prefix + alike[0]
    names = _keys_by_name()
    # Of all names, and then of the few keys of that name: comparing every whole key takes seconds in a file with many unknown ones.
    closest = [name] if name in names else difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    return difflib.get_close_matches(prefix + name, names[closest[0]], n=1, cutoff=0.0)[0] if closest else None


def _first_unknown(key: Key) -> Key:
    """The shortest beginning of a key that no known key begins with."""
    beginnings = (key[:depth] for depth in range(1, len(key)))
    return next((start for start in beginnings if not any(known.startswith(".".join(start) + ".") for known in _known_keys())), key)


@functools.cache
def _known_keys() -> list[str]:
    return [*KEYS, *sorted(DIALECT_KEYS - KEYS.keys())]


@functools.cache
def _keys_by_name() -> dict[str, list[str]]:
    """The known keys that each name is a part of."""
    names: dict[str, list[str]] = {}
    for key in _known_keys():
        for name in dict.fromkeys(key.split(".")):
            names.setdefault(name, []).append(key)
    return names


def _build(
    section: type[Section], tree: DictConfig, key: Key, unresolved: dict[Key, str], problems: list[str], unread: set[str]
) -> Section:
    """The section at `key` as a plain dataclass. What cannot be resolved or is missing is left out and told in the last three arguments."""
    values: dict[str, object] = {}
    for name, hint in _hints(section).items():
        inner, place = section_of(hint), (*key, name)
        dotted = ".".join(place)
        if inner is not None:
            values[name] = None if OmegaConf.select(tree, dotted) is None else _build(inner, tree, place, unresolved, problems, unread)
            continue
        try:
            value = OmegaConf.select(tree, dotted, throw_on_missing=True)
            values[name] = OmegaConf.to_object(value) if isinstance(value, Container) else value
        except MissingMandatoryValue:
            if dotted in unread:
                continue
            unread.add(dotted)
            problems.append(f"{dotted} is required and has no default; set it in the config file or as {dotted}=VALUE")
        except (OmegaConfBaseException, ValueError, TypeError, RecursionError) as error:
            unresolved[place] = f"{_reason(error)}; correct the expression"
    return section(**values)


def _expressions(tree: DictConfig) -> dict[str, frozenset[str]]:
    """The keys that each key's value is made from, for the keys whose value is an expression."""
    follows: dict[str, frozenset[str]] = {}
    content = OmegaConf.to_container(tree, resolve=False)
    for key in KEYS:
        value: object = content
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, str):
            follows[key] = frozenset(_REFERENCE.findall(value)) & KEYS.keys()
    return {key: others for key, others in follows.items() if others}


def _reason(error: Exception) -> str:
    # OmegaConf appends the full key and the object's type on further lines.
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
