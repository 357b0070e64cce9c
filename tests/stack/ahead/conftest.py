"""A run whose dedicated engine samples while one policy rank trains."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mrl.cluster.session import start_session
from mrl.config.load import load_config
from mrl.saving import open_saver
from mrl.store.clock import Budget
from mrl.store.run_folder import RunFolder
from mrl.train import Run, open_run, preflight, resume
from mrl.types import RunState
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
def running(folder: Path, *overrides: str) -> Iterator[tuple[Run, RunState]]:
    """The run between two steps, and its state."""
    config = load_config("grpo_tiny.yaml", [*write_inputs(folder), *AHEAD, *overrides])
    data = preflight(config)
    run_folder = RunFolder(config)
    run_folder.open()
    with run_folder, start_session(config, pad_token_id=data.pad_token_id, log_folder=run_folder.log_folder / "actors") as session:
        session.rewards.apply(toss_coins)
        with open_saver(config, run_folder, session.policies) as saver:
            checkpoint = run_folder.newest_checkpoint()
            run = open_run(config, data, run_folder, session, saver, Budget(None, started=time.monotonic()))
            yield run, resume(run, checkpoint)
