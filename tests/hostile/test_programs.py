# SPDX-License-Identifier: Apache-2.0
"""Programs under reward that cheat: as the user of the tests, as a plain user, and with a container's limits."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from typing import TypedDict

import pytest

from tests.hostile.attacks import GROUPS, programs
from tests.hostile.run_attacks import HONEST, SLOW
from tests.sources import ROOT

IDENTITIES = ("self", "plain user", "container")


class Outcome(TypedDict):
    """What came of one program."""

    reward: float
    status: str
    said: str
    changed: list[str]


class Outcomes(TypedDict):
    """What came of all programs of one identity."""

    outcomes: dict[str, Outcome]
    left: list[str]
    processes: list[str]
    network: int


@functools.cache
def outcomes(identity: str) -> Outcomes:
    """All programs, run at once by one process of this identity."""
    with tempfile.TemporaryDirectory(prefix="mrl-hostile-") as folder:
        os.chmod(folder, 0o777)
        command = [sys.executable, "-m", "tests.hostile.run_attacks", identity, folder]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "HF_TOKEN": f"answer-{os.urandom(8).hex()}"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)


def cases(group: str) -> list[object]:
    return [
        pytest.param(identity, f"{group}/{name}", id=f"{identity}-{name}", marks=pytest.mark.attack(group))
        for identity in IDENTITIES
        for name in programs(group)
    ]


@pytest.mark.parametrize(("identity", "attack"), [case for group in GROUPS for case in cases(group)])
def test_a_program_that_cheats_gets_nothing_and_changes_nothing(identity: str, attack: str):
    outcome = outcomes(identity)["outcomes"][attack]
    assert (outcome["reward"], outcome["status"], outcome["changed"]) == (0.0, "ok", []), outcome["said"]
    assert "canary" not in outcome["said"] and "answer-" not in outcome["said"] and outcome["said"].isprintable()
    # An attack that only ran out of time would prove nothing.
    assert ("no answer within" in outcome["said"]) == (attack.partition("/")[2] in SLOW[:3]), outcome["said"]


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("identity", IDENTITIES)
def test_an_honest_program_is_not_hindered(identity: str, name: str):
    outcome = outcomes(identity)["outcomes"][f"honest/{name}"]
    assert outcome["reward"] == 1.0, outcome["said"]


@pytest.mark.parametrize("identity", IDENTITIES)
def test_nothing_stays_behind(identity: str):
    found = outcomes(identity)
    assert (found["left"], found["processes"], found["network"]) == ([], [], 0)
