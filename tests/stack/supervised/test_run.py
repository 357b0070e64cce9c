# SPDX-License-Identifier: Apache-2.0
"""A run without engines as its command: what it prints, and what it leaves behind."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from mrl.recipes import tokenizer
from mrl.recipes.additions import split_additions, write_splits
from mrl.store.checkpoints import find_damage
from tests import models
from tests.learn.quickstart import call
from tests.waiting import HANG_S

# Two ranks are enough to have data parallelism, and start in half the time.
LAYOUT = [
    "cluster.cpu_units_per_node=2",
    "policy.megatron_cfg.tensor_model_parallel_size=1",
    "policy.megatron_cfg.sequence_parallel=false",
]
RUN = ["dpo.max_num_steps=2", "dpo.val_batches=1", "dpo.val_global_batch_size=16", "policy.train_global_batch_size=16"]


def test_two_steps_of_dpo(tmp_path: Path):
    prepared = tmp_path / "prepared" / "tiny"
    model = models.save_nemotron_h(prepared / "model")
    tokenizer.save(model, model_max_length=1280)
    write_splits(split_additions(seed=0), prepared / "data")
    # A warmup begins with a step of learning rate 0.
    overrides = [*LAYOUT, *RUN, "policy.megatron_cfg.scheduler.lr_warmup_iters=0"]
    printed = call(tmp_path, "-m", "mrl.train", "dpo_tiny.yaml", *overrides, timeout_s=HANG_S)
    run = tmp_path / "results" / "dpo_tiny"
    first, *steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # Before the first update the policy is the reference: both answers are as likely to win.
    assert first["step"] == 0 and math.isclose(first["val/validation-default_loss"], math.log(2), rel_tol=1e-6)
    assert [row["step"] for row in steps] == [1, 2]
    assert math.isclose(steps[0]["train/loss"], math.log(2), rel_tol=1e-6)
    assert steps[1]["train/loss"] < steps[0]["train/loss"]
    assert steps[1]["val/validation-default_loss"] != first["val/validation-default_loss"]
    assert steps[0]["train/num_valid_tokens"] == 16 * 2 * 3  # two digits and the end of every answer
    events = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["taken", "trained"] * 2 + ["saved"]
    assert find_damage(run / "step_2") is None
    assert re.search(r"^=+ Step 2/2 =+$", printed, re.MULTILINE)
    assert re.search(
        r"^\[Train\]    loss=0\.\d+, accuracy=[\d.]+, rewards_margin_mean=\S+, grad_norm=\S+, lr=\S+ \(96 tokens\)$",
        printed,
        re.MULTILINE,
    )
    assert "Number of actors online: 2/2" in printed


@pytest.mark.long("supervised")
def test_damaged_checkpoints_are_passed_over_and_the_steps_after_the_whole_one_repeat_bit_for_bit(tmp_path: Path):
    prepared = tmp_path / "prepared" / "tiny"
    model = models.save_nemotron_h(prepared / "model")
    tokenizer.save(model, model_max_length=1280)
    write_splits(split_additions(seed=0), prepared / "data")
    command = [
        "-m",
        "mrl.train",
        "sft_tiny.yaml",
        *LAYOUT,
        "sft.max_num_steps=3",
        "sft.val_at_start=false",
        "checkpointing.save_period=1",
    ]
    call(tmp_path, *command, timeout_s=HANG_S)
    run = tmp_path / "results" / "sft_tiny"
    before = losses(run)
    assert [step for step, _ in before] == [1, 2, 3]
    # Of the last step nothing would be loaded, so the driver looks; the shard of the step before is found by the rank
    # that reads it.
    for step, rank in ((3, 0), (2, 1)):
        shard = run / f"step_{step}" / "policy" / "weights" / "iter_0000000" / f"__{rank}_0.distcp"
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    printed = call(tmp_path, *command, timeout_s=HANG_S)
    for step, rank in ((3, 0), (2, 1)):
        assert re.search(
            rf"passing over \S+/step_{step}: \S+/__{rank}_0\.distcp does not have the manifest's sha256", printed
        )
    assert re.search(r"Resuming from \S+/step_1 \(step 1 of 3\)", printed)
    assert losses(run) == before
    assert all(find_damage(run / f"step_{step}") is None for step in (1, 2, 3))


def losses(run: Path) -> list[tuple[int, float]]:
    return [
        (row["step"], row["train/loss"]) for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    ]
