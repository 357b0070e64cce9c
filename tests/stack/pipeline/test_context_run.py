"""The quickstart with context parallelism: the losses of five steps are those without."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stack.pipeline.test_pipeline_run import rows, train

# The quickstart's own layout, on four ranks; nothing is replayed.
QUICKSTART = [
    "policy.megatron_cfg.tensor_model_parallel_size=2",
    "policy.megatron_cfg.sequence_parallel=true",
    "policy.megatron_cfg.pipeline_model_parallel_size=1",
    "policy.router_replay.enabled=false",
    "checkpointing.enabled=false",
    "grpo.max_num_steps=5",
]


@pytest.mark.long("parity")
@pytest.mark.timeout(600)
def test_five_steps_with_context_parallelism_have_the_losses_of_those_without(tmp_path: Path):
    losses = {}
    for cp_size in (1, 2):
        folder = tmp_path / f"cp{cp_size}"
        train(folder, *QUICKSTART, f"policy.megatron_cfg.context_parallel_size={cp_size}")
        losses[cp_size] = [row["train/loss"] for row in rows(folder) if row["step"]]
    assert len(losses[1]) == 5 and len(set(losses[1])) > 1
    assert losses[2] == pytest.approx(losses[1], rel=1e-5, abs=1e-5)
