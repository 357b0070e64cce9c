# SPDX-License-Identifier: Apache-2.0
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
def test_five_steps_with_context_parallelism_have_the_losses_of_those_without(tmp_path: Path):
    plain, context = (
        run(tmp_path / f"cp{size}", f"policy.megatron_cfg.context_parallel_size={size}") for size in (1, 2)
    )
    assert len(plain) == len(context) == 5 and len({step["train/reward"] for step in plain}) > 1
    for step, expected in zip(context, plain, strict=True):
        assert step["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-5)
        # Advantages of a prompt add up to zero, and the loss all but does; its gradient does not.
        assert step["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-4)
        assert step["train/reward"] == expected["train/reward"]


def run(folder: Path, *overrides: str) -> list[dict[str, float]]:
    """Metrics of the train steps."""
    train(folder, *QUICKSTART, *overrides)
    return [row for row in rows(folder) if row["step"]]
