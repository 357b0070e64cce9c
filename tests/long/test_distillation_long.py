# SPDX-License-Identifier: Apache-2.0
"""Part "distillation": the tiny model reaches the accuracy of a teacher that has learned to add, from the teacher's distribution alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.learn.quickstart import EXPORT_TIMEOUT_S, PREPARE_TIMEOUT_S, TRAIN_TIMEOUT_S, call
from tests.long.record import Row, record

pytestmark = [pytest.mark.long("distillation"), pytest.mark.timeout(2400)]

# How far below its teacher the student may be: it has seen the teacher on the training prompts alone.
MARGIN = 0.04


def scores(folder: Path, *arguments: str) -> dict[str, float]:
    """Of a model on the held-out prompts, four answers each."""
    printed = call(folder, "-m", "mrl.evaluate", *arguments, "eval.num_tests_per_prompt=4", timeout_s=TRAIN_TIMEOUT_S)
    path = Path(next(line for line in printed.splitlines() if line.startswith("Results: ")).removeprefix("Results: "))
    return json.loads(path.read_text())["scores"]["all"]


def table(run: Path, *, student: float, teacher: float) -> list[Row]:
    """The curve of a run, and the accuracies of both models over all answers at its end."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows: list[Row] = []
    for row in (row for row in steps if "val/accuracy" in row):
        loss = row.get("train/loss")
        rows.append(
            {
                "step": int(row["step"]),
                "held-out accuracy": round(row["val/accuracy"], 3),
                "forward KL": None if loss is None else round(loss, 4),
            }
        )
    for name, accuracy in (("student, 1,024 answers", student), ("teacher, 1,024 answers", teacher)):
        rows.append({"step": name, "held-out accuracy": round(accuracy, 3), "forward KL": None})
    return rows


def test_a_student_reaches_its_teacher(tmp_path: Path):
    call(tmp_path, "-m", "mrl.prepare", "tiny", timeout_s=PREPARE_TIMEOUT_S)
    call(tmp_path, "-m", "mrl.train", "sft_tiny.yaml", timeout_s=TRAIN_TIMEOUT_S)
    export = ["--mcore", "results/sft_tiny/step_100", "--out", "prepared/tiny/teacher"]
    call(tmp_path, "-m", "mrl.convert", "mcore-to-hf", *export, timeout_s=EXPORT_TIMEOUT_S)
    teacher = scores(tmp_path, "results/sft_tiny")["pass@1"]
    call(tmp_path, "-m", "mrl.train", "distillation_tiny.yaml", timeout_s=TRAIN_TIMEOUT_S)
    student = scores(tmp_path, "results/distillation_tiny")["pass@1"]
    measured = table(tmp_path / "results/distillation_tiny", student=student, teacher=teacher)
    record("distillation", measured)
    before = measured[0]["held-out accuracy"]
    assert measured[0]["step"] == 0 and isinstance(before, float) and before <= 0.35
    assert teacher >= 0.9 and student >= teacher - MARGIN
