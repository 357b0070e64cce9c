"""What scripts/ray_node.sh refuses before it starts anything."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.sources import ROOT

NODE = {"NODE_RANK": "0", "NUM_NODES": "2", "GPUS_PER_NODE": "8", "HEAD_HOST": "run-0.run", "COMMAND": "true"}
LEPTON = {
    "LEPTON_JOB_NAME": "grpo",
    "LEPTON_JOB_WORKER_INDEX": "0",
    "LEPTON_JOB_TOTAL_WORKERS": "4",
    "LEPTON_RESOURCE_ACCELERATOR_NUM": "1",
}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "missing environment variables: NODE_RANK NUM_NODES GPUS_PER_NODE HEAD_HOST COMMAND;"),
        (NODE | {"NODE_RANK": "", "JOB_COMPLETION_INDEX": ""}, "missing environment variables: NODE_RANK;"),
        (NODE | {"NODE_RANK": "2"}, "NODE_RANK=2 is not below NUM_NODES=2"),
        (LEPTON, "missing environment variables: CONFIG_PATH CHECKPOINT_DIR;"),
        (
            LEPTON | {"CONFIG_PATH": "a.yaml", "CHECKPOINT_DIR": "/mnt/a", "SCRIPT_PATH": "/nowhere.py"},
            "SCRIPT_PATH=/nowhere.py is not there",
        ),
    ],
)
def test_a_node_that_lacks_something_says_what(variables: dict[str, str], message: str):
    command = ["bash", str(ROOT / "scripts" / "ray_node.sh")]
    done = subprocess.run(command, env={"PATH": os.defpath} | variables, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert f"ERROR: {message}" in done.stdout + done.stderr
