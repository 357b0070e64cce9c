# SPDX-License-Identifier: Apache-2.0
"""An engine of several processes ends as a whole, so that its owner sees the death and can start it again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from mrl.cluster.engines import EngineGroup
from mrl.cluster.errors import ActorLost
from mrl.cluster.runtime import placed_slots
from mrl.cluster.tasks import started_tasks
from mrl.cluster.verbs import EngineVerbs
from mrl.config.load import load_config
from tests.drivers import call, opened
from tests.stack.loop.conftest import SMALL, write_inputs
from tests.waiting import HANG_S, wait_until

DEADLINE_S = HANG_S


def worker_pids(engine) -> list[int]:
    return [worker.proc.pid for worker in engine.llm.model_executor.workers]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def shared_memory(pids: list[int]) -> set[str]:
    """Files of /dev/shm with a name that processes have mapped."""
    maps = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line and not line.endswith(" (deleted)")}


def test_an_engine_ends_with_any_of_its_workers(tmp_path: Path):
    sizes = ["cluster.cpu_units_per_node=2", "policy.generation.vllm_cfg.tensor_parallel_size=2"]
    config = load_config("grpo_tiny.yaml", [*write_inputs(tmp_path, num_rows=8), *SMALL, *sizes])
    with placed_slots(config) as placement, opened(started_tasks()) as tasks:
        engines = call(lambda: EngineGroup(config, placement, log_folder=tmp_path / "logs", tasks=tasks))
        engines.wait_until_up()
        ((first, second),) = engines.apply(worker_pids, deadline_s=DEADLINE_S)
        wait_until(lambda: not shared_memory([first, second]), "removal of names that would stay on the host")
        os.kill(second, signal.SIGKILL)
        with pytest.raises(ActorLost, match="engine 0 died during live_digest"):
            engines.call(EngineVerbs.live_digest, deadline_s=DEADLINE_S)
        # The driver hears of the death before the other worker has seen it.
        wait_until(lambda: not is_running(first), "end of the other worker")
