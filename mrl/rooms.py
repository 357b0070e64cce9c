# SPDX-License-Identifier: Apache-2.0
"""The one way from the program into its rooms: names of their functions, imported when they are used.

`mrl.ops` holds the operator's commands. No other file of the program names a room: see
tests/unit/test_imports.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMMANDS = {
    "doctor": "mrl.ops.doctor.command",
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


def _function(module: str, name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(module), name)
