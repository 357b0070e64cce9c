# SPDX-License-Identifier: Apache-2.0
"""Rules of functions and classes of the user's own: each can be imported here, and takes what mrl calls it with."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import get_args

from mrl.config.datasets import PROCESSORS
from mrl.config.errors import Problems
from mrl.config.own import ESTIMATOR, LOGGER, LOSS, PROCESSOR, Kind, find, find_fitting, is_path, reward_parameters
from mrl.config.rules.data import key_of
from mrl.config.schema.algo import Estimator
from mrl.config.schema.run import RunConfig


def check_own(config: RunConfig, problems: Problems) -> None:
    """What a config names by its path is there and fits."""
    if config.has_engines:
        _check(problems, "grpo.adv_estimator.name", config.grpo.adv_estimator.name, ESTIMATOR, get_args(Estimator), "estimator")
        if config.loss_fn.token_loss is not None:
            _check(problems, "loss_fn.token_loss", config.loss_fn.token_loss, LOSS)
        for name, path in config.env.own.functions.items():
            _note(problems, f"env.own.functions.{name}={path}", lambda path=path: reward_parameters(find(path)))
    for key, dataset in (config.data.train_sets | config.data.validation_sets).items():
        _check(problems, key_of("processor", config.data.default, dataset, key), dataset.processor, PROCESSOR, PROCESSORS, "processor")
    for path in config.logger.own:
        _check(problems, "logger.own", path, LOGGER)


def _check(problems: Problems, key: str, path: str, kind: Kind, names: Collection[str] = (), what: str = "") -> None:
    if path in names:
        return
    if names and not is_path(path):
        problems.add(key, f"no such {what}", f"use one of {', '.join(names)}, or package.module:name of your own")
    else:
        _note(problems, f"{key}={path}", lambda: find_fitting(path, kind))


def _note(problems: Problems, key: str, check: Callable[[], object]) -> None:
    try:
        check()
    except ValueError as error:
        problems.extend([f"{key}: {error}"])
