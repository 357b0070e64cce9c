# SPDX-License-Identifier: Apache-2.0
"""Commands that `scripts/quickstart.sh` runs after installing, in its own folder, and the files they leave there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.sources import ROOT, search_path
from tests.waiting import HANG_S

PREPARE_TIMEOUT_S = HANG_S
# A host under load is slow, not broken.
TRAIN_TIMEOUT_S = 4 * HANG_S
EXPORT_TIMEOUT_S = HANG_S
RUN_FOLDER = Path("results/grpo_tiny")
PREFIX = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (INFO|WARNING|ERROR) "
"""Prefix of every line of a run's log off a terminal."""


@dataclass(frozen=True)
class Quickstart:
    """One run of both commands that has ended well."""

    folder: Path
    seconds: float
    """Wall time of preparing and training."""
    console: str
    """Output of the training command."""
    kind: str = "tiny"
    """Name of the prepared folder; grpo_KIND.yaml was trained, or another config that writes into its run folder."""

    @property
    def run_folder(self) -> Path:
        return self.folder / "results" / f"grpo_{self.kind}"

    @property
    def prepared(self) -> Path:
        return self.folder / "prepared" / self.kind

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The rows of metrics.jsonl."""
        return [json.loads(line) for line in (self.run_folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def accuracies(self) -> list[tuple[int, float]]:
        """(step, held-out accuracy) wherever the run validated."""
        return [(int(row["step"]), row["val/accuracy"]) for row in self.metrics if "val/accuracy" in row]

    @property
    def last_step(self) -> int:
        return int(self.metrics[-1]["step"])


def run_quickstart(
    folder: Path, *, seed: int = 0, kind: str = "tiny", config: str | None = None, overrides: Sequence[str] = ()
) -> Quickstart:
    """Makes the tiny model in `folder` and trains it there, by a user's commands; fails unless both exit with 0."""
    started = time.monotonic()
    call(folder, "-m", "mrl.prepare", kind, "--seed", str(seed), timeout_s=PREPARE_TIMEOUT_S)
    console = call(folder, "-m", "mrl.train", config or f"grpo_{kind}.yaml", *overrides, timeout_s=TRAIN_TIMEOUT_S)
    return Quickstart(folder, time.monotonic() - started, console, kind)


@dataclass(frozen=True)
class Accuracy:
    """Shares of right answers to the run's held-out problems, as plain transformers gives them."""

    sampled: float
    greedy: float
    num_problems: int


def accuracy_before(quickstart: Quickstart) -> Accuracy:
    """Accuracy of the model that the run started from."""
    return evaluate(quickstart, quickstart.prepared / "model")


def accuracy_of_export(quickstart: Quickstart) -> Accuracy:
    """Exports the last step, and evaluates the folder."""
    out = quickstart.folder / "exported"
    checkpoint = quickstart.run_folder / f"step_{quickstart.last_step}"
    call(
        quickstart.folder,
        "-m",
        "mrl.convert",
        "mcore-to-hf",
        "--mcore",
        str(checkpoint),
        "--out",
        str(out),
        timeout_s=EXPORT_TIMEOUT_S,
    )
    return evaluate(quickstart, out)


def evaluate(quickstart: Quickstart, model: Path) -> Accuracy:
    """Runs `scripts/evaluate_export.py`, which uses nothing of mrl, on the Hugging Face folder `model`."""
    data = quickstart.prepared / "data" / "validation.jsonl"
    text = call(
        quickstart.folder,
        str(ROOT / "scripts" / "evaluate_export.py"),
        str(model),
        str(data),
        timeout_s=EXPORT_TIMEOUT_S,
    )
    match = re.search(r"^accuracy ([\d.]+) sampled, ([\d.]+) greedy, over (\d+) problems$", text, re.MULTILINE)
    assert match, text
    return Accuracy(float(match[1]), float(match[2]), int(match[3]))


def sampling_noise(accuracies: Sequence[float], num_samples: int) -> float:
    """Three standard errors of the difference of two accuracies, each measured on `num_samples` independent samples."""
    pooled = sum(accuracies) / len(accuracies)
    return 3 * (2 * pooled * (1 - pooled) / num_samples) ** 0.5


def call(folder: Path, *arguments: str, timeout_s: float) -> str:
    """Output and error of `python ARGUMENTS` in `folder`, without times and levels; fails unless it exits with 0."""
    environment = os.environ | {"PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    assert result.returncode == 0, f"{' '.join(arguments)} exited with {result.returncode}:\n{result.stdout[-6000:]}"
    return re.sub(PREFIX, "", result.stdout, flags=re.MULTILINE)
