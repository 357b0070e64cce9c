# SPDX-License-Identifier: Apache-2.0
"""The built wheel, in a folder of its own beside the libraries that are installed, trains from an empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.learn.quickstart import PREPARE_TIMEOUT_S, TRAIN_TIMEOUT_S
from tests.sources import ROOT
from tests.waiting import HANG_S


def build_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=HANG_S, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def train_in_an_empty_folder(site: Path, program: Path, empty: Path, **environment: str) -> None:
    """Has `program`, which imports mrl from `site`, refuse to train without a tiny model, make one and train a step."""
    empty.mkdir()

    def mrl(*words: str, timeout_s: float) -> tuple[int, str]:
        variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        done = subprocess.run(
            [program, *words], cwd=empty, env=variables, capture_output=True, text=True, timeout=timeout_s
        )
        return done.returncode, done.stdout + done.stderr

    grpo = ("max_num_steps=1", "num_prompts_per_step=4", "num_generations_per_prompt=8", "max_val_samples=8")
    train = ("train", "grpo_tiny.yaml", "cluster.cpu_units_per_node=2", *(f"grpo.{word}" for word in grpo))
    code, printed = mrl(*train, timeout_s=HANG_S)
    assert code == 2 and "`python -m mrl.prepare tiny` makes it" in printed and list(empty.iterdir()) == [], printed[
        -6000:
    ]
    code, printed = mrl("prepare", "tiny", timeout_s=PREPARE_TIMEOUT_S)
    assert code == 0, printed[-6000:]
    code, printed = mrl(*train, timeout_s=TRAIN_TIMEOUT_S)
    assert code == 0, printed[-6000:]
    assert f"Config: {site / 'mrl' / 'configs' / 'grpo_tiny.yaml'}\n" in printed
    rows = [json.loads(line) for line in (empty / "results" / "grpo_tiny" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    assert all(row["refit/verified_bytes"] > 0 for row in rows[1:])


def test_the_wheel_trains_in_an_empty_folder(tmp_path: Path):
    site = tmp_path / "site"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(build_wheel(tmp_path)),
    ]
    subprocess.run(install, check=True, timeout=HANG_S, capture_output=True)
    train_in_an_empty_folder(site, site / "bin" / "mrl", tmp_path / "empty", PYTHONPATH=str(site))
