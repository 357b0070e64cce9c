# SPDX-License-Identifier: Apache-2.0
"""Rules of distillation: there is a teacher that speaks of the student's tokens, its layout divides it, and the loss is distillation's."""

from __future__ import annotations

import json
from pathlib import Path

from conversion.files.reading import read_json
from mrl.config.errors import Problems
from mrl.config.model import overridden_config, read_model
from mrl.config.rules import layout
from mrl.config.schema.policy import PolicyConfig
from mrl.config.schema.run import RunConfig
from mrl.phases import ModelName

LOSS_KEYS = ("kl_type", "mixed_kl_weight", "zero_outside_topk")
"""Of `loss_fn`, those of distillation; all others are GRPO's."""
SHOWN = 3
"""Tokens that a message names."""


def check_teacher(config: RunConfig, problems: Problems) -> None:
    """A run that distils has a teacher, and what its command line says of the loss is read."""
    _check_on_policy(config, problems)
    if config.algorithm == "distillation":
        # What a config inherits from one of GRPO may stay there.
        for key in (f"loss_fn.{name}" for name in vars(config.loss_fn) if name not in LOSS_KEYS):
            if config.origins.get(key, "").startswith("command line"):
                problems.add(key, "it belongs to GRPO's loss, and algorithm=distillation", f"use {', '.join(LOSS_KEYS)}")
        if config.teacher is None:
            problems.extend(
                ["teacher: algorithm=distillation has nobody to learn from; give teacher.model_name, the folder of a model or its id"]
            )
    for model, section in config.teachers.items():
        if section.megatron_cfg.peft.enabled:
            rule = "a teacher is not trained: what adapters add to a model is merged into its folder first"
            problems.extend([f"{section_of(model)}megatron_cfg.peft.enabled=true: {rule}; set it to false"])
        seen = Problems(config.of_model(model))
        layout.check_cluster(config.of_model(model), seen)
        _add(problems, seen, model)


def _check_on_policy(config: RunConfig, problems: Problems) -> None:
    """Advantages come of teachers' logprobs if both sections say so, and both compare the whole vocabulary."""
    given, estimator, key = config.on_policy_distillation, config.grpo.adv_estimator.name, "on_policy_distillation"
    if given is None or not given.enabled:
        if estimator == "opd":
            problems.add(
                "grpo.adv_estimator.name", "opd compares with teachers, and there are none", f"set {key}.enabled=true, or use grpo"
            )
        return
    if config.algorithm != "grpo":
        rule = f"advantages are GRPO's, and algorithm={config.algorithm}"
        problems.add(f"{key}.enabled", rule, "set it to false; algorithm=distillation has the section teacher")
        return
    if estimator != "opd":
        rule = f"what teachers say would be computed for nothing: grpo.adv_estimator.name={estimator} does not look at it"
        problems.add(f"{key}.enabled", rule, f"use opd, with {key}.orm_advantage_weight for the reward's share, or set this to false")
    names = given.teacher_model_by_agent_name
    if not names:
        problems.add(f"{key}.teacher_model_by_agent_name", "no row has a teacher", "give a model for each agent or environment")
    elif given.default_teacher_alias is not None and given.default_teacher_alias not in names:
        rule = f"it is none of the names in {key}.teacher_model_by_agent_name ({', '.join(names)})"
        problems.add(f"{key}.default_teacher_alias", rule, "use one of them, or null")
    for name in given.non_colocated_teachers.teacher_overrides if given.non_colocated_teachers else ():
        if given.teacher_of(name) != name:
            rule = f"no teacher is held under {name!r}: names of one model share the first of them"
            way_out = f"use one of {', '.join(config.further_teachers)}"
            problems.add(f"{key}.non_colocated_teachers.teacher_overrides", rule, way_out)
    if given.use_orm_advantage != (given.orm_advantage_weight > 0):
        rule = f"{key}.use_orm_advantage={str(given.use_orm_advantage).lower()} does not go with it"
        problems.add(f"{key}.orm_advantage_weight", rule, "give the reward a weight above 0 and set that to true, or 0 and false")
    generation = config.policy.generation
    if generation.top_p < 1.0 or generation.top_k is not None:
        rule = "teachers' logprobs are of the whole vocabulary, but policy.generation.top_p or top_k truncates the policy's"
        problems.add(f"{key}.enabled", rule, "set top_p=1 and top_k=null")


