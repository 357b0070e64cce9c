"""Environments by name."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mrl import env
from mrl.envs.code import probe
from mrl.envs.confine import landlock_abi
from mrl.envs.pool import RewardPool
from mrl.envs.scratch import remove_abandoned
from mrl.envs.worker import RewardFunction

if TYPE_CHECKING:
    from mrl.config.schema.env import CodeEnvConfig, EnvConfig

logger = logging.getLogger(__name__)

# What a child may take beyond the time that its function allows a program, before it is the child that hangs.
GRACE_S = 10.0
# One alone would keep all texts waiting for the deadline of one.
MIN_WORKERS = 2


def build_environment(name: str, config: EnvConfig, *, endpoints: Path | None = None) -> RewardPool:
    """The environment of this name, started: a built-in one, one of `env.own.functions`, or one of an installed package.

    `endpoints` is the file with the addresses of the engines, if they have any; the user's own functions find it.

    Raises:
        RuntimeError: its children do not start, because the user's function cannot be imported for example; or this host cannot confine
            the programs of `code`.
    """
    remove_abandoned()
    if landlock_abi() == 0:
        logger.warning("The reward children of %s may write files: this kernel has no Landlock; see python -m mrl.doctor", name)
    match name:
        case "math":
            options = {"impl": config.math.math_verify_impl, "is_strict": config.math.strict}
            return _pool("mrl.envs.math:make", options, num_workers=config.math.num_workers, timeout_s=config.math.timeout_s)
        case "mcqa":
            return _pool("mrl.envs.mcqa:make", {}, num_workers=config.mcqa.num_workers, timeout_s=config.mcqa.timeout_s)
        case "code":
            code = config.code
            options = {"test_timeout_s": code.unit_test_timeout_s, "timeout_s": code.timeout_s, "may_escape": _may_escape(code)}
            function = RewardFunction("mrl.envs.code:make", options, allowances=("processes",), blames_text=True)
            return RewardPool(function, num_workers=min(code.num_workers, os.cpu_count() or 1), timeout_s=code.timeout_s + GRACE_S)
        case "instruction_following":
            checks = config.instruction_following
            return _pool("mrl.envs.instruction_following:make", {}, num_workers=checks.num_workers, timeout_s=checks.timeout_s)
        case "structured_outputs":
            checks = config.structured_outputs
            return _pool("mrl.envs.structured_outputs:make", {}, num_workers=checks.num_workers, timeout_s=checks.timeout_s)
        case "workplace_assistant":
            tools = config.workplace_assistant
            options = {"tables_path": None if tools.tables_path is None else os.path.abspath(tools.tables_path)}
            return _pool("mrl.envs.workplace_assistant:make", options, num_workers=tools.num_workers, timeout_s=tools.timeout_s)
    own = config.own
    # A user's module is found where Python finds it here: Ray gives its processes the driver's folders.
    folders = tuple(os.path.abspath(p) for p in sys.path)
    variables = {} if endpoints is None else {env.MRL_ENDPOINTS.name: str(endpoints)}
    function = RewardFunction("mrl.envs.own:make", {"function": own.functions.get(name, name)}, folders, variables, tuple(own.allow))
    return RewardPool(function, num_workers=own.num_workers, timeout_s=own.timeout_s)


def _may_escape(code: CodeEnvConfig) -> bool:
    """Whether programs run unconfined, because this host can do no better and the config allows it.

    Raises:
        RuntimeError: the config does not.
    """
    lack = probe()
    if not lack:
        return False
    if not code.allow_unconfined:
        raise RuntimeError(
            f"the environment code does not start: {lack}. Use another host or container (python -m mrl.doctor says what holds), or set "
            "env.code.allow_unconfined=true, with which programs of the model may read and change what this user may"
        )
    logger.warning("env.code.allow_unconfined=true: programs of the model may read and change what this user may: %s", lack)
    return True


def _pool(factory: str, options: Mapping[str, object], *, num_workers: int, timeout_s: float) -> RewardPool:
    function = RewardFunction(factory, options, blames_text=True)
    return RewardPool(function, num_workers=max(MIN_WORKERS, num_workers), timeout_s=timeout_s)
