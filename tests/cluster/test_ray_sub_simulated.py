# SPDX-License-Identifier: Apache-2.0
"""scripts/ray.sub's logic on more nodes than a host holds; tests/cluster/test_ray_sub.py has the real thing on four."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cluster.simulated import JOB_ID, SUBNET, simulation
from tests.waiting import HANG_S, SOON_S, wait_until

NODES = [f"node-{k:03d}" for k in range(1, 33)]


def test_an_idle_cluster_of_32_nodes(tmp_path: Path):
    with simulation(tmp_path, NODES, SIMULATED_GRES="gpu:h100:8(S:0-1)") as job:
        job.wait_for("bash ")
        for log in (job.output, (job.logs / "ray-head.log").read_text()):
            assert "Number of actors online: 256/256" in log
        assert "All workers connected!" in job.output and "WARNING" not in job.output
        assert job.units() == dict.fromkeys(NODES, 8)
        assert sorted(path.name for path in job.logs.glob("ray-worker-*.log")) == [
            f"ray-worker-{k:02d}.log" for k in range(31)
        ]
        starts = job.ray_starts()
        head, last = starts.pop("node-001"), starts["node-032"]
        assert all(start["address"] == f"{SUBNET}.1:1200" for start in starts.values()) and head["port"] == "1200"
        assert {start["node-ip-address"] for start in starts.values()} == {f"{SUBNET}.{k}" for k in range(2, 33)}
        names = (
            "node-manager object-manager runtime-env-agent dashboard-agent-grpc metrics-export dashboard-agent-listen"
        ).split()
        assert [last[f"{name}-port"] for name in names] == ["1301", "1303", "1305", "1307", "1309", "1311"]
        assert [head[f"{name}-port"] for name in names] == ["1302", "1304", "1306", "1308", "1310", "1312"]
        assert (last["num-cpus"], last["num-gpus"], last["min-worker-port"], last["max-worker-port"]) == (
            "128",
            "8",
            "2000",
            "2999",
        )
        assert head["dashboard-host"] == "127.0.0.1"
        assert all("--gres=gpu:8" in words and "--container" not in words for words in job.record("srun"))

        def attach(*arguments: str) -> subprocess.CompletedProcess[str]:
            environment = os.environ | {"RECORD": str(tmp_path / "record"), "COMMAND": "echo $SLURMD_NODENAME"}
            script = tmp_path / f"{JOB_ID}-attach.sh"
            return subprocess.run(
                ["bash", script, *arguments], env=environment, capture_output=True, text=True, timeout=HANG_S
            )

        assert [attach(*words).stdout for words in ([], ["1"], ["31"])] == ["node-001\n", "node-002\n", "node-032\n"]
        assert attach("32").returncode == 2 and "K from 0 (head) to 31" in attach("32").stderr
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 0


def test_a_node_that_does_not_join_is_named_and_nothing_is_run(tmp_path: Path):
    with simulation(tmp_path, NODES, SIMULATED_ABSENT="node-017", JOIN_TIMEOUT_S="4", COMMAND="touch ran") as job:
        assert job.end() == 1
        last = job.output.splitlines()[-1]
    assert (
        "not all nodes joined: " in last
        and "248 of 256 slots are online after 4 s" in last
        and "logs: node-017 (see" in last
    )
    assert not (tmp_path / "ran").exists()


def test_a_run_that_has_saved_is_requeued_on_sites_without_gres(tmp_path: Path):
    variables = {"CONTAINER": "/images/mrl.sqsh", "MOUNTS": "/data:/data", "SRUN_HELP": "--container-image"}
    settings = {
        "SLURM_GPUS_ON_NODE": "4",
        "GPUS_PER_NODE": "4",
        "MIN_WORKER_PORT": "54001",
        "DASHBOARD_GRPC_PORT": "52367",
    }
    cache = {"UV_CACHE_DIR_OVERRIDE": str(tmp_path / "uv")}
    with simulation(tmp_path, NODES[:2], COMMAND="exit 75", **variables, **settings, **cache) as job:
        assert job.end() == -signal.SIGKILL
        assert job.record("scontrol") == [f"requeue {JOB_ID}"]
    assert "Number of actors online: 8/8" in job.output
    for step in job.record("srun"):
        assert "--gpus-per-node=4" in step and "--container-image=/images/mrl.sqsh" in step
        assert f"--container-mounts=/data:/data,{tmp_path}/uv:/root/.cache/uv,{job.logs}:{job.logs}" in step
    warned = [line for line in job.output.splitlines() if line.startswith("[WARNING]")]
    assert [line.split("] ")[1].split(" ")[0] for line in warned] == [
        "DASHBOARD_GRPC_PORT=52367",
        "MIN_WORKER_PORT=54001",
    ]
    assert not (job.logs / ".ray_token").exists()


def test_a_container_without_mounts_of_its_own_sees_the_logs(tmp_path: Path):
    with simulation(tmp_path, NODES[:1], COMMAND="exit 0", CONTAINER="mrl.sqsh", SRUN_HELP="--container-image") as job:
        assert job.end() == 0
        assert all(f" --container-mounts={job.logs}:{job.logs} " in step for step in job.record("srun"))


def test_requeues_of_saved_attempts_leave_the_restarts_for_failures(tmp_path: Path):
    def attempt(restart: int, code: int) -> int:
        variables = {"SLURM_RESTART_COUNT": str(restart), "BASE_LOG_DIR": str(logs), "RESTARTS_ON_FAILURE": "1"}
        with simulation(tmp_path / f"attempt-{restart}", NODES[:1], COMMAND=f"exit {code}", **variables) as job:
            return job.end()

    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / f"{JOB_ID}-failures").write_text("attempt 0\n")  # of an older job of this number
    # Only the first failure is restarted, however often the job was requeued; a saved attempt is always.
    requeued = -signal.SIGKILL
    assert [attempt(restart, code) for restart, code in enumerate((75, 75, 1, 75, 1))] == [*[requeued] * 4, 1]
    assert (logs / f"{JOB_ID}-failures").read_text() == "attempt 2\n"


def test_a_job_that_slurm_has_requeued_already_waits_for_its_end(tmp_path: Path):
    with simulation(tmp_path / "pending", NODES[:1], COMMAND="exit 75", SIMULATED_STATE="COMPLETING") as job:
        job.wait_for("requeueing job")
        wait_until(lambda: job.record("scontrol") != [], "requeue")
        with pytest.raises(subprocess.TimeoutExpired):
            job.process.wait(timeout=SOON_S)
    with simulation(tmp_path / "running", NODES[:1], COMMAND="exit 75", SIMULATED_STATE="RUNNING") as job:
        assert job.end() == 75
    assert job.output.splitlines()[-1].endswith("could not be requeued; submit the same command again")


@pytest.mark.parametrize(
    ("state", "calls"), [("RUNNING", []), ("COMPLETING", [f"update JobId={JOB_ID} StartTime=now+120"])]
)
def test_a_job_that_slurm_ends_to_requeue_it_is_not_started_at_once(tmp_path: Path, state: str, calls: list[str]):
    with simulation(tmp_path, NODES[:1], COMMAND=f"touch {tmp_path}/begun; sleep 600", SIMULATED_STATE=state) as job:
        wait_until((tmp_path / "begun").exists, "command")
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 128 + signal.SIGUSR1
        assert job.record("scontrol") == calls


def test_a_claim_that_is_not_the_partitions_ends_the_job(tmp_path: Path):
    with simulation(tmp_path, NODES, SIMULATED_GRES="gpu:4") as job:
        assert job.end() == 1
    assert job.output.splitlines()[-1].endswith("the nodes of partition batch have 4 (GRES); set GPUS_PER_NODE to that")
    assert job.record("srun") == []


def test_nodes_without_ray_end_the_job_before_any_step(tmp_path: Path):
    with simulation(tmp_path, NODES, SETUP_COMMAND="PATH=/usr/bin:/bin", VENV="/absent") as job:
        assert job.end() == 2
    assert "ray not found on" in job.output.splitlines()[-1] and "set VENV" in job.output
    assert not (tmp_path / "record" / "ray").exists()
