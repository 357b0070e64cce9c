# SPDX-License-Identifier: Apache-2.0
"""Checks that every run makes before any process starts."""

from __future__ import annotations

import logging
from pathlib import Path

from conversion.cache import open_cache
from mrl import env
from mrl.cluster.daemons import NO_ADDRESS, obstacles_of
from mrl.config.errors import ConfigError
from mrl.config.judge_runs import with_judge_folders
from mrl.config.model import (
    download_weights,
    find_missing_weights,
    find_wrong_weights,
    is_downloaded,
    overridden_folder,
    read_model,
    with_cached_folders,
    with_local_folders,
    with_section,
    with_value,
)
from mrl.config.rules.checks import find_problems
from mrl.config.rules.plausible import find_doubts
from mrl.config.schema.run import RunConfig
from mrl.config.sharing import describe_sharing
from mrl.gpus import find_fault
from mrl.kernels import describe_missing, missing_kernels
from mrl.plan.deadlines import describe_engine_start
from mrl.plan.hardware import local_gpu, local_memory
from mrl.plan.memory import with_limits
from mrl.plan.plan import prediction

logger = logging.getLogger(__name__)


def check_environment(config: RunConfig) -> None:
    """ConfigError if libraries, GPUs or limits of this host are not those that the config asks for.

    Several nodes check their own GPUs and limits.
    """
    cluster = config.cluster
    if fault := find_fault(cluster.gpus_per_node, num_nodes=cluster.num_nodes, has_engines=config.has_engines):
        raise ConfigError([fault])
    if cluster.num_nodes > 1 and env.RAY_ADDRESS.read() is None:
        raise ConfigError([f"cluster.num_nodes={cluster.num_nodes}: {NO_ADDRESS}"])
    if obstacles := obstacles_of(config):
        raise ConfigError(obstacles)


def check_start(config: RunConfig, *, trains: bool = True) -> RunConfig:
    """The config the run starts with, folders in place of Hub names; ValueError names every key or file at fault."""
    problems = find_problems(with_cached_folders(config), to_evaluate=not trains)
    if problems and all(problem.kind != "refused" for problem in problems):
        problems = find_problems(with_local_folders(config), to_evaluate=not trains)
    if problems:
        raise ConfigError(problems)
    check_environment(config)
    local = with_local_folders(config)
    if local.cluster.gpus_per_node and (
        missing := describe_missing(missing_kernels(read_model(Path(local.policy.model_name)).layers))
    ):
        logger.warning("%s", missing)
    if trains and local.cluster.gpus_per_node:
        gpu = local_gpu()
        logger.info("%s", prediction(local, gpu, local_memory() if gpu else None))
        if local.has_engines:
            logger.info(
                "%s", describe_engine_start(local, with_limits(local, gpu).policy.generation.vllm_cfg.max_num_seqs or 1)
            )
    if missing := [problem for problem in find_missing_weights(config) if not is_downloaded(problem)]:
        raise ConfigError(missing)
    download_weights(config)
    if wrong := find_wrong_weights(local):
        raise ConfigError(wrong)
    if trains:
        logger.info("Prefixes are %s", describe_sharing(local))
    for doubt in find_doubts(local):
        logger.warning("%s", doubt)
    beside = Path(config.checkpointing.checkpoint_dir)
    overrides = {model: section.hf_config_overrides for model, section in local.models.items()}
    for model, section in local.sections.items():
        folder = overridden_folder(Path(section.model_name), overrides[model], beside=beside)
        local = with_section(local, model, with_value(section, "model_name", str(folder)))
    local = with_judge_folders(local, lambda name: overridden_folder(Path(name), {}, beside=beside))
    if (root := env.cache_root()) is not None:
        open_cache(root)
    return local
