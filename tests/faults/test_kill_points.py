# SPDX-License-Identifier: Apache-2.0
"""Real runs killed at every kill point, or without Ray or memory: they end, and the next two attempts go on."""

from __future__ import annotations

import os
import re
import resource
import signal
from pathlib import Path

import psutil
import pytest

from mrl.shortage import WAY_OUT
from mrl.signals import ENDED_EARLY
from mrl.store.checkpoints import find_damage, newest_step
from tests.faults.attempts import Attempt, is_trained, lineage
from tests.faults.test_hangs import SETTINGS
from tests.stack.loop.conftest import write_inputs

# How often a start without a validation passes its points, up to the first step's rollouts, and every refit its own.
NUM_STARTS, NUM_REFITS = 15, 3
WALK = [
    *(("start", number) for number in range(1, NUM_STARTS + 1)),
    # A step passes four: its prompts are asked for, and taken; it is trained, and recorded.
    *(("rollouts", number) for number in range(4, 9)),
    # Those of refit zero, and of the second step; the refit with the loaded weights, and the first step's, come
    # between.
    *(("refit", number) for number in (*range(1, NUM_REFITS + 1), *range(3 * NUM_REFITS + 1, 4 * NUM_REFITS + 1))),
]


def attempt(run_folder: Path, inputs: list[str], log: str, *settings: str) -> Attempt:
    overrides = [*SETTINGS, *inputs, f"checkpointing.checkpoint_dir={run_folder}", *settings]
    return Attempt(run_folder, overrides, run_folder.with_name(f"{log}.log"))


def assert_goes_on(run_folder: Path, inputs: list[str]) -> None:
    """Two attempts, one ended by a signal and one that trains to its last step, from where the one before has ended."""
    first = newest_step(run_folder)
    with attempt(run_folder, inputs, "next") as current:
        current.wait_until(lambda: f"Step {first + 2}/" in current.text(), "two steps")
        current.send(signal.SIGTERM, "driver")
        assert current.finish() == ENDED_EARLY, current.text()[-4000:]
        current.assert_nothing_survives()
    reached = newest_step(run_folder)
    assert reached >= first + 2 and max(lineage(run_folder)) == reached
    with attempt(run_folder, inputs, "last", f"grpo.max_num_steps={reached + 2}") as current:
        assert current.finish() == 0 and f"Resuming from {run_folder}/step_{reached} " in current.text(), (
            current.text()[-4000:]
        )
        current.assert_nothing_survives()
    assert sorted(lineage(run_folder)) == list(range(1, reached + 3)) and not (run_folder / "owner.json").exists()
    assert all(find_damage(folder) is None for folder in run_folder.glob("step_*"))


@pytest.mark.long("faults")
@pytest.mark.timeout(7200)
def test_a_run_that_is_killed_at_every_point_goes_on_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    inputs, run_folder = write_inputs(tmp_path), tmp_path / "run"
    for name, number in WALK:
        before = newest_step(run_folder)
        monkeypatch.setenv("MRL_KILL_AT", f"{name}:{number}")
        with attempt(run_folder, inputs, f"{name}-{number}") as current:
            assert current.finish() == -signal.SIGKILL and f"killed at {name}:{number}," in current.text(), (
                current.text()[-4000:]
            )
            current.assert_nothing_survives()
        assert (
            newest_step(run_folder) >= before
            and set(range(1, newest_step(run_folder) + 1)) <= lineage(run_folder).keys()
        )
    monkeypatch.setenv("MRL_KILL_AT", f"start:{NUM_STARTS + 1}")  # there are no more
    assert_goes_on(run_folder, inputs)


@pytest.mark.long("faults")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("daemon", "code"), [("raylet", 1), ("gcs_server", ENDED_EARLY)])
def test_a_run_whose_ray_dies_ends_by_its_name_and_goes_on(tmp_path: Path, daemon: str, code: int):
    inputs, run_folder = write_inputs(tmp_path), tmp_path / "run"
    with attempt(run_folder, inputs, "first") as current:
        current.wait_until(lambda: is_trained(run_folder, 2), "step 2")
        (pid,) = (
            found.pid
            for found in psutil.Process(current.process.pid).children(recursive=True)
            if found.name() == daemon
        )
        os.kill(pid, signal.SIGKILL)
        assert current.finish() == code, current.text()[-4000:]
        said = rf"Ray's .*{daemon} \(process {pid}, exit code -9\).* died.*The same command resumes"
        assert re.search(said, current.text()), current.text()[-4000:]
        current.assert_nothing_survives()
    assert not (run_folder / "owner.json").exists()
    if code == ENDED_EARLY:  # actors live on without the head
        assert newest_step(run_folder) == max(lineage(run_folder))
    assert_goes_on(run_folder, inputs)


@pytest.mark.long("faults")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("victim", ["driver", "policy-rank-1"])
def test_a_process_without_memory_ends_its_run_at_once_with_the_reason(tmp_path: Path, victim: str):
    """A limit falls in mid-run, as by `prlimit --as`: no thread finds memory for its first line."""
    inputs, run_folder = write_inputs(tmp_path), tmp_path / "run"
    with attempt(run_folder, inputs, "first") as current:
        current.wait_until(lambda: is_trained(run_folder, 2), "step 2")
        pid = current.process.pid if victim == "driver" else current.actor_pid(victim)
        resource.prlimit(pid, resource.RLIMIT_AS, (1 << 30, 1 << 30))
        assert current.finish() == 1, current.text()[-4000:]
        current.assert_nothing_survives()
    errors = [line for line in current.text().splitlines() if " ERROR " in line]
    assert all(WAY_OUT in line for line in (errors[0], current.text().rstrip().splitlines()[-1])), errors
    assert victim.replace("-", " ") in errors[-1] and "The run hangs" not in current.text()
    assert_goes_on(run_folder, inputs)
