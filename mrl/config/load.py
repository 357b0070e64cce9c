# SPDX-License-Identifier: Apache-2.0
"""Loads YAML files and overrides as a typed `RunConfig`, and reports keys that have other names in NeMo RL.

OmegaConf reads files and resolves expressions, pydantic validates every value by the type of its field. Rules between
keys are in `mrl.config.rules.checks`, NeMo RL's words in `mrl.config.dialect.translate`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import get_args, get_origin

import yaml
from omegaconf._utils import get_omega_conf_dumper
from omegaconf.errors import MissingMandatoryValue

from conversion.files.reading import read_file
from mrl.config.dialect.media import find_media
from mrl.config.dialect.translate import (
    DIALECT_KEYS,
    Migration,
    is_evaluation,
    is_foreign,
    migrate,
    place_evaluation,
    use_own_forms,
)
from mrl.config.errors import ConfigError, NotKnown, Problem, told, value_at
from mrl.config.files import (
    Key,
    Setting,
    Settings,
    describe,
    find_config,
    flatten,
    read_settings,
    sections_of,
    shorten,
    split_key,
    wrong,
)
from mrl.config.model import with_value
from mrl.config.parsers import CHAT
from mrl.config.schema.keys import KEYS, LIKE_POLICY, SAME_KEYS, SCHEMA
from mrl.config.schema.run import Facts, RunConfig
from mrl.config.secrets import note_secrets, redact
from mrl.config.teachers import read_teachers
from mrl.config.values import REFERENCE, Tree, Unresolved, find_long_expressions, keep_texts, read_config
from mrl.gpus import AUTO, host_gpus

ALGORITHMS: tuple[str, ...] = get_args(SCHEMA.children["algorithm"].hint)

MISSING_ALGORITHMS = {"teachers": "distillation between tokenizers, for which teachers is a list"}
"""Section of NeMo RL -> its algorithm."""

FOR_AGENTS = ("policy.generation.vllm_cfg.expose_http_server", f"{CHAT}.enable_auto_tools")
"""Keys that are true, if null, where agents are configured."""
_AUTOMATIC = f", {AUTO}"
SCRATCH = "_"
"""Beginning of the names of sections that hold values for others to refer to."""

_SIZES = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
WITHOUT_TRAINER: Mapping[str, object] = {
    "checkpointing.enabled": False,
    "policy.megatron_cfg.sequence_parallel": False,
    "policy.megatron_cfg.virtual_pipeline_model_parallel_size": None,
    **{f"policy.megatron_cfg.{name}_parallel_size": 1 for name in _SIZES},
}
"""Values of an evaluation, which needs neither the layout of a trainer nor room for checkpoints."""


def load_config(name: str | Path, overrides: Sequence[str] = (), *, secrets: set[str] | None = None) -> RunConfig:
    """The config of `find_config(name)`, with `overrides` applied in order: plain dataclasses, all values resolved.

    Its secrets are added to `secrets`, the set of `start_logging`, as soon as they are read, so that no log line has
    them. Raises ConfigError with every problem of the files, the overrides, the types and the ranges at once.
    """
    return load_run(name, overrides, secrets=secrets)[0]


def load_run(
    name: str | Path, overrides: Sequence[str] = (), *, to_evaluate: bool = False, secrets: set[str] | None = None
) -> tuple[RunConfig, Migration]:
    """`load_config`, and a report of NeMo RL's keys that the schema lacks. With `to_evaluate`, it only samples."""
    config, migration, problems = read_run(name, overrides, to_evaluate=to_evaluate, secrets=secrets)
    if config is None or problems:
        raise ConfigError(problems)
    return config, migration


