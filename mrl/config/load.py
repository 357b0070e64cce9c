# SPDX-License-Identifier: Apache-2.0
"""Loads YAML files and overrides as a typed `RunConfig`, and reports keys that have other names in NeMo RL.

OmegaConf reads files and resolves expressions, pydantic validates every value by the type of its field. Rules between
keys are in `mrl.config.rules.checks`, NeMo RL's words in `mrl.nemo.dialect`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from omegaconf._utils import get_omega_conf_dumper
from omegaconf.errors import MissingMandatoryValue

from conversion.files.reading import read_file
from mrl.config.errors import COMMAND_LINE, FROM, ConfigError, NotKnown, Problem, prefix_of, told, value_at
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
    wrong,
)
from mrl.config.known import ALGORITHMS, Translated, translate_settings
from mrl.config.migration import Migration, dialect
from mrl.config.model import with_value
from mrl.config.parsers import CHAT
from mrl.config.schema.keys import LIKE_POLICY, SAME_KEYS
from mrl.config.schema.run import Facts, RunConfig
from mrl.config.secrets import note_secrets, redact
from mrl.config.values import Tree, Unresolved, find_long_expressions, keep_texts, read_config, read_teacher
from mrl.gpus import AUTO, host_gpus
from mrl.phases import ModelName

if TYPE_CHECKING:
    from mrl.config.schema.policy import PolicyConfig
    from mrl.config.schema.teachers import OnPolicyDistillationConfig

TEACHER, POLICY, SEVERAL = "teacher", "policy", "on_policy_distillation."

SIZES = tuple(f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context", "expert_model"))
ELSEWHERE = {
    "precision": "precision",
    "micro_batch_size": "logprob_batch_size",
    "hf_config_overrides": "hf_config_overrides",
}
"""Key of a teacher's place -> the corresponding key of `policy`."""
PRECISIONS = {"bf16": "bfloat16", "fp32": "float32"}
_OVERRIDES = "megatron_cfg_overrides"
GPUS = ("num_nodes", "gpus_per_node")
"""Keys of a teacher's place that say which nodes it has."""
OWN_CUT = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "virtual_pipeline_model_parallel_size",
)
"""Keys that cut the policy's layers; a teacher has its own."""


@dataclass(frozen=True)
class Own:
    """Settings of one teacher, as keys of section `teacher`."""

    settings: Settings
    model: ModelName
    origin: str = ""

    def has(self, key: Key) -> bool:
        """True if the teacher has a value of its own for a key, or something in place of the section."""
        never_inherited = ("model_name", "tokenizer", *(("hf_config_overrides",) if self.model == TEACHER else ()))
        return key[1] in never_inherited or any(
            key[: len(other)] == other or other[: len(key)] == key for other in self.settings
        )


def read_teachers(
    config: RunConfig, settings: Settings, secrets: set[str], run: Translated, known: Collection[Problem]
) -> tuple[RunConfig, list[Problem]]:
    """The config with its teachers, and their problems.

    `run` has the translated settings of all but teachers, `known` the problems of these.
    """
    problems: list[Problem] = []
    origins, teachers = dict(config.facts.origins), {}

    def read(own: Own) -> PolicyConfig | None:
        section = own.settings | dict(_inherited(own, settings, secrets))
        part = translate_settings(section, run.beside | run.settings, secrets, [TEACHER])
        teacher, found = _read(own, part, run, secrets, known)
        problems.extend(found)
        if teacher is not None:
            places = {f"{setting.origin}, from {'.'.join(key)}" for key, setting in own.settings.items()}
            for key, setting in part.settings.items():
                origin = setting.origin or own.origin
                if (key in own.settings or origin in places) and (":" in origin or origin == COMMAND_LINE):
                    origins[prefix_of(own.model) + ".".join(key[1:])] = origin
        return teacher

    if any(key[0] == TEACHER and (key[1:] or setting.value is not None) for key, setting in settings.items()):
        written = _written(settings, secrets, problems)
        config = with_value(config, TEACHER, None if problems else read(Own(written, TEACHER)))
        if config.teacher is None:
            origins |= {
                ".".join(key): setting.origin for key, setting in settings.items() if key[0] == TEACHER and key[1:]
            }
    with suppress(NotKnown):
        if config.teaching is not None:
            *_, origin = ("", *(origin for key, origin in origins.items() if key.startswith(SEVERAL)))
            for name, own in _described(config.teaching, config.policy.megatron_cfg.sequence_parallel, origin).items():
                if (section := read(own)) is not None:
                    teachers[name] = section
    return with_value(config, "facts", replace(config.facts, origins=origins, teachers=teachers)), problems


