"""Applies all rules between config keys, the model, the files and the disk, so that a bad run ends before anything starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from mrl.config.errors import ConfigError, NotKnown, Problems, Unchecked, Unprovided
from mrl.config.model import ModelSizes, find_override_problems, is_hub_id, read_model
from mrl.config.passthrough import check_arguments
from mrl.config.rules.algorithms import (
    check_algorithm,
    check_batch,
    check_early_stop,
    check_evaluation,
    check_reward_model,
    check_rollout_queue,
    check_supervised,
)
from mrl.config.rules.checkpointing import check_checkpointing, check_disk, existing_parent
from mrl.config.rules.data import check_data
from mrl.config.rules.engines import check_engines, check_lengths, check_servers
from mrl.config.rules.environments import check_environments
from mrl.config.rules.layout import check_cluster, check_layout, check_ports
from mrl.config.rules.training import check_logprobs, check_optimizer, check_recomputing, check_routing, check_rows, check_trained
from mrl.config.schema.run import RunConfig

_NOT_CACHED = "not in the local Hugging Face cache; it is downloaded at the start of the run, or give a folder"


def check_config(config: RunConfig) -> None:
    """Returns if a run of this config can start from here.

    Raises:
        ConfigError: with every problem at once: key, value, rule, way out.
    """
    if problems := find_problems(config):
        raise ConfigError(problems)


def find_problems(config: RunConfig, *, to_evaluate: bool = False) -> list[str]:
    """Every problem of a config, one text each. Rules that need a value which is not known are named, not applied."""
    problems, skipped = Problems(config), dict[str, list[str]]()
    rules = RULES | (ROLLOUT_RULES if config.has_engines else SUPERVISED_RULES) | (EVALUATION_RULES if to_evaluate else {})
    try:
        model = _read_model(config, problems)
        rules |= {} if model is None else {name: _of_model(check, model) for name, check in MODEL_RULES.items()}
    except NotKnown as error:
        skipped[error.key] = list(MODEL_RULES)
    for name, check in rules.items():
        try:
            check(config, problems)
        except NotKnown as error:
            skipped.setdefault(error.key, []).append(name)
    problems.extend([Unchecked(f"{key}: without its value not checked: {', '.join(names)}") for key, names in skipped.items()])
    return problems.texts


def _read_model(config: RunConfig, problems: Problems) -> ModelSizes | None:
    """Sizes of the model with the config's overrides; None, and a problem, if they cannot be read."""
    name, overrides = config.policy.model_name, config.policy.hf_config_overrides
    try:
        model = read_model(Path(name))
        if not overrides:
            return model
        wrong = find_override_problems(Path(name), overrides)
        problems.extend(wrong)
        return model if wrong else read_model(Path(name), overrides)
    except ValueError as error:
        if os.path.exists(os.path.join(name, "config.json")):
            problems.extend([f"policy.model_name={name}: {error}"])
        else:
            reason = _NOT_CACHED if is_hub_id(name) else str(error)
            problems.add("policy.model_name", reason, f"cannot be checked without its config.json: {', '.join(MODEL_RULES)}", Unchecked)
        return None


def _check_folders(config: RunConfig, problems: Problems) -> None:
    tokenizer = config.policy.tokenizer.name
    if not os.path.isdir(tokenizer):
        if is_hub_id(tokenizer):
            problems.extend([Unprovided(f"policy.tokenizer.name={tokenizer}: {_NOT_CACHED}")])
        else:
            way_out = "give the folder of the model's tokenizer"
            problems.add("policy.tokenizer.name", f"no such folder in {Path.cwd()}", way_out, Unprovided)
    for key, folder in (("checkpointing.checkpoint_dir", config.checkpointing.checkpoint_dir), ("logger.log_dir", config.logger.log_dir)):
        existing = existing_parent(folder)
        if not existing.is_dir():
            problems.add(key, f"{existing} is not a folder", "choose a folder that you may write", Unprovided)
        elif not os.access(existing, os.W_OK | os.X_OK):
            problems.add(key, f"you may not write {existing}", "choose a folder that you may write", Unprovided)


Check = Callable[[RunConfig, Problems], None]
ModelCheck = Callable[[RunConfig, ModelSizes, Problems], None]


def _of_model(check: ModelCheck, model: ModelSizes) -> Check:
    return lambda config, problems: check(config, model, problems)


RULES: dict[str, Check] = {
    "folders": _check_folders,
    "data": check_data,
    "checkpoints": check_checkpointing,
    "early stop": check_early_stop,
    "arguments of libraries": check_arguments,
    "rows": check_rows,
    "optimizer": check_optimizer,
    "log-probabilities": check_logprobs,
    "ports": check_ports,
    "reward model": check_reward_model,
    "parallel layout": check_cluster,
}
"""What a group of rules is about, and what applies them."""
ROLLOUT_RULES: dict[str, Check] = {
    "environments": check_environments,
    "batches": check_batch,
    "lengths": check_lengths,
    "engines": check_engines,
    "rollout queue": check_rollout_queue,
    "loss and advantages": check_algorithm,
    "HTTP server": check_servers,
}
SUPERVISED_RULES: dict[str, Check] = {"supervised training": check_supervised}
MODEL_RULES: dict[str, ModelCheck] = {
    "layout of the model": check_layout,
    "what is trained": lambda config, model, problems: check_trained(config, problems),
    "recomputing": check_recomputing,
    "routing": check_routing,
    "room for checkpoints": lambda config, model, problems: check_disk(config, model.num_parameters, problems),
}
"""Those that need the model's config.json."""
EVALUATION_RULES: dict[str, Check] = {"evaluation": check_evaluation}