def check_teacher_model(config: RunConfig, problems: Problems) -> None:
    """Each teacher's layout divides its model, and student and teacher have the same tokens. As far as their files are here."""
    for model, section in config.teachers.items():
        _check_model(config, model, section, problems)


def _check_model(config: RunConfig, model: ModelName, section: PolicyConfig, problems: Problems) -> None:
    folder, student, name = Path(section.model_name), Path(config.policy.model_name), section_of(model)
    if not (folder / "config.json").is_file():
        return
    try:
        sizes = read_model(folder, section.hf_config_overrides)
    except ValueError as error:
        problems.extend([f"{name}model_name={folder}: {error}"])
        return
    as_policy = config.of_model(model)
    seen = Problems(as_policy)
    layout.check_trainer(as_policy, sizes, seen)
    _add(problems, seen, model)
    columns = [vocabulary_size(path) for path in (student, folder) if (path / "config.json").is_file()]
    if len(columns) == 2 and columns[0] != columns[1]:
        rule = f"its vocab_size is {columns[1]:,}, and the student's {columns[0]:,}: their tokens are not the same"
        problems.extend([f"{name}model_name={folder}: {rule}; take a teacher of the student's tokenizer, or prune the one or the other"])
    elif config.num_taught_logits > columns[-1]:
        rule = f"the vocabulary has {columns[-1]:,} tokens"
        problems.add("distillation.topk_logits_k", rule, "use that number or less")
    if difference := token_difference(Path(config.policy.tokenizer.name), Path(section.tokenizer.name)):
        rule = f"its tokens are not those of policy.tokenizer.name={config.policy.tokenizer.name}: {difference}"
        way_out = "take a teacher of the student's tokenizer: logits of other tokens mean nothing to it"
        problems.extend([f"{name}tokenizer.name={section.tokenizer.name}: {rule}; {way_out}"])


def token_difference(student: Path, teacher: Path) -> str:
    """How the tokens of two tokenizers differ, by their files; "" if they do not, or the files are not both here."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    for name in names:
        ours, theirs = student / name, teacher / name
        if not (ours.is_file() and theirs.is_file()):
            continue
        if ours.read_bytes() == theirs.read_bytes():
            return ""
        if name == "tokenizer.model":
            return "the files tokenizer.model differ"
        mine, other = _ids(read_json(ours)), _ids(read_json(theirs))
        different = [token for token in mine | other if mine.get(token) != other.get(token)]
        shown = ", ".join(f"{json.dumps(token)} is {mine.get(token, 'none')} and {other.get(token, 'none')}" for token in different[:SHOWN])
        return f"{len(different):,} of {len(mine | other):,} have other ids, such as {shown}" if different else ""
    return ""


def num_tokens(tokenizer: Path) -> int:
    """One more than the largest id of a tokenizer, by its files; 0 if none of those that can be read is here."""
    for name in ("tokenizer.json", "vocab.json"):
        if (tokenizer / name).is_file():
            return 1 + max(_ids(read_json(tokenizer / name)).values(), default=-1)
    return 0


def _ids(tokenizer: object) -> dict[str, int]:
    """Tokens and their ids, of the contents of tokenizer.json or vocab.json."""
    if not isinstance(tokenizer, dict):
        return {}
    model = tokenizer.get("model", {"vocab": tokenizer})
    vocabulary = model.get("vocab", {}) if isinstance(model, dict) else {}
    if isinstance(vocabulary, list):  # with scores, in the order of ids
        vocabulary = {str(entry[0]): index for index, entry in enumerate(vocabulary)}
    added = tokenizer.get("added_tokens", [])
    return vocabulary | {str(token["content"]): int(token["id"]) for token in added if isinstance(token, dict)}


def vocabulary_size(folder: Path) -> int:
    """The vocab_size of a folder's config.json; 0 if it has none."""
    found = read_json(folder / "config.json")
    return int(str(overridden_config(found, {}).get("vocab_size", 0))) if isinstance(found, dict) else 0


def section_of(model: ModelName) -> str:
    """What stands in front of the keys of a teacher in messages."""
    name = model.partition(":")[2]
    return f"on_policy_distillation, teacher {name}: " if name else "teacher."


def _add(problems: Problems, seen: Problems, model: ModelName) -> None:
    """Adds what is wrong with a teacher's section, which the rules know as the policy's; not again what the policy's own has wrong."""
    known = {text.partition(":")[0] for text in problems.texts}
    problems.extend([text.replace("policy.", section_of(model)) for text in seen.texts if text.partition(":")[0] not in known])
