# SPDX-License-Identifier: Apache-2.0
"""Checks that every run makes before any process starts."""

from __future__ import annotations

import logging
from pathlib import Path

from conversion.cache import open_cache
from mrl import env
from mrl.config.errors import ConfigError, Unprovided
from mrl.config.model import model_folder, overridden_folder, with_cached_folders, with_local_folders
from mrl.config.rules.checks import check_config, find_problems
from mrl.config.rules.plausible import find_doubts
from mrl.config.schema.run import RunConfig
from mrl.plan.hardware import local_gpu
from mrl.plan.plan import prediction

logger = logging.getLogger(__name__)


def check_start(config: RunConfig, *, trains: bool = True) -> RunConfig:
    """The config with which the run starts, folders in place of names of the Hub; ValueError names every key or file at fault.

    A run that trains on GPUs says what memory it is predicted to need, and is refused if that cannot fit.
    """
    problems = find_problems(with_cached_folders(config))
    if any(not isinstance(problem, Unprovided) for problem in problems):
        # Report problems of the config itself before asking the network for the rest.
        raise ConfigError(problems)
    local = with_local_folders(config)
    check_config(local)
    if trains and local.cluster.gpus_per_node:
        logger.info("%s", prediction(local, local_gpu()))
    # Downloads a model of the Hub once nothing else is wrong.
    sections = [(config.policy, local.policy), *((config.teachers[name], found) for name, found in local.teachers.items())]
    for given, _ in sections:
        model_folder(given.model_name)
    if config.has_critic:
        model_folder(config.value.model_name)
    for doubt in find_doubts(local):
        logger.warning("%s", doubt)
    beside = Path(config.checkpointing.checkpoint_dir)
    for given, found in sections:
        found.model_name = str(overridden_folder(Path(found.model_name), given.hf_config_overrides, beside=beside))
    if (root := env.cache_root()) is not None:
        open_cache(root)
    elif trains:
        # The conversion into a cache would find what does not fit; it costs the import of torch.
        from conversion.convert import check_hf

        for model in ("policy", *local.models_beside):
            check_hf(Path(local.of_model(model).policy.model_name))
    return local
