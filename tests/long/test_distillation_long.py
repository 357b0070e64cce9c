# SPDX-License-Identifier: Apache-2.0
"""Part "distillation": the tiny model takes after a teacher that can add, and of two after that of each row kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.learn.quickstart import EXPORT_TIMEOUT_S, PREPARE_TIMEOUT_S, TRAIN_TIMEOUT_S, call
from tests.long.record import Row, record

pytestmark = [pytest.mark.long("distillation"), pytest.mark.timeout(2400)]

# How far below its teacher the student may be: it has seen the teacher on the training prompts alone.
MARGIN = 0.04


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model, and one that has learned to add."""
    folder = tmp_path_factory.mktemp("distillation")
    call(folder, "-m", "mrl.prepare", "tiny", timeout_s=PREPARE_TIMEOUT_S)
    call(folder, "-m", "mrl.train", "sft_tiny.yaml", timeout_s=TRAIN_TIMEOUT_S)
    export = ["--mcore", "results/sft_tiny/step_100", "--out", "prepared/tiny/teacher"]
    call(folder, "-m", "mrl.convert", "mcore-to-hf", *export, timeout_s=EXPORT_TIMEOUT_S)
    return folder


def evaluated(folder: Path, *arguments: str) -> dict:
    """The results of a model on the held-out prompts, four answers each."""
    printed = call(folder, "-m", "mrl.evaluate", *arguments, "eval.num_tests_per_prompt=4", timeout_s=TRAIN_TIMEOUT_S)
    path = Path(next(line for line in printed.splitlines() if "Results: " in line).partition("Results: ")[2])
    return json.loads(path.read_text())


def accuracy(folder: Path, *arguments: str) -> float:
    return evaluated(folder, *arguments)["scores"]["all"]["pass@1"]


def by_kind(folder: Path, *arguments: str) -> dict[str, float]:
    """Accuracies on the additions that carry, and on the others."""
    rewards: dict[str, list[float]] = {"carrying": [], "plain": []}
    for prompt in evaluated(folder, *arguments)["prompts"]:
        left, right = (int(number) for number in prompt["prompt"].rstrip("=").split("+"))
        kind = "carrying" if left % 10 + right % 10 >= 10 else "plain"
        rewards[kind] += [answer["reward"] for answer in prompt["answers"]]
    return {kind: sum(values) / len(values) for kind, values in rewards.items()}


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


def test_a_student_reaches_its_teacher(folder: Path):
    teacher = accuracy(folder, "results/sft_tiny")
    call(folder, "-m", "mrl.train", "distillation_tiny.yaml", timeout_s=TRAIN_TIMEOUT_S)
    student = accuracy(folder, "results/distillation_tiny")
    measured = table(folder / "results/distillation_tiny", student=student, teacher=teacher)
    record("distillation", measured)
    before = measured[0]["held-out accuracy"]
    assert measured[0]["step"] == 0 and isinstance(before, float) and before <= 0.35
    assert teacher >= 0.9 and student >= teacher - MARGIN


def test_a_student_takes_after_the_teacher_of_each_kind_of_row(folder: Path):
    start = by_kind(folder, "prepared/tiny/model", "--config", "grpo_tiny.yaml")
    learned = by_kind(folder, "results/sft_tiny")
    call(folder, "-m", "mrl.train", "mopd_tiny.yaml", timeout_s=TRAIN_TIMEOUT_S)
    student, teachers = by_kind(folder, "results/mopd_tiny"), {"carrying": learned["carrying"], "plain": start["plain"]}
    names = {"carrying": "has learned to add", "plain": "the student before"}
    rows: list[Row] = [
        {
            "additions": kind,
            "teacher": names[kind],
            "before": start[kind],
            "teacher's": teachers[kind],
            "after": student[kind],
        }
        for kind in teachers
    ]
    rounded = [
        {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()} for row in rows
    ]
    record("mopd", rounded, command="bash scripts/test.sh --long distillation")
    for kind, wanted in teachers.items():
        assert abs(student[kind] - wanted) <= 2 * MARGIN, rows
    assert student["carrying"] >= start["carrying"] + 0.5
