# SPDX-License-Identifier: Apache-2.0
"""A run whose dedicated engine samples while one policy rank trains."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mrl.config.load import load_config
from mrl.loop.rollouts import RolloutSupplier, prepare
from mrl.loop.run import Budget, Run
from mrl.store.run_folder import RunFolder
from mrl.types import RunState
from tests.drivers import do, opened
from tests.stack.loop.conftest import SMALL, toss_coins, write_inputs

AHEAD = [
    *SMALL,
    "cluster.cpu_units_per_node=1",
    "policy.megatron_cfg.tensor_model_parallel_size=1",
    "policy.megatron_cfg.expert_model_parallel_size=1",
    "policy.megatron_cfg.sequence_parallel=false",
    "policy.generation.colocated.enabled=false",
    "grpo.async_grpo.enabled=true",
    "grpo.max_num_steps=4",
    "checkpointing.enabled=false",
]


@contextmanager
def running(folder: Path, *overrides: str) -> Iterator[tuple[Run[RolloutSupplier], RunState]]:
    """The run between two steps, and its state."""
    config = load_config("grpo_tiny.yaml", [*write_inputs(folder), *AHEAD, *overrides])
    training = prepare(config)
    run_folder = RunFolder(training.config)
    run_folder.open()
    with run_folder:
        checkpoint = run_folder.newest_checkpoint()
        with opened(training.open(run_folder, Budget(None, started=time.monotonic()))) as run:
            run.supplier.session.rewards.apply(toss_coins)
            yield run, do(run.resume(checkpoint))
