# SPDX-License-Identifier: Apache-2.0
"""Rehearsals that need a process of their own, because they replace what torch and its libraries say of the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tests.sources import ROOT
from tests.waiting import HANG_S

TIMEOUT_S = 3 * HANG_S


def rows_of(module: str, *arguments: object, environment: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """The rows of JSON that a module of this folder prints, run with one thread, in another environment if given."""
    command = [sys.executable, "-m", f"tests.rehearsal.{module}", *map(str, arguments)]
    variables = {**(os.environ if environment is None else environment), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