def read_run(
    name: str | Path, overrides: Sequence[str] = (), *, to_evaluate: bool = False, secrets: set[str] | None = None
) -> tuple[RunConfig | None, Migration, list[Problem]]:
    """`load_run` returning its problems. Reading a value they leave unknown raises NotKnown; None: unknown algorithm.

    Raises:
        ConfigError: a file is missing or unreadable, is an evaluation file, or has endless expressions.
    """
    secrets = set() if secrets is None else secrets
    settings = read_settings(find_config(name))
    note_secrets(
        ((key.lstrip("+~"), text) for key, _, text in (override.partition("=") for override in overrides)), secrets
    )
    problems = _apply(settings, overrides)
    resolve_gpus(settings)
    if long := find_long_expressions({".".join(key): setting.value for key, setting in settings.items()}):
        raise ConfigError(long)
    if media := find_media(settings):
        return None, Migration(), [*media, *problems]
    if unclear := choose_algorithm(settings):
        return None, Migration(), [*problems, *unclear]
    if is_evaluation(settings):
        if not to_evaluate:
            text = f"{name} is a file for evaluations, without training; run `python -m mrl.evaluate {name}`"
            raise ConfigError([told(text, "file")])
        place_evaluation(settings)
    if to_evaluate:
        settings[("algorithm",)] = Setting("grpo", "python -m mrl.evaluate")
        settings["grpo", "max_val_samples"] = Setting(None, "python -m mrl.evaluate")
        settings.pop(("policy", "train_global_batch_size"), None)  # by default the samples of a step
        settings.pop(("grpo", "num_generations_per_prompt"), None)  # PPO may have a single rollout, which is no group
    use_own_forms(settings)
    keep_texts(settings)
    note_secrets(((".".join(key), setting.value) for key, setting in settings.items()), secrets)
    config, migration, found = _interpret(settings, secrets)
    problems += found
    if config is not None and to_evaluate:
        for key, value in WITHOUT_TRAINER.items():
            config = with_value(config, key, value)
    elif config is not None:
        config, wrong = read_teachers(config, settings, secrets, known=found, interpret=_interpret)
        problems += wrong
    return config, migration, list(dict.fromkeys(problems))


def _apply(settings: Settings, overrides: Sequence[str]) -> list[Problem]:
    if not overrides:
        return []
    from mrl.config.overrides import apply_overrides  # imports Hydra

    return apply_overrides(settings, overrides)


def resolve_gpus(settings: Settings) -> None:
    """Replaces `cluster.gpus_per_node: auto` by the number of this host's GPUs, which every other key may refer to."""
    key = ("cluster", "gpus_per_node")
    setting = settings.get(key)
    if setting is not None and setting.value == AUTO:
        try:
            settings[key] = Setting(host_gpus(), f"{setting.origin}{_AUTOMATIC}")
        except ValueError as error:
            raise ConfigError([wrong("value", key, setting, error)]) from error


def has_automatic_gpus(config: RunConfig) -> bool:
    """Tells whether the config leaves the number of GPUs to the host that loads it."""
    return config.facts.origins.get("cluster.gpus_per_node", "").endswith(_AUTOMATIC)


def _interpret(settings: Settings, secrets: set[str]) -> tuple[RunConfig | None, Migration, list[Problem]]:
    """The config without its teachers, the report of NeMo RL's keys, and the problems; no config: unknown algorithm."""
    problems: list[Problem] = []
    elsewhere = {key: setting for key, setting in settings.items() if key[0] in SAME_KEYS}
    known, unknown, misplaced = _sort_out(
        {key: setting for key, setting in settings.items() if key not in elsewhere}, problems
    )
    written = known | unknown | elsewhere
    tree = Tree(written, secrets)

    def value_of(dotted: str) -> object:
        try:
            return tree.value(dotted)
        except (MissingMandatoryValue, Unresolved) as error:
            if isinstance(error, Unresolved) and (key := split_key(dotted)) in written:
                problems.append(wrong("expression", key, written[key], error))
            return None

    refused: list[Problem] = []
    translated, migration = migrate(known, value_of, refused)
    notes = {key: setting for key, setting in unknown.items() if key[0].startswith(SCRATCH)}
    migration.without_effect += [
        (key, setting, "read only where another key refers to it") for key, setting in notes.items()
    ]
    named = {name for setting in known.values() for name in REFERENCE.findall(str(setting.value))}
    # Expressions may name keys that the schema lacks, or keys of the inactive backend.
    beside = {
        key: written[key] for name in sorted(named) if (key := split_key(name)) in written and key not in translated
    }
    config, found = read_config(Tree(notes | beside | translated, secrets), translated, misplaced)
    if config is not None:
        origins = {".".join(key): setting.origin for key, setting in translated.items()}
        config.facts = Facts(frozenset(secrets), origins)
        config = _serving_agents(config)
    return config, migration, [*problems, *found, *refused]


def _serving_agents(config: RunConfig) -> RunConfig:
    """The config with what agents need of the engines, unless it says otherwise."""
    for key in FOR_AGENTS:
        with suppress(NotKnown):
            if value_at(config, key) is None:
                config = with_value(config, key, config.env.has_agents)
    return config


