# SPDX-License-Identifier: Apache-2.0
"""Part "ppo": PPO with a critic learns the arithmetic of the quickstart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.learn.quickstart import RUN_FOLDER, run_quickstart

MIN_ACCURACY = 0.9


@pytest.mark.long("ppo")
@pytest.mark.timeout(1500)
def test_ppo_learns(tmp_path: Path):
    run = run_quickstart(tmp_path, config="ppo_tiny.yaml", overrides=[f"checkpointing.checkpoint_dir={RUN_FOLDER}"])
    by_step = {int(row["step"]): row for row in run.metrics}
    warmup = [row for step, row in by_step.items() if 0 < step <= 2]
    assert all("train/loss" not in row for row in warmup)
    assert run.accuracies[-1][1] >= MIN_ACCURACY
