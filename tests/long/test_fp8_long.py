# SPDX-License-Identifier: Apache-2.0
"""Part "fp8": ten steps from rollouts in FP8 learn as those in bfloat16 do, and show it where refits lose weights."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from torch import Tensor

from conversion.boxes import Slot
from mrl.algo.agreement import MAX_MEAN_ERROR
from mrl.config.load import load_config
from mrl.loop.rollouts import prepare
from mrl.loop.run import Budget
from mrl.recipes.additions import Kind
from mrl.recipes.tiny import prepare_tiny
from mrl.store.run_folder import RunFolder
from tests.drivers import do, opened, train_step
from tests.learn.quickstart import call
from tests.stack.loop.conftest import write_inputs
from tests.waiting import HANG_S

pytestmark = [pytest.mark.long("fp8"), pytest.mark.timeout(2400)]

NUM_STEPS = 10
DLOGP, REWARD, VERIFIED = "train/mean_abs_dlogp", "train/reward", "refit/verified_bytes"
Steps = list[dict[str, float]]


@pytest.mark.parametrize("kind", ["tiny", "tiny_dense"])
def test_ten_steps_learn(tmp_path: Path, kind: Kind) -> None:
    """`tiny` has experts and no whole blocks (a scale a channel), `tiny_dense` a scale for each block."""
    prepare_tiny(tmp_path / "prepared", seed=0, kind=kind)
    found = {
        name: steps(tmp_path, kind, name, precision, change)
        for name, precision, change in (
            ("bfloat16", "bfloat16", None),
            ("fp8", "fp8", None),
            ("kept", "fp8", keep_quantised),
        )
    }
    for name, rows in found.items():
        for column in (REWARD, DLOGP):
            print(kind, name, column, " ".join(f"{row[column]:.4f}" for row in rows))
    for rows in found.values():
        # Every refit was of the same bytes, and no step went without one.
        assert len(rows) == NUM_STEPS and len({row[VERIFIED] for row in rows}) == 1 and rows[0][VERIFIED]
    assert faults(found["bfloat16"], found["bfloat16"]) == faults(found["fp8"], found["bfloat16"]) == []
    assert "apart" in faults(found["kept"], found["bfloat16"])


def test_the_doctor_finds_the_same_model_on_both_sides(tmp_path: Path) -> None:
    words = ["policy.precision=bfloat16", "policy.generation.vllm_cfg.precision=fp8", "cluster.cpu_units_per_node=2"]
    said = call(
        tmp_path, "-m", "mrl.doctor", "grpo_tiny.yaml", "--refit", *write_inputs(tmp_path), *words, timeout_s=3 * HANG_S
    )
    for line in (
        r"refit zero +ok +[\d,]{7,} bytes verified, .*",
        r"refit +ok +[\d,]{7,} bytes verified, .*",
        r"new weights +ok +\d+ tensors, all changed",
        r"logprobs engine 0 +ok +512 tokens, .*",
    ):
        assert re.search(f"^{line}$", said, re.MULTILINE), (line, said)


def faults(rows: Steps, in_bfloat16: Steps) -> list[str]:
    """Signs that the engines do not sample from the weights that learn."""
    first, last = (sum(row[REWARD] for row in part) / len(part) for part in (rows[:3], rows[-3:]))
    # Without learning, three standard errors: each step is of 512 rollouts of 32 prompts.
    wrong = [] if last >= first + 0.09 else ["no gain"]
    # Rounding stays as large as at the start, of weights that are hardly trained.
    if max(row[DLOGP] for row in rows) > min(MAX_MEAN_ERROR["fp8"], 3 * max(rows[0][DLOGP], in_bfloat16[0][DLOGP])):
        wrong.append("apart")
    return wrong


def steps(folder: Path, kind: str, name: str, precision: str, change: Callable[[object], None] | None) -> Steps:
    """Metrics of the steps of a run; `change` is made to its engine after the first refit."""
    data = folder / "prepared" / "data"
    overrides = [
        f"policy.model_name={folder / 'prepared' / 'model'}",
        f"data.train.data_path={data / 'train.jsonl'}",
        f"data.validation.data_path={data / 'validation.jsonl'}",
        f"checkpointing.checkpoint_dir={folder / name}",
        "checkpointing.enabled=false",
        f"deadlines.start_s={4 * HANG_S}",
        "policy.precision=bfloat16",
        f"policy.generation.vllm_cfg.precision={precision}",
        f"grpo.max_num_steps={NUM_STEPS}",
        "grpo.val_period=0",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
    ]
    training = prepare(load_config(f"grpo_{kind}.yaml", overrides))
    run_folder, found = RunFolder(training.config), Steps()
    run_folder.open()
    with run_folder, opened(training.open(run_folder, Budget(None, started=time.monotonic()))) as run:
        state = do(run.resume(run_folder.newest_checkpoint()))
        if change is not None:
            run.supplier.session.engines.apply(change)
        while state.step < NUM_STEPS:
            train_step(run, state)
            found.append(dict(state.metrics))
    return found


def keep_quantised(engine) -> None:
    """From here on layers in FP8 stay as they are, and the proof of a refit, which makes them twice, sees nothing."""
    puller = engine.llm.model_executor.driver_worker.worker._sides()["weights"].puller
    for batches in puller._rounds:
        for batch in batches[1:]:
            made: list[Mapping[Slot, Tensor]] = []

            def make_once(
                weights: Mapping[Slot, Tensor], make=batch.quantiser.make, made=made
            ) -> Mapping[Slot, Tensor]:
                if not made:
                    made.append({slot: tensor.clone() for slot, tensor in make(weights).items()})
                return made[0]

            vars(batch.quantiser)["make"] = make_once
