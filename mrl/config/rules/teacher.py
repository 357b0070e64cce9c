# SPDX-License-Identifier: Apache-2.0
"""Rules of distillation: there is a teacher that speaks of the student's tokens, its layout divides it, and the loss is distillation's."""

from __future__ import annotations

import json
from pathlib import Path

from conversion.files.reading import read_json
from mrl.config.errors import Problems
from mrl.config.model import overridden_config, read_model
from mrl.config.rules import layout
from mrl.config.schema.run import RunConfig

LOSS_KEYS = ("kl_type", "mixed_kl_weight", "zero_outside_topk")
"""Of `loss_fn`, those of distillation; all others are GRPO's."""
SHOWN = 3
"""Tokens that a message names."""


def check_teacher(config: RunConfig, problems: Problems) -> None:
    """A run that distils has a teacher, and what its command line says of the loss is read."""
    if config.algorithm != "distillation":
        return
    # What a config inherits from one of GRPO may stay there.
    for key in (f"loss_fn.{name}" for name in vars(config.loss_fn) if name not in LOSS_KEYS):
        if config.origins.get(key, "").startswith("command line"):
            problems.add(key, "it belongs to GRPO's loss, and algorithm=distillation", f"use {', '.join(LOSS_KEYS)}")
    if config.teacher is None:
        problems.extend(
            ["teacher: algorithm=distillation has nobody to learn from; give teacher.model_name, the folder of a model or its id"]
        )
        return
    if config.teacher.megatron_cfg.peft.enabled:
        rule = "a teacher is not trained: what adapters add to a model is merged into its folder first"
        problems.add("teacher.megatron_cfg.peft.enabled", rule, "set it to false")
    seen = Problems(config.of_model("teacher"))
    layout.check_cluster(config.of_model("teacher"), seen)
    _add(problems, seen)


def check_teacher_model(config: RunConfig, problems: Problems) -> None:
    """The teacher's layout divides its model, and both models have the same tokens. As far as their files are here."""
    if config.algorithm != "distillation" or config.teacher is None:
        return
    folder, student = Path(config.teacher.model_name), Path(config.policy.model_name)
    if not (folder / "config.json").is_file():
        return
    try:
        sizes = read_model(folder, config.teacher.hf_config_overrides)
    except ValueError as error:
        problems.extend([f"teacher.model_name={folder}: {error}"])
        return
    as_policy = config.of_model("teacher")
    seen = Problems(as_policy)
    layout.check_trainer(as_policy, sizes, seen)
    _add(problems, seen)
    columns = [_vocabulary_size(path) for path in (student, folder) if (path / "config.json").is_file()]
    if len(columns) == 2 and columns[0] != columns[1]:
        rule = f"its vocab_size is {columns[1]:,}, and the student's {columns[0]:,}: their tokens are not the same"
        problems.add("teacher.model_name", rule, "take a teacher of the student's tokenizer, or prune the one or the other")
    elif config.distillation.topk_logits_k > columns[-1]:
        rule = f"the vocabulary has {columns[-1]:,} tokens"
        problems.add("distillation.topk_logits_k", rule, "use that number or less")
    if difference := token_difference(Path(config.policy.tokenizer.name), Path(config.teacher.tokenizer.name)):
        rule = f"its tokens are not those of policy.tokenizer.name={config.policy.tokenizer.name}: {difference}"
        problems.add("teacher.tokenizer.name", rule, "take a teacher of the student's tokenizer: logits of other tokens mean nothing to it")


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


def _vocabulary_size(folder: Path) -> int:
    found = read_json(folder / "config.json")
    return int(str(overridden_config(found, {}).get("vocab_size", 0))) if isinstance(found, dict) else 0


def _add(problems: Problems, seen: Problems) -> None:
    """Adds what is wrong with the teacher's section, which the rules know as the policy's; not again what the policy's own has wrong."""
    known = {text.partition(":")[0] for text in problems.texts}
    problems.extend([text.replace("policy.", "teacher.") for text in seen.texts if text.partition(":")[0] not in known])
