# SPDX-License-Identifier: Apache-2.0
"""The tiny config on real text: GSM8K problems up to 991 bytes, as published, run steps until a signal ends the run."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path

import pytest

from mrl.recipes.tiny import prepare_tiny
from mrl.signals import ENDED_EARLY
from mrl.store.checkpoints import find_damage
from tests.faults.attempts import ATTEMPT_TIMEOUT_S, Attempt, is_trained
from tests.sources import ROOT

STEPS = 2


@pytest.mark.timeout(3 * ATTEMPT_TIMEOUT_S)
def test_gsm8k_runs_until_a_signal_saves_and_ends_it(tmp_path: Path):
    prepare_tiny(ROOT / "prepared" / "tiny", seed=0)
    gsm8k = ROOT / "tests" / "unit" / "data" / "gsm8k"
    longest = max(
        len(json.loads(line)["question"].encode()) for line in (gsm8k / "long_rows.jsonl").read_text().splitlines()
    )
    assert longest > 900
    # One row that cannot be used, which is set aside.
    train = tmp_path / "train.jsonl"
    train.write_text((gsm8k / "long_rows.jsonl").read_text() + '{"question": "1+1="}\n')
    overrides = [
        f"data.train.data_path={train}",
        "data.on_bad_row=skip",
        "data.max_bad_row_share=0.2",
        f"data.validation.data_path={gsm8k / 'rows.jsonl'}",
        f"checkpointing.checkpoint_dir={tmp_path / 'run'}",
        # Without the signal nothing would be saved.
        "checkpointing.save_period=1000",
        "grpo.max_num_steps=1000",
        "cluster.cpu_units_per_node=2",
        "grpo.num_prompts_per_step=4",
        "grpo.num_generations_per_prompt=2",
    ]
    with Attempt(tmp_path / "run", overrides, tmp_path / "console.log") as run:
        run.wait_until(lambda: is_trained(run.run_folder, STEPS), f"train step {STEPS}")
        run.process.send_signal(signal.SIGUSR1)
        assert run.finish() == ENDED_EARLY == 75, run.text()
        assert "the same command goes on" in run.text().splitlines()[-1]
        run.assert_nothing_survives()

    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last_step = int(rows[-1]["step"])
    assert [row["step"] for row in rows] == list(range(last_step + 1)) and last_step >= STEPS
    assert [folder.name for folder in (tmp_path / "run").glob("*step_*")] == [f"step_{last_step}"]
    assert find_damage(tmp_path / "run" / f"step_{last_step}") is None
    for row in rows[1:]:
        assert all(math.isfinite(value) for value in row.values())
        # All four long problems are asked in every step; two more tokens come from the chat template.
        assert row["rollout/mean_prompt_length"] > 850
        assert row["rollout/failed"] == 0
    (bad,) = [
        json.loads(line) for line in (tmp_path / "run" / "quarantine" / "data.train.jsonl").read_text().splitlines()
    ]
    assert (
        bad["place"] == f"{train}:5"
        and bad["reason"].startswith("no key expected_answer")
        and bad["line"] == '{"question": "1+1="}'
    )
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {sample["expected"] for sample in samples if sample["split"] == "train"} == gold_answers(
        gsm8k / "long_rows.jsonl"
    )


def gold_answers(path: Path) -> set[str]:
    return {json.loads(line)["answer"].split("#### ")[1] for line in path.read_text().splitlines()}
