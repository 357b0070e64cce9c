# SPDX-License-Identifier: Apache-2.0
"""scripts/ray.sub on a real Slurm: policy ranks and engines on four nodes, files and lines as NeMo RL users expect."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cluster.conftest import Scenario
from tests.cluster.jobs import Job, submit, training
from tests.cluster.slurm import SlurmBox
from tests.learn.quickstart import PREFIX


def metrics(job: Job) -> list[dict]:
    return [json.loads(line) for line in (job.run_folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_on_four_nodes(box: SlurmBox, inputs: list[str], tmp_path: Path):
    job = submit(box, tmp_path, training(inputs, tmp_path / "run", steps=2), run_folder=tmp_path / "run")
    assert job.end() == "COMPLETED", job.explain()
    assert box.job(job.job_id)["ExitCode"] == "0:0"

    for log in (job.output, job.log("ray-head.log")):
        assert "Number of actors online: 4/4" in log
    assert "All workers connected!" in job.output
    assert job.output.splitlines()[-1].endswith(f"The command is done; log: {job.logs()}/ray-driver.log")
    names = {path.name for path in job.logs().iterdir()}
    assert {"STARTED_RAY_HEAD", "ENDED", "ray-head.log", "ray-driver.log", "dashboard.log"} <= names
    assert {f"ray-worker-{index}.log" for index in range(3)} <= names
    assert ".ray_token" not in names

    driver = re.sub(PREFIX, "", job.log("ray-driver.log"), flags=re.MULTILINE)
    assert "Number of actors online: 4/4" in driver
    assert "Step 2/2" in driver
    rows = [line.split() for line in driver.splitlines() if line.split()[1:2] and line.split()[1] in box.names]
    assert sorted(row[1] for row in rows) == box.names, "one rank on each node"
    assert [row[3] for row in rows].count("-") == 2, "two engines, on nodes of their own"
    assert all(row["refit/verified_bytes"] > 0 for row in metrics(job))
    assert any(row["train/grad_norm"] > 0 for row in metrics(job)), "weights that move"
    assert all(row["train/mean_abs_dlogp"] < 1e-5 for row in metrics(job))


@pytest.mark.long("cluster")
def test_an_idle_cluster_is_entered_by_its_attach_script(box: SlurmBox, tmp_path: Path, scenario: Scenario):
    with scenario(
        "interactive, two GPUs a node",
        "attach script on the head and on a worker, GPUs by GRES, dashboard, copies of Ray's logs",
    ):
        asked = {"GPUS_PER_NODE": str(box.num_gpus), "RAY_LOG_SYNC_FREQUENCY": "5"}
        job = submit(box, tmp_path, "", f"--gres=gpu:{box.num_gpus}", run_folder=tmp_path / "run", **asked)
        try:
            job.wait_for("Ray Cluster is idled", f"../slurm-{job.job_id}.out")
            assert "Number of actors online: 8/8" in job.output
            script = str(tmp_path / f"{job.job_id}-attach.sh")
            count = "python -c 'import ray; ray.init(log_to_driver=False); print(len(ray.nodes()))'"
            page = (
                'python -c \'import urllib.request; print(urllib.request.urlopen("http://127.0.0.1:8265", '
                "timeout=30).status)'"
            )
            on_head = {"COMMAND": f"hostname; echo $CUDA_VISIBLE_DEVICES; {count}; {page}"}
            assert box.slurm("bash", script, variables=on_head).split() == ["mrl-n1", "0,1", "4", "200"]
            doctor = {"COMMAND": "python -m mrl.doctor --json"}
            said = json.loads(box.slurm("bash", script, variables=doctor, check=False))
            found = {finding["check"]: finding for finding in said["findings"]}
            assert found["nodes"]["found"] == "4: mrl-n1, mrl-n2, mrl-n3, mrl-n4"
            whole = ("nodes", "mrl on the nodes", "packages on the nodes", "clocks", "shared folder")
            assert [found[check]["status"] for check in whole] == ["ok"] * 5
            assert box.slurm("bash", script, "2", variables={"COMMAND": "hostname"}).split() == ["mrl-n3"]
        finally:
            box.slurm("scancel", str(job.job_id))
        assert job.end() == "CANCELLED"
        assert {path.parent.name for path in job.logs().glob("ray/*/raylet.out")} == set(box.names)


@pytest.mark.long("cluster")
def test_the_exit_code_of_the_command_is_the_jobs_and_its_last_error_the_last_line(
    box: SlurmBox, tmp_path: Path, scenario: Scenario
):
    with scenario("a key that does not exist", "exit code of the job, its reason on the last line"):
        job = submit(
            box,
            tmp_path,
            "python -m mrl.train grpo_tiny.yaml grpo.num_prompts_per_stepp=3",
            run_folder=tmp_path / "run",
        )
        assert job.end() == "FAILED"
        assert box.job(job.job_id)["ExitCode"] == "2:0"
        last = job.output.splitlines()[-1]
        assert "the command ended with code 2" in last and "nearest is grpo.num_prompts_per_step" in last


@pytest.mark.long("cluster")
def test_a_node_that_does_not_join_is_named(box: SlurmBox, tmp_path: Path, scenario: Scenario):
    with scenario("a node that does not join", "its name on the last line, `COMMAND` is not run"):
        stuck = "[[ $(hostname) != mrl-n3 ]] || sleep 600"
        job = submit(box, tmp_path, "touch ran", run_folder=tmp_path / "run", SETUP_COMMAND=stuck, JOIN_TIMEOUT_S="60")
        assert job.end() == "FAILED"
        last = job.output.splitlines()[-1]
        assert "3 of 4 slots are online after 60 s" in last and "missing, see the logs: mrl-n3" in last
        assert not (tmp_path / "ran").exists()


@pytest.mark.long("cluster")
def test_a_log_folder_that_not_all_nodes_see_ends_the_job(box: SlurmBox, tmp_path: Path, scenario: Scenario):
    with scenario("logs on a node's own disk", "the nodes and the setting on the last line, `COMMAND` is not run"):
        job = submit(box, tmp_path, "touch ran", run_folder=tmp_path / "run", BASE_LOG_DIR="/mnt/logs")
        assert job.end() == "FAILED"
        last = job.output.splitlines()[-1]
        assert "mrl-n2,mrl-n3,mrl-n4 cannot see /mnt/logs/" in last
        assert "BASE_LOG_DIR must be on a file system that all nodes share" in last
        assert not (tmp_path / "ran").exists()
