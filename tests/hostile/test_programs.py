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
from tests.waiting import HANG_S

IDENTITIES = ("self", "plain user", "container")


class Outcome(TypedDict):
    """Outcome of one program."""

    reward: float
    status: str
    said: str
    changed: list[str]


class Outcomes(TypedDict):
    """Outcomes of all programs of one identity."""

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
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_TOKEN": f"answer-{os.urandom(8).hex()}",
        }
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3 * HANG_S)
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
    assert ("no answer within" in outcome["said"]) == (attack.partition("/")[2] in SLOW), outcome["said"]


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("identity", IDENTITIES)
def test_an_honest_program_is_not_hindered(identity: str, name: str):
    outcome = outcomes(identity)["outcomes"][f"honest/{name}"]
    assert outcome["reward"] == 1.0, outcome["said"]


@pytest.mark.parametrize("identity", IDENTITIES)
def test_nothing_stays_behind(identity: str):
    found = outcomes(identity)
    assert (found["left"], found["processes"], found["network"]) == ([], [], 0)


BESIDE_A_BOMB = """
import json, os, sys, threading, time
from mrl.config.schema.env import CodeEnvConfig, EnvConfig
from mrl.envs.task import Task
from tests.hostile.run_attacks import become
from tests.unit.envs.pools import build_environment
become("container")
is_full, is_over = threading.Event(), threading.Event()

def end_soon():
    is_full.wait()
    time.sleep(0.5)
    is_over.set()

tests = {"unit_tests": {"inputs": [""], "outputs": ["42"]}}
with build_environment("code", EnvConfig(code=CodeEnvConfig(num_workers=1))) as pool:
    threading.stack_size(32768)
    bomb = [threading.Thread(target=end_soon)]
    bomb[0].start()
    while not is_full.is_set():
        bomb.append(threading.Thread(target=is_over.wait))
        try:
            bomb[-1].start()
        except RuntimeError:
            is_full.set()
    (verdict,) = pool.score([Task(("```\\nprint(42)\\n```",), row=json.dumps(tests))])
    said = {"reward": verdict.reward, "reason": verdict.reason}
    said |= {"was_waiting": is_over.is_set(), "num_threads": len(bomb)}
print(json.dumps(said))
"""


def test_a_program_starts_although_the_threads_of_another_fill_the_limit():
    done = subprocess.run(
        [sys.executable, "-c", BESIDE_A_BOMB], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    assert said["reward"] == 1.0 and said["was_waiting"] and said["num_threads"] > 100, said
