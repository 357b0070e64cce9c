# SPDX-License-Identifier: Apache-2.0
"""Applies all rules between config keys, the model, files and disk, so that a bad run ends before anything starts."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mrl.config.errors import NotKnown, Problem, Problems
from mrl.config.model import ModelSizes, is_hub_id, read_model, way_to_prepare
from mrl.config.parsers import check_formats
from mrl.config.passthrough import check_arguments
from mrl.config.rules import algorithms, data, fp8, layout, models, sockets, tokens, training
from mrl.config.rules.models import Check, ModelCheck
from mrl.config.schema.run import RunConfig
from mrl.config.texts import counted, spell_bytes
from mrl.phases import ModelName


def find_problems(config: RunConfig, *, to_evaluate: bool = False) -> list[Problem]:
    """Every problem of a config. Rules that need a value which is not known are named, not applied."""
    problems, skipped = Problems(config, config.facts.origins), dict[str, list[str]]()
    rules = RULES | (ROLLOUT_RULES if config.has_engines else SUPERVISED_RULES)
    rules |= EVALUATION_RULES if to_evaluate else TRAINING_RULES
    problems.group = "model"
    try:
        model = models.read_sizes(config, problems, ", ".join(MODEL_RULES))
        rules |= (
            {} if model is None else {name: partial(_check_model, check, model) for name, check in MODEL_RULES.items()}
        )
    except NotKnown as error:
        skipped[error.key] = list(MODEL_RULES)
    rules |= {"critics and teachers": models.check_sections}
    for name, check in rules.items():
        problems.group = name
        try:
            check(config, problems)
        except NotKnown as error:
            skipped.setdefault(error.key, []).append(name)
        except OSError as error:
            rule = f"{error.strerror}, and these rules need it: {name}"
            problems.tell(str(error.filename), None, rule, "give what you may read")
    problems.group = "not known"
    for key, names in skipped.items():
        problems.tell(key, None, f"without its value not checked: {', '.join(names)}", kind="not checked")
    return problems.merged


def check_folders(config: RunConfig, problems: Problems) -> None:
    """Checks that the tokenizer is there, and that the run may write its folders."""
    tokenizer = config.policy.tokenizer.name
    if not os.path.isdir(tokenizer):
        if is_hub_id(tokenizer):
            problems.tell("policy.tokenizer.name", tokenizer, models.NOT_CACHED, kind="to be provided")
        else:
            problems.add(
                "policy.tokenizer.name",
                f"no such folder in {Path.cwd()}",
                way_to_prepare(tokenizer) or "give the folder of the model's tokenizer",
                "to be provided",
            )
    for key, folder in (
        ("checkpointing.checkpoint_dir", config.checkpointing.checkpoint_dir),
        ("logger.log_dir", config.logger.log_dir),
    ):
        existing = existing_parent(folder)
        if not existing.is_dir():
            problems.add(key, f"{existing} is not a folder", "choose a folder that you may write", "to be provided")
        elif not os.access(existing, os.W_OK | os.X_OK):
            kind = "refused" if existing == Path(folder).absolute() else "to be provided"
            problems.add(key, f"you may not write {existing}", "choose a folder that you may write", kind)


def check_checkpointing(config: RunConfig, problems: Problems) -> None:
    """Checks that checkpoints can be ranked and kept by section `checkpointing`."""
    section = config.checkpointing
    metric_name = config.checkpointing.metric_name
    limit = config.checkpointing.checkpoint_must_save_by
    if section.ft_save_period is not None and section.ft_keep_latest_k is None:
        rule = "it needs checkpointing.ft_keep_latest_k, the number of these checkpoints that are kept"
        problems.add("checkpointing.ft_save_period", rule, "set it, for example to 1")
    if metric_name is not None:
        stage, _, metric = metric_name.partition(":")
        if stage not in ("train", "val") or not metric:
            problems.add(
                "checkpointing.metric_name",
                "must be train:<metric> or val:<metric>",
                "write for example val:accuracy, or null",
            )
        elif stage == "val" and section.enabled and not config.data.has_validation:
            rule = "there is no validation, because data.validation=null and no training rows are held out"
            problems.add("checkpointing.metric_name", rule, "use train:reward, or give data.validation")
        elif stage == "val" and section.enabled and config.has_engines:
            if near := algorithms.nearest_metric(metric, config.env):
                rule = "validations have no such metric, and checkpoints could not be ranked"
                problems.add("checkpointing.metric_name", rule, f"use val:{near}")
    if limit is not None and not re.fullmatch(r"\d{1,4}:\d{1,2}:\d{1,2}:\d{1,2}", limit):
        problems.add(
            "checkpointing.checkpoint_must_save_by",
            "must be DD:HH:MM:SS after the start",
            "write for example 00:03:40:00",
        )


# Measured on grpo_tiny.yaml: headers of tensors, metadata, ledger and tokenizer took 2 MB beside the values.
_BESIDE_BYTES = 2_500_000


@dataclass(frozen=True)
class CheckpointDemand:
    """The disk space that the checkpoints of a run need and have."""

    num_kept: int | None
    """None if all are kept."""
    checkpoint_bytes: int
    needed_bytes: int
    """Bytes of the checkpoints still to be written and kept, and of one written aside."""
    free_bytes: int

    @property
    def text(self) -> str:
        demand = describe_demand(self.num_kept, self.checkpoint_bytes, self.needed_bytes)
        return f"{demand}; {spell_bytes(self.free_bytes)} are free"


def describe_demand(num_kept: int | None, each: float, needed: float) -> str:
    """Says how many bytes checkpoints of `each` still need: `num_kept`, None = all of the run, and one aside."""
    further = f", each later one {spell_bytes(each)} (all are kept)" if num_kept is None else ""
    first = f"{counted(num_kept or 1, 'checkpoint')} of {spell_bytes(each)} and one being written need"
    return f"{first} {spell_bytes(needed)} more{further}"


def checkpoint_demand(config: RunConfig, num_parameters: int) -> CheckpointDemand:
    """Estimates disk space for checkpoints. If all are kept, their number is unknown before the end: one must fit."""
    section, sizes = config.checkpointing, {"policy": num_parameters}
    if config.has_critic:
        with suppress(ValueError):  # other rules report an unreadable model
            sizes["critic"] = read_model(Path(config.value.model_name)).num_parameters
    each = sum(checkpoint_bytes(config, sizes).values()) + _BESIDE_BYTES
    num_present = sum(1 for path in Path(section.checkpoint_dir).glob("step_*") if path.is_dir())
    num_kept = num_kept_at_most(config)
    needed = each * (max(0, (num_kept or 1) - num_present) + 1)
    return CheckpointDemand(num_kept, each, needed, shutil.disk_usage(existing_parent(section.checkpoint_dir)).free)


def check_disk(config: RunConfig, num_parameters: int, problems: Problems) -> None:
    """Checks that the checkpoints of the run fit on their disk."""
    if not config.checkpointing.enabled:
        return
    demand = checkpoint_demand(config, num_parameters)
    if demand.needed_bytes > demand.free_bytes:
        problems.add(
            "checkpointing.checkpoint_dir",
            demand.text,
            "free or choose another disk, or lower checkpointing.keep_top_k",
            "to be provided",
        )


def num_kept_at_most(config: RunConfig) -> int | None:
    """The largest number of checkpoints kept at once, if fewer than the run's steps bound it; else None."""
    section = config.checkpointing
    num_steps = (
        config.training.max_num_steps if config.training.max_num_steps >= 0 else math.inf
    )  # -1: as many as the data have
    # NeMo RL's files write "all" as a keep_top_k of a million.
    if section.keep_top_k is None or section.keep_top_k >= num_steps // section.save_period:
        return None
    return section.keep_top_k + (section.ft_keep_latest_k or 1)