def _written(settings: Settings, secrets: set[str], problems: list[Problem]) -> Settings:
    tree, own = Tree(settings, secrets), Settings()
    for key, setting in settings.items():
        if key[0] != TEACHER:
            continue
        try:
            own[key] = replace(setting, value=tree.value(".".join(key)), written_as="")
        except (MissingMandatoryValue, Unresolved) as error:
            problems.append(wrong("expression", key, setting, error))
    return own


def _described(given: OnPolicyDistillationConfig, splits_sequences: bool, origin: str) -> dict[str, Own]:
    found = dict[str, Own]()
    for name in given.teachers:
        model, place = given.teacher_model_by_agent_name[name], given.place_of(name)
        megatron: dict[str, object] = {
            **dict.fromkeys(SIZES, 1),
            **dict.fromkeys(OWN_CUT),
            "enabled": True,
            "peft.enabled": False,
        }
        overrides = place.pop(_OVERRIDES, None) or {}
        megatron |= {key: value for key, value in place.items() if key not in (*ELSEWHERE, *GPUS)}
        megatron |= overrides if isinstance(overrides, Mapping) else {_OVERRIDES: overrides}
        # Like the policy's, a teacher's sequences are split where its tensors are.
        megatron.setdefault("sequence_parallel", splits_sequences and megatron["tensor_model_parallel_size"] != 1)
        own: dict[str, object] = {"model_name": model, "tokenizer.name": model, "dtensor_cfg.enabled": False}
        own |= {f"megatron_cfg.{key}": value for key, value in megatron.items()}
        own |= {to: PRECISIONS.get(str(place[key]), place[key]) for key, to in ELSEWHERE.items() if key in place}
        role, settings = f"{TEACHER}:{name}", Settings()
        for dotted, value in own.items():
            for key, setting in flatten(value, (TEACHER, *dotted.split(".")), "").items():
                settings[key] = replace(setting, written_as=prefix_of(role) + ".".join(key[1:]))
        found[name] = Own(settings, role, origin)
    return found


def _inherited(own: Own, settings: Settings, secrets: set[str]) -> Iterator[tuple[Key, Setting]]:
    """The policy's settings as those of a teacher that has none of its own."""
    tree = Tree(settings, secrets)
    for policy_key, setting in settings.items():
        key = (TEACHER, *policy_key[1:])
        if policy_key[0] != POLICY or not policy_key[1:] or own.has(key):
            continue
        value = setting.value
        if own.model != TEACHER:
            # The same expression might have another value in the teacher.
            with suppress(MissingMandatoryValue, Unresolved):
                value = tree.value(".".join(policy_key))
        if isinstance(value, str):
            value = value.replace(f"${{{POLICY}.", f"${{{TEACHER}.")
        yield key, replace(setting, value=value)


def _read(
    own: Own, part: Translated, run: Translated, secrets: set[str], known: Collection[Problem]
) -> tuple[PolicyConfig | None, list[Problem]]:
    """A teacher's section, None if it is not known, and its problems without those that it inherits."""
    prefix = prefix_of(own.model)
    inherited = {}
    for problem in known:
        section, *rest = problem.key.split(".")
        if section == POLICY and rest and not own.has((TEACHER, *rest)):
            inherited[".".join((TEACHER, *rest))] = problem.key
    found = [*part.problems, *part.refused]
    teacher = None
    if TEACHER not in part.misplaced:
        tree = Tree(run.beside | run.settings | part.beside | part.settings, secrets)
        teacher, wrong = read_teacher(tree, part.settings, part.misplaced, inherited, prefix)
        found = [*part.problems, *wrong, *part.refused]
    of_policy = {*inherited, *inherited.values(), *(prefix + key.removeprefix(f"{TEACHER}.") for key in inherited)}
    own_problems = [problem for problem in found if problem.key not in of_policy]
    return None if own_problems else teacher, own_problems


MISSING_ALGORITHMS = {"teachers": "distillation between tokenizers, for which teachers is a list"}
"""Section of NeMo RL -> its algorithm."""

