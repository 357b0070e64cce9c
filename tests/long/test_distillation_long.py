# SPDX-License-Identifier: Apache-2.0
"""Part "distillation": the tiny model takes after a teacher that can add, and of two after that of each row kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.learn.quickstart import EXPORT_TIMEOUT_S, PREPARE_TIMEOUT_S, TRAIN_TIMEOUT_S, call

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


def test_a_student_reaches_its_teacher(folder: Path):
    teacher = accuracy(folder, "results/sft_tiny")
    call(folder, "-m", "mrl.train", "distillation_tiny.yaml", timeout_s=TRAIN_TIMEOUT_S)
    student = accuracy(folder, "results/distillation_tiny")
    lines = (folder / "results/distillation_tiny/metrics.jsonl").read_text().splitlines()
    first = next(row for row in map(json.loads, lines) if "val/accuracy" in row)
    assert first["step"] == 0 and first["val/accuracy"] <= 0.35
    assert teacher >= 0.9 and student >= teacher - MARGIN


def test_a_student_takes_after_the_teacher_of_each_kind_of_row(folder: Path):
    start = by_kind(folder, "prepared/tiny/model", "--config", "grpo_tiny.yaml")
    learned = by_kind(folder, "results/sft_tiny")
    call(folder, "-m", "mrl.train", "mopd_tiny.yaml", timeout_s=TRAIN_TIMEOUT_S)
    student, teachers = by_kind(folder, "results/mopd_tiny"), {"carrying": learned["carrying"], "plain": start["plain"]}
    for kind, wanted in teachers.items():
        assert abs(student[kind] - wanted) <= 2 * MARGIN, (kind, student)
    assert student["carrying"] >= start["carrying"] + 0.5
