# SPDX-License-Identifier: Apache-2.0
"""Cluster events: time limits, preemption, lost power, a cut network, a one-node cache, two jobs in one run folder."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from mrl.convert import main as convert
from tests.cluster.conftest import Scenario
from tests.cluster.jobs import Job, submit, training
from tests.cluster.slurm import SlurmBox, signal_job
from tests.faults.attempts import lineage
from tests.faults.test_kill import rows

pytestmark = [pytest.mark.long("cluster"), pytest.mark.timeout(1500)]

STEPS = 6
SAME_RUN = "resumed with the ledger and, bit for bit, the weights of the undisturbed run"


@pytest.fixture(scope="module")
def unbroken(box: SlurmBox, inputs: list[str], tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("unbroken")
    job = start(box, inputs, folder)
    assert job.end() == "COMPLETED", job.explain()
    assert len({weights(job, step)["model.safetensors"] for step in (1, STEPS)}) == 2, "weights that move"
    return job


def start(box: SlurmBox, inputs: list[str], folder: Path, **variables: str) -> Job:
    return submit(box, folder, training(inputs, folder / "run", steps=STEPS), run_folder=folder / "run", **variables)


def weights(job: Job, step: int = STEPS) -> dict[str, bytes]:
    """The exported weights of a step."""
    out = job.folder / f"hf_{step}"
    if not out.exists():
        assert convert(["mcore-to-hf", "--mcore", str(job.run_folder / f"step_{step}"), "--out", str(out)]) == 0
    return {path.name: path.read_bytes() for path in out.glob("*.safetensors")}


def assert_same_run(job: Job, unbroken: Job, *, num_starts: int) -> None:
    """The job ran `num_starts` times; ledger, metrics and weights show each step once, as in the undisturbed run."""
    assert job.num_starts == num_starts, job.explain()
    assert rows(job.run_folder) == rows(unbroken.run_folder)
    assert lineage(job.run_folder) == lineage(unbroken.run_folder)
    assert sorted(lineage(job.run_folder)) == list(range(1, STEPS + 1))
    assert weights(job) == weights(unbroken)


def test_before_its_time_limit_a_run_is_saved_requeued_and_resumed(
    box: SlurmBox, inputs: list[str], unbroken: Job, tmp_path: Path, scenario: Scenario
):
    with scenario("signal before the time limit", SAME_RUN):
        job = start(box, inputs, tmp_path)
        job.wait_for("Step 2/")
        signal_job(box, job.job_id, signal.SIGUSR1)
        job.wait_for("Resuming from", restart=1)
        assert job.end() == "COMPLETED", job.explain()
        assert "the command ended with code 75: " in job.output and "requeueing job" in job.output
        assert "the same command goes on" in job.log("ray-driver.log")
        assert_same_run(job, unbroken, num_starts=2)


def test_a_preempted_run_is_saved_requeued_and_resumed(
    box: SlurmBox, inputs: list[str], unbroken: Job, tmp_path: Path, scenario: Scenario
):
    with scenario("preemption by a job of higher priority", SAME_RUN):
        job = start(box, inputs, tmp_path)
        job.wait_for("Step 2/")
        box.slurm(
            "sbatch",
            "--partition=urgent",
            "--nodes=4",
            "--exclusive",
            f"--output={tmp_path}/urgent.out",
            "--wrap=sleep 3",
        )
        job.wait_for("Resuming from", restart=1)
        assert job.end() == "COMPLETED", job.explain()
        assert_same_run(job, unbroken, num_starts=2)


def test_a_node_without_power_costs_one_attempt(
    box: SlurmBox, inputs: list[str], unbroken: Job, tmp_path: Path, scenario: Scenario
):
    with scenario("a node without power for 20 s", "one attempt lost; " + SAME_RUN):
        job = start(box, inputs, tmp_path, RESTARTS_ON_FAILURE="3")
        job.wait_for("Step 3/")
        box.power_off("mrl-n3")
        time.sleep(20)
        box.power_on("mrl-n3")
        job.wait_for_resumption()
        assert job.end() == "COMPLETED", job.explain()
        assert_same_run(job, unbroken, num_starts=2)


def test_a_node_without_network_costs_one_attempt_and_publishes_nothing(
    box: SlurmBox, inputs: list[str], unbroken: Job, tmp_path: Path, scenario: Scenario
):
    with scenario(
        "the driver's node without network for 45 s", "one attempt lost, which publishes nothing more; " + SAME_RUN
    ):
        job = start(box, inputs, tmp_path, RESTARTS_ON_FAILURE="3")
        job.wait_for("Step 3/")
        # The first node has the driver: the attempt that Slurm gives up for lost goes on for a while.
        box.link("mrl-n1", "down")
        time.sleep(45)
        box.link("mrl-n1", "up")
        job.wait_for_resumption()
        assert job.end() == "COMPLETED", job.explain()
        assert_same_run(job, unbroken, num_starts=2)


def test_a_cache_on_a_nodes_own_disk_is_named_before_anything_is_loaded(
    box: SlurmBox, inputs: list[str], tmp_path: Path, scenario: Scenario
):
    with scenario("`MRL_CACHE` on a node's own disk", "named before anything is loaded"):
        job = start(box, inputs, tmp_path, MRL_CACHE="/mnt/cache")
        assert job.end() == "FAILED"
        assert "cannot see" in job.log("ray-driver.log")
        assert "FileNotFoundError" not in job.log("ray-driver.log")


def test_a_second_job_leaves_a_run_folder_alone(box: SlurmBox, inputs: list[str], tmp_path: Path, scenario: Scenario):
    with scenario("a second job on the same run folder", "refused with exit code 2 and the owner's name"):
        command = training(inputs, tmp_path / "run", steps=1000).replace("cluster.num_nodes=4", "cluster.num_nodes=2")
        first = submit(box, tmp_path / "first", command, "--nodes=2", run_folder=tmp_path / "run")
        try:
            first.wait_for("Step 1/")
            second = submit(
                box, tmp_path / "second", command, "--nodes=2", "--job-name=second", run_folder=tmp_path / "run"
            )
            assert second.end() == "FAILED", second.explain()
            assert box.job(second.job_id)["ExitCode"] == "2:0"
            assert "is in use by process" in second.log("ray-driver.log")
        finally:
            box.slurm("scancel", str(first.job_id))


def test_slurm_announces_the_time_limit_and_starts_the_job_again(
    box: SlurmBox, inputs: list[str], tmp_path: Path, scenario: Scenario
):
    with scenario("time limit of four minutes, announced two before", "saved, requeued and resumed within the limit"):
        command = training(inputs, tmp_path / "run", steps=10000)
        job = submit(box, tmp_path, command, "--time=4", "--signal=B:USR1@120", run_folder=tmp_path / "run")
        try:
            job.wait_for("Resuming from", restart=1)
            job.wait_for("Step ", restart=1)
        finally:
            box.slurm("scancel", str(job.job_id))
        assert job.end() == "CANCELLED"
        steps = sorted(lineage(job.run_folder))
        assert steps == list(range(1, len(steps) + 1))