FOR_AGENTS = ("policy.generation.vllm_cfg.expose_http_server", f"{CHAT}.enable_auto_tools")
"""Keys that are true, if null, where agents are configured."""
_AUTOMATIC = f", {AUTO}"
_SIZES = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
WITHOUT_TRAINER: Mapping[str, object] = {
    "checkpointing.enabled": False,
    "reference.num_nodes": 0,
    "policy.megatron_cfg.sequence_parallel": False,
    "policy.megatron_cfg.virtual_pipeline_model_parallel_size": None,
    **{f"policy.megatron_cfg.{name}_parallel_size": 1 for name in _SIZES},
}
"""Values of an evaluation, which needs neither the layout of a trainer nor room for checkpoints."""


def load_config(name: str | Path, overrides: Sequence[str] = (), *, secrets: set[str] | None = None) -> RunConfig:
    """The config of `find_config(name)`, with `overrides` applied in order: plain dataclasses, all values resolved.

    Adds its secrets to `secrets`, the set of `start_logging`, as soon as they are read, so that no log line has them.
    Raises ConfigError with every problem of the files, the overrides, the types and the ranges at once.
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
    path = find_config(name)
    settings = read_settings(path)
    note_secrets(
        ((key.lstrip("+~"), text) for key, _, text in (override.partition("=") for override in overrides)), secrets
    )
    problems = _apply(settings, overrides)
    resolve_gpus(settings)
    if long := find_long_expressions({".".join(key): setting.value for key, setting in settings.items()}):
        raise ConfigError(long)
    if media := dialect().find_media(settings):
        return None, Migration(), [*media, *problems]
    if unclear := choose_algorithm(settings):
        return None, Migration(), [*problems, *unclear]
    if dialect().is_evaluation(settings):
        if not to_evaluate:
            text = f"{name} is a file for evaluations, without training; run `python -m mrl.evaluate {name}`"
            raise ConfigError([told(text, "file")])
        dialect().place_evaluation(settings)
    if to_evaluate:
        settings[("algorithm",)] = Setting("grpo", "python -m mrl.evaluate")
        settings["grpo", "max_val_samples"] = Setting(None, "python -m mrl.evaluate")
        settings.pop(("policy", "train_global_batch_size"), None)  # by default the samples of a step
        settings.pop(("grpo", "num_generations_per_prompt"), None)  # PPO may have a single rollout, which is no group
    dialect().use_own_forms(settings, path.parent)
    keep_texts(settings)
    note_secrets(((".".join(key), setting.value) for key, setting in settings.items()), secrets)
    config, run, found = _interpret(settings, secrets)
    problems += found
    if config is not None and to_evaluate:
        config = _without_trainer(config)
    elif config is not None:
        config, wrong = read_teachers(config, settings, secrets, run, found)
        problems += wrong
    return config, run.migration, list(dict.fromkeys(problems))


def _without_trainer(config: RunConfig) -> RunConfig:
    """The config of an evaluation: only engines have the model, and training rows count if some are held out."""
    for key, value in WITHOUT_TRAINER.items():
        config = with_value(config, key, value)
    with suppress(NotKnown):
        if not any(dataset.held_out for dataset in config.data.train_sets.values()):
            config = with_value(config, "data.train.datasets", [])
    return config


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
    """True if the config leaves the number of GPUs to the host that loads it."""
    return config.facts.origins.get("cluster.gpus_per_node", "").endswith(_AUTOMATIC)


def _interpret(settings: Settings, secrets: set[str]) -> tuple[RunConfig | None, Translated, list[Problem]]:
    """The config without its teachers, what it is made of, and the problems; no config: unknown algorithm."""
    elsewhere = {key: setting for key, setting in settings.items() if key[0] in SAME_KEYS}
    part = {key: setting for key, setting in settings.items() if key not in elsewhere}
    sections = ["policy", *(name for name in LIKE_POLICY if name not in SAME_KEYS)]
    read = translate_settings(part, elsewhere, secrets, sections)
    config, found = read_config(Tree(read.beside | read.settings, secrets), read.settings, read.misplaced)
    if config is not None:
        origins = {
            ".".join(key): setting.origin + (f"{FROM}{setting.written_as}" if setting.written_as else "")
            for key, setting in read.settings.items()
        }
        config.facts = Facts(frozenset(secrets), origins)
        config = _serving_agents(config)
    return config, read, [*read.problems, *found, *read.refused]


def _serving_agents(config: RunConfig) -> RunConfig:
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
    # The critic's keys follow the policy's, also where there is no critic.
    for key in (key for key in old | new if old.get(key) != new.get(key) and (key[0] != "value" or config.has_critic)):
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
