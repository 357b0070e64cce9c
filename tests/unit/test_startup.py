# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from mrl import startup
from tests.sources import ROOT


def test_phases_add_up_to_the_time_since_the_command_and_are_taken_once(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(startup, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(startup, "_laps", {})
    monkeypatch.setattr(startup, "_last", [90.0])
    for phase, moment in (("import", 100.0), ("engines", 103.0), ("build", 110.0), ("engines", 110.5)):
        now[0] = moment
        startup.lap(phase)
    laps = startup.take()
    assert laps == {"import": 10.0, "engines": 3.5, "build": 7.0}
    *rows, total = startup.lines(laps)
    assert [row.split()[1:4:2] for row in rows] == [["10.0", "import"], ["3.5", "engines"], ["7.0", "build"]]
    assert total == "Start:    20.5 s  from the command to the first step's rollouts"
    startup.lap("engines")  # an engine that is started again
    assert startup.take() == {}


BECOMES_A_COMMAND = """
import os, sys, time
print(time.monotonic(), flush=True)
code = "from mrl import startup; import time; print(startup._last[0], time.monotonic())"
os.execv(sys.executable, [sys.executable, "-c", code])
"""


def test_the_budget_begins_with_the_command_and_not_with_the_shell_that_became_it():
    printed = subprocess.run(
        [sys.executable, "-c", BECOMES_A_COMMAND], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    moments = [float(word) for word in printed.split()]
    assert len(moments) == 3 and moments == sorted(moments)
