# SPDX-License-Identifier: Apache-2.0
"""Part "parity": adapters alone learn from rewards, and the export with them merged is as good as the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.learn.quickstart import accuracy_of_export, run_quickstart, sampling_noise

pytestmark = [pytest.mark.long("parity"), pytest.mark.timeout(1200)]

NUM_STEPS = 20
MIN_GAIN = 0.15


def test_adapters_learn(tmp_path: Path):
    steps = [f"grpo.max_num_steps={NUM_STEPS}", f"checkpointing.save_period={NUM_STEPS}", "grpo.val_period=0"]
    quickstart = run_quickstart(tmp_path, overrides=["policy.megatron_cfg.peft.enabled=true", *steps])
    (_, before), *_, (last_step, after) = quickstart.accuracies
    assert last_step == NUM_STEPS
    assert after >= before + MIN_GAIN
    assert (
        max(row["train/token_mult_prob_error"] for row in quickstart.metrics if "train/token_mult_prob_error" in row)
        <= 1.001
    )
    exported = accuracy_of_export(quickstart)
    assert abs(exported.sampled - after) <= sampling_noise([exported.sampled, after], exported.num_problems)