def resolved_yaml(config: RunConfig) -> str:
    """The config with every value written out, as YAML that `load_config` reads; secrets replaced by `<redacted>`."""
    return yaml.dump(
        _plain(config), Dumper=get_omega_conf_dumper(), default_flow_style=False, allow_unicode=True, sort_keys=False
    )


def _plain(config: RunConfig) -> dict[str, object]:
    plain = redact(dataclasses.asdict(config), config.facts.secrets)
    assert isinstance(plain, dict)
    return plain


def changes_since(file: Path, config: RunConfig) -> list[str]:
    """`key=old -> new (origin)` for values that differ from `file`, which `resolved_yaml` wrote; empty without it."""
    if not file.is_file():
        return []
    try:
        if read_file(file) == resolved_yaml(config).encode():
            return []
        old = {key: Setting(setting.value, "") for key, setting in read_settings(file).items()}
    except (OSError, ValueError):
        return [f"{file} cannot be read, so nothing is compared"]
    new, absent, lines = flatten(_plain(config), (), ""), Setting("(no such key)", ""), []
    for key in (key for key in old | new if old.get(key) != new.get(key)):
        origin = config.facts.origins.get(".".join(key))
        lines.append(
            f"{describe(key, old.get(key, absent))} -> {shorten(new.get(key, absent).value)}"
            + (f" ({origin})" if origin else "")
        )
    return lines


def choose_algorithm(settings: Settings) -> list[Problem]:
    """Sets `algorithm`, if nothing sets it, to the one whose section is there; ppo wins, then grpo, then distillation.

    Returns the problem if two others are, or the section of an algorithm that mrl has not.
    """
    for key, setting in settings.items():
        if key[0] in MISSING_ALGORITHMS and setting.value not in (None, {}):
            rule, way_out = f"mrl has no {MISSING_ALGORITHMS[key[0]]}", f"algorithms are {', '.join(ALGORITHMS)}"
            return [Problem("algorithm", key[0], None, rule, way_out, origin=setting.origin, says_origin=True)]
    sections = sections_of(settings)
    given = ["ppo"] if "ppo" in sections else [name for name in ALGORITHMS if name in sections]
    if ("algorithm",) in settings and settings["algorithm",].value == "distillation":
        given = ["distillation"]
    if given[:1] == ["distillation"]:
        size = "${mul:${distillation.num_prompts_per_step}, ${distillation.num_generations_per_prompt}}"
        settings.setdefault(("policy", "train_global_batch_size"), Setting(size, "section distillation"))
        given = given[:1]
    if not given or ("algorithm",) in settings or "grpo" in given:
        return []
    if len(given) > 1:
        rule = f"algorithm is not set, and there are sections of {' and '.join(given)}"
        return [Problem("algorithm", "algorithm", None, rule, "set algorithm to one of them")]
    settings[("algorithm",)] = Setting(given[0], f"section {given[0]}")
    return []


def _sort_out(settings: Settings, problems: list[Problem]) -> tuple[Settings, Settings, set[str]]:
    """Splits settings into those of known and unknown keys, and known keys where a section and a value are mixed up."""
    known: Settings = {}
    unknown: Settings = {}
    misplaced: set[str] = set()
    starts: dict[Key, list[Key]] = {}
    algorithm = str(settings["algorithm",].value) if ("algorithm",) in settings else "grpo"
    for key, setting in settings.items():
        is_known, at, fault = _place(key, setting.value)
        if is_known or is_foreign(key, setting.value):
            known[key] = setting
        elif at:
            misplaced.add(at)
            problems.append(wrong("section", key, setting, fault))
        elif key[0].startswith(SCRATCH):
            unknown[key] = setting
        else:
            unknown[key] = setting
            start = next((key[:end] for end in range(1, len(key)) if key[:end] not in _beginnings()), key)
            starts.setdefault(start, []).append(key)
    for start, keys in starts.items():
        first, nearest = settings[keys[0]], nearest_key(start, algorithm)
        hint = f"; the nearest is {nearest}" if nearest else ", and none that is spelt alike; docs/config.md lists them"
        if len(keys) == 1:
            problems.append(wrong("unknown-key", keys[0], first, f"no such key{hint}"))
        else:
            rule, _, way_out = f"no such section, with {len(keys)} keys{hint}".partition("; ")
            name = ".".join(start)
            problems.append(
                Problem("unknown-section", name, None, rule, way_out, origin=first.origin, says_origin=True)
            )
    return known, unknown, misplaced


