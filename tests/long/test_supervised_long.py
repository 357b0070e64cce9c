# SPDX-License-Identifier: Apache-2.0
"""Part "supervised": SFT, DPO and a reward model learn the arithmetic task; killed runs go on bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from mrl.recipes.tiny import prepare_tiny
from tests.faults.attempts import Attempt
from tests.learn.quickstart import TRAIN_TIMEOUT_S, call

pytestmark = [pytest.mark.long("supervised"), pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("supervised")
    prepare_tiny(folder / "prepared" / "tiny", seed=0)
    return folder


def rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def train(workplace: Path, name: str) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics of the first and of the last validation of a packaged run."""
    call(workplace, "-m", "mrl.train", f"{name}.yaml", timeout_s=TRAIN_TIMEOUT_S)
    validated = [row for row in rows(workplace / "results" / name) if any(key.startswith("val/") for key in row)]
    return validated[0], validated[-1]


def evaluate(workplace: Path, *arguments: str) -> dict[str, float]:
    printed = call(workplace, "-m", "mrl.evaluate", *arguments, timeout_s=TRAIN_TIMEOUT_S)
    path = Path(next(line for line in printed.splitlines() if line.startswith("Results: ")).removeprefix("Results: "))
    return json.loads(path.read_text())["scores"]["all"]


def test_sft_learns_and_is_evaluated(workplace: Path):
    before = evaluate(workplace, "sft_tiny.yaml", "eval.num_tests_per_prompt=4", "eval.k_value=4")
    first, last = train(workplace, "sft_tiny")
    after = evaluate(workplace, "results/sft_tiny", "eval.num_tests_per_prompt=4", "eval.k_value=4")
    assert last["val/val_loss"] <= 0.05 and last["val/perplexity"] <= 1.06
    assert before["pass@1"] <= 0.35 and after["pass@1"] >= 0.9
    assert before["pass@1"] < before["pass@4"] and after["pass@4"] >= after["cons@4"] >= 0.9
    assert after["answers"] == 4 * 256


def test_dpo_learns(workplace: Path):
    first, last = train(workplace, "dpo_tiny")
    accuracy, loss = "val/validation-default_accuracy", "val/validation-default_loss"
    assert last[accuracy] >= 0.95
    assert last[loss] <= 0.55


def test_a_reward_model_learns(workplace: Path):
    first, last = train(workplace, "rm_tiny")
    accuracy = "val/validation-default_accuracy"
    assert last[accuracy] >= 0.9


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "rm"])
def test_a_killed_run_repeats_the_steps_that_follow_its_checkpoint(workplace: Path, tmp_path: Path, algorithm: str):
    data = "train" if algorithm == "sft" else "train_preferences"
    prepared = workplace / "prepared" / "tiny"
    overrides = [
        f"policy.model_name={prepared / 'model'}",
        f"data.train.data_path={prepared / 'data' / f'{data}.jsonl'}",
        "data.validation=null",
        "checkpointing.metric_name=null",
        "checkpointing.save_period=2",
        f"{algorithm}.max_num_steps=6",
        "policy.train_global_batch_size=16",
    ]

    def attempt(run: str, log: str) -> Attempt:
        folder = tmp_path / run
        return Attempt(
            folder,
            [*overrides, f"checkpointing.checkpoint_dir={folder}"],
            tmp_path / log,
            config=f"{algorithm}_tiny.yaml",
        )

    with attempt("unbroken", "unbroken.log") as unbroken:
        assert unbroken.finish() == 0, unbroken.text()
    with attempt("killed", "first.log") as first:
        first.wait_until(lambda: (tmp_path / "killed" / "step_2" / "COMPLETE").exists(), "checkpoint of step 2")
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait(timeout=30)
        first.assert_nothing_survives()
    # Whatever the first attempt did beyond it is forgotten.
    for step in (4, 6):
        shutil.rmtree(tmp_path / "killed" / f"step_{step}", ignore_errors=True)
    with attempt("killed", "second.log") as second:
        assert second.finish() == 0, second.text()
        assert "Resuming from" in second.text()
    expected, found = rows(tmp_path / "unbroken"), rows(tmp_path / "killed")
    assert [row["step"] for row in found] == [row["step"] for row in expected] == [1, 2, 3, 4, 5, 6]
    for name in ("train/loss", "train/grad_norm", "train/lr", "train/num_valid_tokens"):
        assert [row[name] for row in found] == [row[name] for row in expected], name
