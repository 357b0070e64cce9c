# SPDX-License-Identifier: Apache-2.0
"""The one way from the program into its rooms: names of their functions, imported when they are used.

`mrl.ops` holds the operator's commands, `mrl.nemo` NeMo RL's dialect of config keys and NeMo Gym's rows, graders and
servers. No other file of the program names a room: see tests/unit/test_imports.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

COMMANDS = {
    "doctor": "mrl.ops.doctor.command",
    "keys": "mrl.ops.manual",
    "launch": "mrl.ops.launch",
    "plan": "mrl.ops.plan",
    "prepare": "mrl.ops.prepare",
    "replay": "mrl.ops.replay",
    "runs": "mrl.ops.runs",
    "view": "mrl.ops.view.server",
}
"""Module of each command `python -m mrl.NAME` that lives in a room."""


def command(name: str) -> Callable[[], int]:
    """Entry point of a command that lives in a room."""
    return _function(COMMANDS[name], "main")


def write_report(path: Path, *, state: str | None = None) -> None:
    """Writes the page of the run folder that holds `path`; see `mrl.ops.view.page`."""
    _function("mrl.ops.view.page", "write_report")(path, state=state)


def dialect() -> Any:
    """Module of NeMo RL's dialect, an instance of `mrl.config.migration.Dialect`."""
    return importlib.import_module("mrl.nemo.dialect.translate")


def renamed_keys() -> Mapping[str, str]:
    """NeMo RL's names of keys of the schema -> their names here."""
    return dialect().RENAMED


def check_gym(config: object, problems: object) -> None:
    """Checks section `env.nemo_gym`; see `mrl.nemo.gym.rules`."""
    _function("mrl.nemo.gym.rules", "check_gym")(config, problems)


def describe_routes(config: object) -> str:
    """Says who handles NeMo Gym's rows; see `mrl.nemo.gym.rules`."""
    return _function("mrl.nemo.gym.rules", "describe_routes")(config)


def gym_conversation(fields: Mapping[str, object]) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Messages and tools of a NeMo Gym row; see `mrl.nemo.gym.rows`."""
    return _function("mrl.nemo.gym.rows", "gym_conversation")(fields)


def grader(name: str) -> Callable[[Any], Any]:
    """Declares a built-in environment with NeMo Gym's verdicts, by a config's section `env`."""
    return _function(f"mrl.nemo.gym.graders.{name}", "environment")


async def reach_gym(section: object, **places: object) -> Any:
    """Starts or finds NeMo Gym's servers, a `mrl.rollout.agents.GymAgents`; see `mrl.nemo.gym.servers`."""
    return await _function("mrl.nemo.gym.servers", "reach_gym")(section, **places)


def _function(module: str, name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(module), name)