def _place(key: Key, value: object) -> tuple[bool, str, str]:
    """Checks that a setting fits the schema; else returns the key at which a section and a value are mixed up."""
    node = SCHEMA
    for depth, name in enumerate(key, start=1):
        if (inner := node.children.get(name)) is None:
            return False, "", ""
        node, dotted = inner, ".".join(key[:depth])
        if node.section is None:
            is_known = depth == len(key) or any(get_origin(kind) is dict for kind in node.kinds)
            return is_known, dotted, f"{dotted} is a value and has no keys below it"
    is_empty = value == {} or (value is None and type(None) in node.kinds)
    return is_empty, ".".join(key), f"a section; set one of its keys: {', '.join(node.children)}"


TRL_NAMES = {
    "learning_rate": "policy.megatron_cfg.optimizer.lr",
    "num_generations": "grpo.num_generations_per_prompt",
    "beta": "loss_fn.reference_policy_kl_penalty",
    "epsilon": "loss_fn.ratio_clip_min",
    "epsilon_high": "loss_fn.ratio_clip_max",
    "max_completion_length": "policy.generation.max_new_tokens",
    "max_prompt_length": "data.max_input_seq_length",
    "max_length": "policy.max_total_sequence_length",
    "per_device_train_batch_size": "policy.train_micro_batch_size",
    "gradient_accumulation_steps": "policy.train_global_batch_size",
    "gradient_checkpointing": "policy.megatron_cfg.activation_checkpointing",
    "num_train_epochs": "grpo.max_num_epochs",
    "max_steps": "grpo.max_num_steps",
    "eval_steps": "grpo.val_period",
    "save_steps": "checkpointing.save_period",
    "output_dir": "checkpointing.checkpoint_dir",
    "model_name_or_path": "policy.model_name",
    "warmup_steps": "policy.megatron_cfg.scheduler.lr_warmup_iters",
    "lr_scheduler_type": "policy.megatron_cfg.scheduler.lr_decay_style",
    "vllm_gpu_memory_utilization": "policy.generation.vllm_cfg.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "policy.generation.vllm_cfg.tensor_parallel_size",
}
"""Keys by their names in TRL and transformers, where the spelling is too different to guess."""


def nearest_key(key: Key, algorithm: str = "grpo") -> str | None:
    """The known key most likely meant: a sibling spelt alike, the same name elsewhere, or one alike; None if none.

    Of keys that several algorithms have it takes that of the config's own.
    """
    *parents, name = key
    prefix = "".join(f"{parent}." for parent in parents)
    known, names = _known_keys()
    if name in TRL_NAMES and name not in names:
        section, _, rest = TRL_NAMES[name].partition(".")
        return f"{algorithm}.{rest}" if section == "grpo" and f"{algorithm}.{rest}" in known else TRL_NAMES[name]
    siblings = list(
        dict.fromkeys(other.removeprefix(prefix).split(".")[0] for other in known if other.startswith(prefix))
    )
    if alike := difflib.get_close_matches(name, siblings, n=1, cutoff=0.7):
        return prefix + alike[0]
    # First the nearest name, then its few keys: comparing every whole key takes seconds in a file with many unknown
    # keys.
    closest = [name] if name in names else difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    if not closest:
        return None
    elsewhere = {*LIKE_POLICY, *ALGORITHMS} - {algorithm}
    meant = [other for other in names[closest[0]] if split_key(other)[0] not in elsewhere] or names[closest[0]]
    own = [other for other in meant if split_key(other)[0] == algorithm] or meant
    return difflib.get_close_matches(prefix + name, own if not parents else meant, n=1, cutoff=0.0)[0]


@functools.cache
def _beginnings() -> set[Key]:
    """The sections of all known keys."""
    parts = [tuple(known.split(".")) for known in _known_keys()[0]]
    return {key[:end] for key in parts for end in range(1, len(key))}


@functools.cache
def _known_keys() -> tuple[list[str], dict[str, list[str]]]:
    """All known keys, and the keys that each name is a part of."""
    known, names = [*KEYS, *sorted(DIALECT_KEYS - KEYS.keys())], dict[str, list[str]]()
    for key in known:
        for name in dict.fromkeys(key.split(".")):
            names.setdefault(name, []).append(key)
    return known, names
