# SPDX-License-Identifier: Apache-2.0
"""The built wheel, in a folder of its own beside the libraries that are installed, trains from an empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.learn.quickstart import PREPARE_TIMEOUT_S, TRAIN_TIMEOUT_S
from tests.sources import ROOT
from tests.waiting import HANG_S


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The folder that the wheel is installed into."""
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, timeout=HANG_S, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path / "site"), str(wheel)]
    subprocess.run(install, check=True, timeout=HANG_S, capture_output=True)
    return tmp_path / "site"


def test_the_wheel_trains_in_an_empty_folder(site: Path, tmp_path: Path):
    empty = tmp_path / "empty"
    empty.mkdir()

    def mrl(*words: str, timeout_s: float) -> tuple[int, str]:
        environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([site / "bin" / "mrl", *words], cwd=empty, env=environment, capture_output=True, text=True, timeout=timeout_s)
        return done.returncode, done.stdout + done.stderr

    train = ("train", "grpo_tiny.yaml", "grpo.max_num_steps=1", "cluster.cpu_units_per_node=2")
    code, printed = mrl(*train, timeout_s=HANG_S)
    assert code == 2 and "`python -m mrl.prepare tiny` makes it" in printed and list(empty.iterdir()) == []
    assert mrl("prepare", "tiny", timeout_s=PREPARE_TIMEOUT_S)[0] == 0
    code, printed = mrl(*train, timeout_s=TRAIN_TIMEOUT_S)
    assert code == 0, printed[-6000:]
    assert f"Config: {site / 'mrl' / 'configs' / 'grpo_tiny.yaml'}\n" in printed
    rows = [json.loads(line) for line in (empty / "results" / "grpo_tiny" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    assert all(row["refit/verified_bytes"] > 0 for row in rows[1:])
