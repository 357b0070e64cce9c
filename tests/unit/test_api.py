# SPDX-License-Identifier: Apache-2.0
"""Refusals of `mrl.api` before anything starts; tests/stack shows what it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl import api


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "rm"])
def test_an_algorithm_without_rollouts_is_refused_by_name(algorithm: str, tmp_path: Path):
    run_folder = tmp_path / "run"
    with (
        pytest.raises(ValueError, match=rf"^algorithm={algorithm}: .*run `python -m mrl\.train {algorithm}_tiny\.yaml`, or choose"),
        api.start(f"{algorithm}_tiny.yaml", [f"checkpointing.checkpoint_dir={run_folder}"]),
    ):
        raise AssertionError("it has started")
    assert not run_folder.exists()
