# SPDX-License-Identifier: Apache-2.0
"""Sections of teachers: `teacher`, and those described in `on_policy_distillation`. Each is read as section `teacher`,
in which keys that it leaves out have the policy's values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from omegaconf.errors import MissingMandatoryValue

from mrl.config.errors import COMMAND_LINE, NotKnown, Problem, prefix_of
from mrl.config.files import Key, Setting, Settings, flatten, wrong
from mrl.config.known import Translated, translate_settings
from mrl.config.model import with_value
from mrl.config.schema.run import RunConfig
from mrl.config.values import Tree, Unresolved, read_teacher
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
        """Tells whether the teacher has a value of its own for a key, or something in place of the section."""
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
    """Section `teacher` with its expressions resolved; adds those that cannot be to `problems`."""
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
    """Collects each teacher's own settings from `on_policy_distillation`, by name. `origin` is where that is set."""
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
