# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time
from types import SimpleNamespace

import psutil
import pytest

from mrl import startup


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


def test_the_budget_begins_with_the_process():
    # psutil reads the boot time, too; the clock of the kernel has ticks of 10 ms.
    began = time.time() - (time.monotonic() - startup._began())
    assert began == pytest.approx(psutil.Process().create_time(), abs=2.0)
