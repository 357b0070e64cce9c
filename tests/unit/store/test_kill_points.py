# SPDX-License-Identifier: Apache-2.0
"""A run that is killed at a kill point of its store goes on in the next attempt, and in the one after it."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from pathlib import Path

import pytest

from mrl import env
from mrl.store.checkpoints import find_damage
from mrl.store.identity import Identity
from mrl.store.ledger import replay
from mrl.store.run_folder import RunFolder
from tests.unit.loop.test_saving import Attempt, flip
from tests.unit.store.test_run_folder import config

pytestmark = pytest.mark.usefixtures("no_report")

HANG_S = 60
# How often the run below passes the points of each name.
POINTS = {"start": 3, "rollouts": 16, "commit": 16, "prune": 8, "fallback": 5}


def run(folder: Path, steps: int, identity: Identity | None = None) -> Attempt:
    """An attempt of so many steps, each saved; two checkpoints are kept. Its ranks are those of the tests of saving."""
    settings = config(folder)
    settings.checkpointing.metric_name, settings.checkpointing.save_period, settings.checkpointing.keep_top_k = (
        None,
        1,
        2,
    )
    run_folder = RunFolder(settings, identity)
    run_folder.open()
    attempt = Attempt(run_folder)
    run_folder.note_attempt()
    state = attempt.saver.load(attempt.newest, last_step=99)
    for step in range(state.step + 1, state.step + 1 + steps):
        attempt.saver.save_last(attempt.train(step))
    with run_folder:
        return attempt


def killed(folder: Path, point: str) -> int:
    """Exit code of an attempt of four steps in a process of its own."""

    def child() -> None:
        env.PASSED.clear()
        os.environ[env.MRL_KILL_AT.name] = point
        run(folder, 4)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(HANG_S)
    assert process.exitcode is not None
    return process.exitcode


def damage(folder: Path) -> None:
    """A flipped bit in the shard of the newest checkpoint, and one in the ledger."""
    flip(folder / "run/step_2", 1)
    ledger = folder / "run/ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes().replace(b"taken", b"tajen", 1))


def after_a_kill(folder: Path, name: str, number: int) -> None:
    """Two steps, an attempt that is killed, and two that go on."""
    (folder / "model").mkdir(parents=True)
    first = run(folder, 2)
    if name == "fallback":
        damage(folder)
    assert killed(folder, f"{name}:{number}") == -signal.SIGKILL, "there are fewer points"
    before = max(
        (int(path.name[5:]) for path in (folder / "run").glob("step_*") if find_damage(path) is None), default=0
    )
    for attempt in (1, 2):
        resumed, last = run(folder, 2), before + 2 * attempt
        names = {path.name for path in (folder / "run").glob("*step_*")}
        assert {f"step_{last}", f"step_{last - 1}"} <= names <= {f"step_{last}", f"step_{last - 1}", "damaged_step_2"}
        assert sorted(resumed.folder.ledger.state.trained) == list(range(1, last + 1))
        assert replay(first.folder.ledger.path) == resumed.folder.ledger.state


@pytest.mark.parametrize("name", POINTS)
def test_two_attempts_go_on_after_a_kill(tmp_path: Path, name: str):
    # One of them, in an order that has nothing to do with theirs.
    after_a_kill(tmp_path, name, random.Random(name).randint(1, POINTS[name]))


@pytest.mark.long("faults")
@pytest.mark.parametrize("name", POINTS)
def test_two_attempts_go_on_after_a_kill_at_any_point(tmp_path: Path, name: str):
    for number in range(1, POINTS[name] + 1):
        after_a_kill(tmp_path / str(number), name, number)
    (tmp_path / "more/model").mkdir(parents=True)
    run(tmp_path / "more", 2)
    if name == "fallback":
        damage(tmp_path / "more")
    assert killed(tmp_path / "more", f"{name}:{POINTS[name] + 1}") == 0, "there are more points"
