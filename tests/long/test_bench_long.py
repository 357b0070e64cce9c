# SPDX-License-Identifier: Apache-2.0
"""The benches meet their targets. Each writes docs/data/NAME.json, rendered in docs/measured/performance.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.recipes.tiny import prepare_tiny
from tests.learn.quickstart import TRAIN_TIMEOUT_S, call
from tests.long.record import DATA_FOLDER, Row
from tests.sources import ROOT

pytestmark = [pytest.mark.long("bench"), pytest.mark.timeout(2400)]


def bench(name: str) -> list[Row]:
    """The rows that scripts/bench/NAME.py measures now."""
    subprocess.run([sys.executable, "-m", f"scripts.bench.{name}"], cwd=ROOT, check=True, timeout=2350)
    return json.loads((DATA_FOLDER / f"{name}.json").read_text(encoding="utf-8"))["rows"]


def number(row: Row, column: str) -> float:
    value = row[column]
    assert isinstance(value, int | float), (column, row)
    return float(value)


def test_refits_are_nearly_as_fast_as_a_plain_copy():
    rows = bench("refit")
    targeted = [row for row in rows if row["at least"] is not None]
    assert len(targeted) >= 3
    for row in targeted:
        assert number(row, "refit / copy speed") >= number(row, "at least"), row
        assert number(row, "refit + verification / copy time") <= number(row, "at most"), row
        assert row["bytes moved / needed"] == 1


def test_conversions_are_nearly_as_fast_as_cp():
    rows = bench("convert")
    assert {row["direction"] for row in rows} == {"hf-to-mcore", "mcore-to-hf"}
    for row in rows:
        assert number(row, "copy / convert") >= number(row, "at least"), row
        assert number(row, "memory_rise_mb") <= 600, row


def test_the_engine_is_nearly_as_fast_as_plain_vllm():
    rows = bench("engine")
    assert {(row["model"], row["new tokens"]) for row in rows} == {
        (model, length) for model in ("qwen3", "qwen3_moe") for length in (3, 64)
    }
    for row in rows:
        assert number(row, "mrl / vLLM") >= number(row, "at least"), row


def test_a_step_of_a_model_whose_arithmetic_dominates_is_not_slower_than_trls_best():
    rows = bench("vs_trl")
    assert {(row["model"], row["policy ranks"], row["new tokens"]) for row in rows} == {
        *(("0.4 M", num_ranks, 3) for num_ranks in (1, 4)),
        ("20 M", 1, 256),
    }
    targeted = [row for row in rows if row["at least"] is not None]
    assert [(row["model"], row["policy ranks"], row["new tokens"]) for row in targeted] == [("20 M", 1, 256)]
    for row in targeted:
        assert number(row, "TRL / mrl") >= number(row, "at least"), row


def test_a_step_that_takes_the_first_groups_does_not_wait_for_the_longest():
    rows = bench("oversample")
    assert [row["grpo.oversample"] for row in rows] == [1.0, 1.5, 2.0]
    assert number(rows[-1], "times as fast") >= number(rows[-1], "at least"), rows[-1]
    # The same tokens are trained.
    assert len({row["mean tokens"] for row in rows}) == 1


def test_shared_prefixes_are_faster_than_bare_megatron_on_whole_rows():
    rows = bench("prefix")
    assert [row["prompt : reply"] for row in rows] == ["1 : 1", "4 : 1", "16 : 1", "an agent's turns"]
    for row in rows[:3]:
        assert number(row, "speed of Megatron's") >= number(row, "at least"), row


def test_a_run_with_shared_prefixes_learns_step_by_step_as_one_without(tmp_path: Path):
    """A system message makes the prompt long enough to be shared: 11 times fewer tokens."""
    prepare_tiny(tmp_path / "prepared" / "tiny", seed=0)
    (tmp_path / "system.txt").write_text(
        "You are a patient assistant that adds two numbers. Think of the carry, then write the sum.\n"
    )
    runs = []
    for shares in ("auto", "false"):
        changed = {
            "policy.share_prefixes": shares,
            "data.default.system_prompt_file": "system.txt",
            "grpo.max_num_steps": 12,
            "grpo.val_period": 0,
            "checkpointing.checkpoint_dir": shares,
        }
        overrides = [f"{key}={value}" for key, value in changed.items()]
        call(tmp_path, "-m", "mrl.train", "grpo_tiny.yaml", *overrides, timeout_s=TRAIN_TIMEOUT_S)
        lines = (tmp_path / shares / "metrics.jsonl").read_text().splitlines()
        runs.append([row for line in lines if "train/loss" in (row := json.loads(line))])
    shared, whole = runs
    assert len(shared) == len(whole) == 12
    assert all(row["train/prefix_sharing"] > 10 for row in shared) and "train/prefix_sharing" not in whole[0]
    for one, other in zip(shared, whole, strict=True):
        assert one["train/reward"] == other["train/reward"], "the same tokens are sampled in every step"
        assert one["train/loss"] == pytest.approx(other["train/loss"], rel=1e-4, abs=1e-7)
        assert one["train/grad_norm"] == pytest.approx(other["train/grad_norm"], rel=1e-5)


def test_a_step_takes_little_more_than_its_parts():
    rows = bench("step")
    assert {(row["model"], row["policy ranks"], row["new tokens"]) for row in rows} == {
        *((model, 1, length) for model in ("nemotron_h", "qwen3") for length in (64, 256)),
        ("nemotron_h", 4, 64),
    }
    for row in rows:
        assert number(row, "share of mrl's step") >= number(row, "at least"), row


def test_a_run_is_at_its_first_step_in_time():
    rows = bench("startup")
    assert [row["policy ranks"] for row in rows] == [1, 4]
    for row in rows:
        assert number(row, "seconds") <= number(row, "at most"), row
