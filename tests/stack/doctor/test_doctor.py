# SPDX-License-Identifier: Apache-2.0
"""`python -m mrl.doctor` on a real Ray cluster of two nodes, and torch's own word on GPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mrl.ops.doctor.gpus import probe_cuda
from tests.sources import ROOT
from tests.waiting import HANG_S, wait_until

TIMEOUT_S = 3 * HANG_S
Findings = dict[str, dict[str, str]]


def test_torch_says_in_a_process_of_its_own_whether_there_is_a_gpu():
    assert (probe_cuda().error == "torch.cuda.is_available() is False") == (not torch.cuda.is_available())


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """Address of a cluster of two raylets of this host, and the process of the second."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = cluster.add_node(num_cpus=1)
    assert cluster.address is not None
    yield cluster.address, second.all_processes["raylet"][0].process.pid
    cluster.shutdown()


def said(cache: Path, address: str, **variables: str) -> tuple[int, Findings]:
    """Exit code and findings by check."""
    environment = os.environ | {"RAY_ADDRESS": address, "MRL_CACHE": str(cache), **variables}
    command = [sys.executable, "-m", "mrl.doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    printed = json.loads(done.stdout)
    return done.returncode, {finding["check"]: finding for finding in printed["findings"]}


@pytest.mark.long("cluster")
def test_every_node_of_a_cluster_is_asked(two_nodes: tuple[str, int], tmp_path: Path):
    address, second = two_nodes
    _, findings = said(tmp_path / "cache", address)
    for check in ("nodes", "mrl on the nodes", "packages on the nodes", "GPUs on the nodes", "clocks", "shared folder"):
        assert findings[check]["status"] == "ok", findings[check]
    assert findings["nodes"]["found"].startswith("2: ")
    assert not (tmp_path / "cache").exists()

    code, findings = said(tmp_path / "cache", address, SLURM_JOB_NUM_NODES="3")
    assert code == 1 and findings["nodes"]["found"].startswith("2 of 3 have joined: ")

    os.kill(second, signal.SIGKILL)
    wait_until(lambda: "lost: " in said(tmp_path / "cache", address)[1]["nodes"]["found"], "loss of a node")
    code, findings = said(tmp_path / "cache", address)
    assert code == 1 and findings["nodes"]["status"] == "problem" and "lost: " in findings["nodes"]["found"]


def test_a_cluster_that_is_not_there_is_a_problem_and_this_host_is_looked_at(tmp_path: Path):
    code, findings = said(tmp_path / "cache", "127.0.0.1:9")
    assert code == 1
    assert findings["cluster"]["found"].startswith("RAY_ADDRESS=127.0.0.1:9: nobody answers there (")
    assert findings["shared memory"]["found"].startswith("/dev/shm: ")
