# SPDX-License-Identifier: Apache-2.0
"""Part "async": a run with lag learns, is a function of its config and seed, and loses nothing when it is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from mrl.store.checkpoints import find_damage
from tests.faults.attempts import Runs, is_taken, is_trained, is_writing, ledger, lineage
from tests.faults.test_kill import SETTINGS, STEPS, Moment, rows, weights

pytestmark = [pytest.mark.long("async"), pytest.mark.timeout(2400)]

AHEAD = ["grpo.async_grpo.enabled=true", "policy.generation.colocated.enabled=false"]
MOMENTS: list[tuple[str, Moment]] = [
    ("generation of step 2", lambda folder: is_taken(folder, 2)),
    ("refit of step 3", lambda folder: is_trained(folder, 3)),
    ("checkpoint of step 4", lambda folder: is_writing(folder, 4)),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("async"), [*SETTINGS, *AHEAD])


@pytest.fixture(scope="module")
def unbroken(runs: Runs) -> Path:
    return runs.unbroken()


def same_in_every_run(run_folder: Path) -> list[dict]:
    timed = ("rollout/engine_idle_fraction", "refit/drain_seconds", "train/buffer_size")
    return [{name: value for name, value in row.items() if name not in timed} for row in rows(run_folder)]


def test_a_run_in_order_is_a_function_of_config_and_seed(runs: Runs, unbroken: Path, tmp_path: Path):
    with runs.attempt("again", "only") as again:
        assert again.finish() == 0, again.text()
    assert same_in_every_run(again.run_folder) == same_in_every_run(unbroken)
    assert weights(again.run_folder, tmp_path / "again") == weights(unbroken, tmp_path / "unbroken")


def test_a_killed_driver_loses_no_prompt_and_trains_none_twice(runs: Runs, unbroken: Path):
    for number, (name, has_come) in enumerate(MOMENTS):
        with runs.attempt("killed", str(number)) as current:
            current.wait_until(lambda: has_come(current.run_folder), name)  # noqa: B023  called in this turn of the loop
            os.kill(current.process.pid, signal.SIGKILL)
            assert current.finish() not in (0, 2)
            current.assert_nothing_survives()
    with runs.attempt("killed", "last") as last:
        assert last.finish() == 0, last.text()
        assert "Resuming from" in last.text()
    assert all(find_damage(folder) is None for folder in last.run_folder.glob("step_*"))
    # What was under way is drawn again by newer weights: the prompts of every step are the same, the numbers are not.
    assert sum(event["event"] == "rolled_back" for event in ledger(last.run_folder)) >= 2
    assert lineage(last.run_folder) == lineage(unbroken)
    assert sorted(lineage(last.run_folder)) == list(range(1, STEPS + 1))
