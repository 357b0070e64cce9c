# SPDX-License-Identifier: Apache-2.0
"""The quickstart in small: it learns, survives a kill, and exports what it has learned."""

from __future__ import annotations

import os
import signal

import pytest

from mrl.ops.view.timeline import list_windows, memory_by_phase, read_timelines
from tests.faults.attempts import Attempt, is_taken, lineage
from tests.learn.quickstart import PREPARE_TIMEOUT_S, RUN_FOLDER, Quickstart, accuracy_of_export, call, sampling_noise

STEPS = 30
KILLED_IN_STEP = 13


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Quickstart:
    """Thirty GRPO steps at TP2 x DP2 x EP2; the driver is killed in step 13; the same command goes on from step 10."""
    folder = tmp_path_factory.mktemp("smoke")
    call(folder, "-m", "mrl.prepare", "tiny", timeout_s=PREPARE_TIMEOUT_S)
    overrides = [f"grpo.max_num_steps={STEPS}", "checkpointing.save_period=10", "logger.tensorboard_enabled=false"]
    with Attempt(folder / RUN_FOLDER, overrides, folder / "first.log", working_folder=folder) as first:
        first.wait_until(lambda: is_taken(first.run_folder, KILLED_IN_STEP), f"rollouts of step {KILLED_IN_STEP}")
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        first.assert_nothing_survives()
    with Attempt(folder / RUN_FOLDER, overrides, folder / "second.log", working_folder=folder) as second:
        assert second.finish() == 0, second.text()[-6000:]
    return Quickstart(folder, 0.0, second.text())


def test_it_goes_on_from_its_checkpoint(run: Quickstart):
    assert [row["step"] for row in run.metrics] == list(range(STEPS + 1))
    trained = lineage(run.run_folder)
    assert sorted(trained) == list(range(1, STEPS + 1))
    assert "step_10" in run.console


def test_engines_hold_the_weights_that_are_trained(run: Quickstart):
    steps = run.metrics[1:]
    assert all(row["refit/verified_bytes"] > 0 for row in steps)
    assert max(row["train/gen_kl_error"] for row in steps) < 1e-6


def test_it_learns(run: Quickstart):
    (_, before), *_, (_, after) = run.accuracies
    print(f"held-out accuracy {before:.3f} -> {after:.3f} in {STEPS} steps")
    assert before <= 0.30
    assert after >= before + 0.2


def test_the_export_answers_as_the_run_reports(run: Quickstart):
    _, reported = run.accuracies[-1]
    exported = accuracy_of_export(run)
    assert abs(exported.sampled - reported) <= sampling_noise([exported.sampled, reported], exported.num_problems)


def test_every_process_says_what_it_did_in_a_step(run: Quickstart):
    windows = list_windows(run.run_folder)
    assert list(windows) == list(range(STEPS + 1))
    lanes = {lane["name"]: lane["spans"] for lane in read_timelines([windows[STEPS - 1]])[str(STEPS - 1)]["lanes"]}
    ranks = [f"policy rank {rank}" for rank in range(4)]
    assert {"driver", *ranks, "engine 0", "rewards: math worker 0"} <= lanes.keys()
    assert all({"train_step", "refit", "compare copies"} <= {name for name, *_ in lanes[rank]} for rank in ranks)
    memory = memory_by_phase(read_timelines([windows[STEPS - 1]]))
    assert {"logprob", "train", "refit"} <= memory.keys()
    assert memory["train"]["host_bytes"] > 10**8 and memory["generate"]["engine_host_bytes"] > 10**8
    # The driver's span and its metric are two measurements of one step.
    (length,) = [length for name, _, length, _ in lanes["driver"] if name == "step"]
    (row,) = [row for row in run.metrics if row["step"] == STEPS - 1]
    assert abs(length / 1e6 - row["time/total"]) < 0.01
