"""The tiny config on real text: GSM8K problems of up to 991 bytes, read as published, run steps end to end."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from mrl.prepare import prepare_tiny
from tests.learn.quickstart import call
from tests.sources import ROOT

TIMEOUT_S = 600.0
STEPS = 2


@pytest.mark.timeout(TIMEOUT_S + 300)
def test_gsm8k_runs_end_to_end(tmp_path: Path):
    prepare_tiny(ROOT / "prepared" / "tiny", seed=0)
    gsm8k = ROOT / "tests" / "unit" / "data" / "gsm8k"
    longest = max(len(json.loads(line)["question"].encode()) for line in (gsm8k / "long_rows.jsonl").read_text().splitlines())
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
        f"grpo.max_num_steps={STEPS}",
        "grpo.num_prompts_per_step=4",
        "grpo.num_generations_per_prompt=4",
    ]
    call(ROOT, "-m", "mrl.train", "grpo_tiny.yaml", *overrides, timeout_s=TIMEOUT_S)

    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    for row in rows[1:]:
        assert all(math.isfinite(value) for value in row.values())
        # All four long problems are asked in every step; two more tokens come from the chat template.
        assert row["rollout/mean_prompt_length"] > 850
        assert row["rollout/failed"] == 0
    (bad,) = [json.loads(line) for line in (tmp_path / "run" / "quarantine" / "data.train.jsonl").read_text().splitlines()]
    assert bad["place"] == f"{train}:5" and bad["reason"].startswith("no key expected_answer") and bad["line"] == '{"question": "1+1="}'
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert {sample["expected"] for sample in samples if sample["split"] == "train"} == gold_answers(gsm8k / "long_rows.jsonl")


def gold_answers(path: Path) -> set[str]:
    return {json.loads(line)["answer"].split("#### ")[1] for line in path.read_text().splitlines()}
