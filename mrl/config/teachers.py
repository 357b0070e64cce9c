# SPDX-License-Identifier: Apache-2.0
"""Sections of teachers: `teacher`, and those described in `on_policy_distillation`. Each is read like the policy's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from omegaconf.errors import MissingMandatoryValue

from mrl.config.errors import COMMAND_LINE, NotKnown, Problem, prefix_of
from mrl.config.files import Key, Setting, Settings, flatten, split_key, wrong
from mrl.config.model import with_value
from mrl.config.schema.run import RunConfig
from mrl.config.values import Tree, Unresolved
from mrl.phases import ModelName

if TYPE_CHECKING:
    from mrl.config.dialect.translate import Migration
    from mrl.config.schema.algo import OnPolicyDistillationConfig
    from mrl.config.schema.policy import PolicyConfig

TEACHER, STUDENT, SEVERAL = "teacher", "policy", "on_policy_distillation."
Interpret = Callable[[Settings, set[str]], "tuple[RunConfig | None, Migration, list[Problem]]"]

SIZES = tuple(f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context", "expert_model"))
ELSEWHERE = {
    "precision": "precision",
    "micro_batch_size": "logprob_batch_size",
    "hf_config_overrides": "hf_config_overrides",
}
"""Key of a teacher's place -> the corresponding key of `policy`."""
PRECISIONS = {"bf16": "bfloat16", "fp32": "float32"}
GPUS = ("num_nodes", "gpus_per_node")
"""Keys of NeMo RL's teachers for their own GPUs; here teachers work on the policy's."""
OWN_CUT = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "virtual_pipeline_model_parallel_size",
)
"""Keys that cut the policy's layers; a teacher has its own."""


@dataclass(frozen=True)
class Own:
    """Settings of one teacher."""

    settings: Settings
    model: ModelName
    origin: str = ""


def read_teachers(
    config: RunConfig, settings: Settings, secrets: set[str], *, known: list[Problem], interpret: Interpret
) -> tuple[RunConfig, list[Problem]]:
    """The config with its teachers, and what is wrong with them. `known` are its problems without them."""
    problems: list[Problem] = []
    origins, teachers = dict(config.facts.origins), {}

    def read(own: Own) -> PolicyConfig | None:
        return _read(own, settings, secrets, known, interpret, problems, origins)

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
    """Section `teacher` as keys of the policy; adds expressions that cannot be resolved to `problems`."""
    tree, own = Tree(settings, secrets), Settings()
    for key, setting in settings.items():
        if key[0] != TEACHER:
            continue
        try:
            # Its references mean keys of the whole config, not of a policy.
            own[(STUDENT, *key[1:])] = replace(setting, value=tree.value(".".join(key)), written_as="")
        except (MissingMandatoryValue, Unresolved) as error:
            problems.append(wrong("expression", key, setting, error))
    return own


def _described(given: OnPolicyDistillationConfig, splits_sequences: bool, origin: str) -> dict[str, Own]:
    """Collects each teacher's own settings from `on_policy_distillation`, by name. `origin` is where that is set."""
    places, found = given.non_colocated_teachers, dict[str, Own]()
    for name, model in given.teacher_model_by_agent_name.items():
        if given.teacher_of(name) != name:
            continue
        place: dict[str, object] = dict(places.default_teacher_cfg) if places else {}
        place |= _mapping(places.teacher_overrides.get(name)) if places else {}
        megatron: dict[str, object] = {
            **dict.fromkeys(SIZES, 1),
            **dict.fromkeys(OWN_CUT),
            "enabled": True,
            "peft.enabled": False,
        }
        megatron |= {
            key: value for key, value in place.items() if key not in (*ELSEWHERE, *GPUS, "megatron_cfg_overrides")
        }
        megatron |= _mapping(place.get("megatron_cfg_overrides"))
        # Like the policy's, a teacher's sequences are split where its tensors are.
        megatron.setdefault("sequence_parallel", splits_sequences and megatron["tensor_model_parallel_size"] != 1)
        own: dict[str, object] = {"model_name": model, "tokenizer.name": model, "dtensor_cfg.enabled": False}
        own |= {f"megatron_cfg.{key}": value for key, value in megatron.items()}
        own |= {to: PRECISIONS.get(str(place[key]), place[key]) for key, to in ELSEWHERE.items() if key in place}
        settings: Settings = {}
        for key, value in own.items():
            settings |= flatten(value, (STUDENT, *key.split(".")), "")
        found[name] = Own(settings, f"{TEACHER}:{name}", origin)
    return found


def _read(
    own: Own,
    settings: Settings,
    secrets: set[str],
    known: list[Problem],
    interpret: Interpret,
    problems: list[Problem],
    origins: dict[str, str],
) -> PolicyConfig | None:
    """A teacher's section, in which keys left out have the policy's values; None, and problems, if it is not known."""
    tree, never_shared = Tree(settings, secrets), [("model_name",), ("tokenizer",)]
    if own.model == TEACHER:
        never_shared.append(("hf_config_overrides",))

    def is_own(key: Key) -> bool:
        """Tells whether the teacher has a value of its own, or something in place of the section."""
        return key[1:2] in never_shared or any(
            key[: len(other)] == other or other[: len(key)] == key for other in own.settings
        )

    def shared_value(key: Key, setting: Setting) -> Setting:
        """Resolves the policy's value: the same expression might have another value in the teacher."""
        with suppress(MissingMandatoryValue, Unresolved):
            if key[0] == STUDENT and own.model != TEACHER:
                return replace(setting, value=tree.value(".".join(key)), written_as="")
        return setting

    shared = {
        key: shared_value(key, setting)
        for key, setting in settings.items()
        if key[0] != TEACHER and not (key[0] == STUDENT and is_own(key))
    }
    inner, _, found = interpret(shared | own.settings, secrets)
    found = [problem for problem in found if problem not in known and problem.key.startswith(f"{STUDENT}.")]
    prefix = prefix_of(own.model)
    at = prefix if prefix.endswith(".") else ""
    for problem in found:
        moved = problem.with_keys(lambda text: text.replace(f"{STUDENT}.", at))
        problems.append(replace(moved, key=prefix + problem.key.removeprefix(f"{STUDENT}.")))
    if inner is None or found:
        return None
    for key, origin in inner.facts.origins.items():
        is_set, origin = split_key(key) in own.settings or origin != origins.get(key), origin or own.origin
        if key.startswith(f"{STUDENT}.") and is_set and (":" in origin or origin == COMMAND_LINE):
            origins[prefix_of(own.model) + key.removeprefix(f"{STUDENT}.")] = origin
    return inner.policy


def _mapping(value: object) -> dict[str, object]:
    return dict(value) if isinstance(value, Mapping) else {}
