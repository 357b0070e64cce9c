# SPDX-License-Identifier: Apache-2.0
"""Refusals of scripts/ray_node.sh before it starts anything."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.waiting import HANG_S

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
        (NODE, "GPUS_PER_NODE=8, but nvidia-smi lists 7"),
        (
            NODE | {"COMMAND": "train checkpointing.checkpoint_dir=run a=1"},
            "COMMAND: checkpointing.checkpoint_dir=run is lost",
        ),
        (
            NODE | {"COMMAND": "train 'checkpointing.checkpoint_dir=my run'"},
            "COMMAND: checkpointing.checkpoint_dir=my is lost",
        ),
        (
            NODE | {"COMMAND": "train checkpointing.checkpoint_dir='my run'"},
            "COMMAND: checkpointing.checkpoint_dir=my is lost",
        ),
        (
            NODE | {"COMMAND": 'train checkpointing.checkpoint_dir="/mnt/my run"'},
            "GPUS_PER_NODE=8, but nvidia-smi lists 7",
        ),
        (
            NODE | {"COMMAND": "train checkpointing.checkpoint_dir='/mnt/my run'"},
            "GPUS_PER_NODE=8, but nvidia-smi lists 7",
        ),
        (
            NODE | {"COMMAND": 'train checkpointing.checkpoint_dir="$DATA/run"'},
            "GPUS_PER_NODE=8, but nvidia-smi lists 7",
        ),
        (
            NODE | {"COMMAND": "train checkpointing.checkpoint_dir=${DATA}/run"},
            "GPUS_PER_NODE=8, but nvidia-smi lists 7",
        ),
        (NODE | {"GPUS_PER_NODE": "7", "FI_PROVIDER": "efa"}, "FI_PROVIDER=efa, but this node has no EFA device"),
        (LEPTON, "missing environment variables: CONFIG_PATH CHECKPOINT_DIR;"),
        (
            LEPTON | {"CONFIG_PATH": "a.yaml", "CHECKPOINT_DIR": "results"},
            "CHECKPOINT_DIR=results is lost with the container",
        ),
        (
            LEPTON | {"CONFIG_PATH": "a.yaml", "CHECKPOINT_DIR": "/mnt/a", "SCRIPT_PATH": "/nowhere.py"},
            "SCRIPT_PATH=/nowhere.py is not there",
        ),
    ],
)
def test_a_node_that_lacks_something_says_what(tmp_path: Path, variables: dict[str, str], message: str):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nseq -f 'GPU %g: NVIDIA H200' 0 6\n")
    smi.chmod(0o755)
    command = ["bash", str(ROOT / "scripts" / "ray_node.sh")]
    done = subprocess.run(
        command, env={"PATH": f"{tmp_path}:{os.defpath}"} | variables, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 1
    assert f"ERROR: {message}" in done.stdout + done.stderr