def existing_parent(folder: str) -> Path:
    """The folder itself, or the nearest above it that exists."""
    path = Path(folder).absolute()
    return next(parent for parent in (path, *path.parents) if os.path.lexists(parent))


def _check_model(check: ModelCheck, model: ModelSizes, config: RunConfig, problems: Problems) -> None:
    check(config, model, problems)


RULES: dict[str, Check] = {
    "folders": check_folders,
    "data": data.check_data,
    "checkpoints": check_checkpointing,
    "early stop": algorithms.check_early_stop,
    "arguments of libraries": check_arguments,
    "rows": training.check_rows,
    "shared prefixes": training.check_prefixes,
    "optimizer": training.check_optimizer,
    "log-probabilities": training.check_logprobs,
    "ports": layout.check_ports,
    "sockets": sockets.check_sockets,
    "reward model": algorithms.check_reward_model,
    "own functions and classes": algorithms.check_own,
    "parallel layout": layout.check_cluster,
    "profiler": layout.check_profiler,
    "teacher": models.check_teacher,
    "reference": models.check_reference,
    "tokens of the policy": tokens.check_vocabulary,
}
ROLLOUT_RULES: dict[str, Check] = {
    "environments": data.check_environments,
    "nodes of rewards": layout.check_graders,
    "parsers": data.check_parsers,
    "batches": algorithms.check_batch,
    "lengths": layout.check_lengths,
    "engines": layout.check_engines,
    "weights in FP8": fp8.check_form,
    "rollout queue": algorithms.check_rollout_queue,
    "engines that come and go": algorithms.check_elastic,
    "loss and advantages": algorithms.check_algorithm,
    "critic": models.check_critic,
    "HTTP server": layout.check_servers,
    "formats of tool calls and thoughts": check_formats,
    "judges": models.check_judges,
}
SUPERVISED_RULES: dict[str, Check] = {
    "supervised training": algorithms.check_supervised,
    "judges": models.check_no_judges,
}
TRAINING_RULES: dict[str, Check] = {"training rows": data.check_training}
EVALUATION_RULES: dict[str, Check] = {"evaluation": algorithms.check_evaluation}
MODEL_RULES: dict[str, ModelCheck] = {
    "layout of the model": layout.check_layout,
    "what is trained": lambda config, model, problems: training.check_trained(config, problems),
    "adapters in engines": lambda config, model, problems: training.check_held_adapters(config, problems),
    "recomputing": training.check_recomputing,
    "latent attention": training.check_latent_attention,
    "gated delta nets": training.check_delta_nets,
    "attention sinks": training.check_sinks,
    "routing": training.check_routing,
    "dispatch to experts": training.check_dispatch,
    "multi-token prediction": training.check_mtp,
    "reward heads": lambda config, model, problems: models.check_heads(config, problems),
    "engine's files": lambda config, model, problems: models.check_engine_files(config, problems),
    "speculation": training.check_speculation,
    "blocks of FP8": fp8.check_blocks,
    "training in FP8": fp8.check_training,
    "room for checkpoints": lambda config, model, problems: check_disk(config, model.num_parameters, problems),
}


_OPTIMIZER_BYTES = 12


def checkpoint_bytes(config: RunConfig, num_parameters: Mapping[ModelName, int]) -> dict[ModelName, int]:
    """Bytes of each of these models in a checkpoint: its weights, and with `save_optimizer` its optimizer states.

    `num_parameters` is by model, of all or some `RunConfig.trained_models`. All parameters count as trained, but none
    with adapters (LoRA), whose own states are negligible.
    """
    found: dict[ModelName, int] = {}
    for model, number in num_parameters.items():
        section = config.model(model)
        has_states = config.checkpointing.save_optimizer and not section.megatron_cfg.peft.enabled
        found[model] = number * (
            (2 if section.precision == "bfloat16" else 4) + (_OPTIMIZER_BYTES if has_states else 0)
        )
    return found
