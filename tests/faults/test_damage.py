# SPDX-License-Identifier: Apache-2.0
"""Real runs with damaged newest checkpoint and ledger, killed in their store: every attempt goes on, none restarts."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from mrl.recipes import tokenizer
from mrl.recipes.additions import split_additions, write_splits
from mrl.store.checkpoints import find_damage
from tests import models
from tests.faults.attempts import Attempt, lineage

LAST = 12
LAYOUT = ["tensor_model_parallel_size=1", "expert_model_parallel_size=1", "sequence_parallel=false"]
SETTINGS = ["cluster.cpu_units_per_node=1", *(f"policy.megatron_cfg.{size}" for size in LAYOUT)]
SETTINGS += [
    f"sft.max_num_steps={LAST}",
    "sft.val_at_start=false",
    "sft.val_period=0",
    "checkpointing.metric_name=null",
]
SETTINGS += ["checkpointing.save_period=1", "checkpointing.keep_top_k=2", "policy.train_global_batch_size=4"]
SETTINGS += ["policy.megatron_cfg.scheduler.lr_decay_style=constant", "policy.megatron_cfg.scheduler.lr_warmup_iters=0"]


def rates(run: Path) -> dict[int, float]:
    return {row["step"]: row["train/lr"] for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}


@pytest.mark.long("faults")
@pytest.mark.timeout(1800)
def test_no_attempt_after_a_damage_or_a_kill_begins_anew(tmp_path: Path):
    model, run = models.save_nemotron_h(tmp_path / "model"), tmp_path / "run"
    tokenizer.save(model, model_max_length=1280)
    write_splits(split_additions(seed=0), tmp_path / "data")
    texts: list[str] = []

    def attempt(rate: float, kill_at: str = "", *, ends_at: int | None = None) -> int:
        """Exit code of the next attempt, with that learning rate, after a SIGTERM in the step after `ends_at`."""
        data = [f"data.{name}.data_path={tmp_path}/data/{name}.jsonl" for name in ("train", "validation")]
        rate_settings = [f"policy.megatron_cfg.optimizer.{name}={rate}" for name in ("lr", "min_lr")]
        overrides = [
            *SETTINGS,
            *data,
            *rate_settings,
            f"policy.model_name={model}",
            f"checkpointing.checkpoint_dir={run}",
        ]
        os.environ["MRL_KILL_AT"] = kill_at
        with Attempt(
            run, overrides, tmp_path / f"{len(texts)}.log", config="sft_tiny.yaml", working_folder=tmp_path
        ) as now:
            if ends_at is not None:
                now.wait_until(lambda: f"Step {ends_at}/" in now.text(), f"step {ends_at}")
                now.process.send_signal(signal.SIGTERM)
            code = now.finish()
            texts.append(now.text())
        return code

    assert attempt(1e-3, "prune:4") == -signal.SIGKILL  # step 4 is published, step 2 under another name and not removed
    assert (run / "step_4/COMPLETE").exists() and (run / "tmp_old_step_2").exists()
    shard = next((run / "step_4").rglob("__0_0.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    (run / "ledger.jsonl").write_bytes((run / "ledger.jsonl").read_bytes().replace(b"taken", b"tajen", 1))
    assert attempt(2e-3, "fallback:4") == -signal.SIGKILL, texts[
        -1
    ]  # the checkpoint is set aside, the ledger not restored
    assert (run / "damaged_step_4").exists()
    assert attempt(2e-3, "commit:6") == -signal.SIGKILL, texts[-1]  # step 5 has its marker, and not its name
    assert "Resuming from" in texts[-1] and "restored from" in texts[-1]
    assert attempt(2e-3, ends_at=5) == 75, texts[-1]
    assert attempt(4e-3) == 0, texts[-1]
    assert attempt(4e-3) == 0 and f"Already complete at step {LAST}" in texts[-1]
    assert all("restored from" not in text for text in texts[3:])
    kept = {f"step_{LAST}", f"step_{LAST - 1}"}
    assert {path.name for path in run.glob("*step_*")} == kept | {"damaged_step_4"} and (
        run / "damaged_ledger.jsonl"
    ).exists()
    assert all(find_damage(run / name) is None for name in kept)
    assert sorted(lineage(run)) == list(range(1, LAST + 1))
    # Each attempt trains with its own rate, as its first lines say.
    found = rates(run)
    assert [found[step] for step in (1, 2, 3)] == [1e-3] * 3 and found[4] == found[5] == 2e-3 and found[LAST] == 4e-3
    assert "optimizer.lr=0.002 -> 0.004" in texts[4]
