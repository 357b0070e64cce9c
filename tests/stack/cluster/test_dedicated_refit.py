# SPDX-License-Identifier: Apache-2.0
"""Refits of a dedicated engine by the run's driver: it has its own slot, takes part in the exchange, and may die."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import cast

import pytest
import ray
from ray.actor import ActorHandle

from conversion.boxes import Slot
from mrl.cluster.engines import EngineGroup
from mrl.cluster.runtime import placed_slots
from mrl.cluster.session import start_models
from mrl.cluster.tasks import started_tasks
from mrl.cluster.verbs import EngineVerbs
from mrl.config.load import load_config
from mrl.types import RolloutRequest, SamplingParams
from tests.drivers import do, opened
from tests.stack.loop.conftest import SMALL, write_inputs
from tests.waiting import HANG_S

DEADLINE_S = HANG_S


def scale_weights(policy) -> None:
    """Other weights, the same on every replica."""
    for tensor in policy._tensors.values():
        tensor.data.mul_(1.25)


def die_in_round(engine, fatal_round: int) -> None:
    """The engine's process ends in the middle of a round: its messages are posted, its peers are at theirs."""
    exchange = engine.llm.model_executor.driver_worker.worker.sides["weights"].exchange
    write = exchange._write_own_checksums

    def die(round_index: int) -> None:
        if round_index == fatal_round:
            os.kill(os.getpid(), signal.SIGKILL)
        write(round_index)

    exchange._write_own_checksums = die


def die_at_the_next_start(engines: EngineGroup, patch: pytest.MonkeyPatch) -> None:
    start = engines._start

    def start_and_die(index: int):
        patch.undo()
        actor = start(index)
        ray.kill(cast(ActorHandle, actor))
        return actor

    patch.setattr(engines, "_start", start_and_die)


def test_a_dedicated_engine_is_refitted_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    overrides = [
        *write_inputs(tmp_path, num_rows=8),
        *SMALL,
        "cluster.cpu_units_per_node=2",
        "policy.generation.colocated.enabled=false",
        "policy.refit_buffer_size_gb=0.0005",  # several rounds
    ]
    config = load_config("grpo_tiny.yaml", overrides)
    with placed_slots(config) as placement, opened(started_tasks()) as tasks:
        models, engines, refit = do(
            start_models(config, placement, pad_token_id=256, log_folder=tmp_path / "logs", tasks=tasks)
        )
        policies = models["policy"]
        assert [engine.slots for engine in placement.engines] == [(2,)]
        assert refit.schedule.num_rounds > 1 and refit.schedule.link_bytes()["gpu"] == 0
        zero = do(refit.zero())
        assert zero.weight_version == 1 and zero.verified_bytes == refit.schedule.class_of(2).written_bytes

        def digest() -> dict[Slot, int]:
            return engines.call(EngineVerbs.live_digest)[0][0]

        loaded = digest()
        policies.apply(scale_weights, deadline_s=DEADLINE_S)
        report = do(refit.run())
        changed = digest()
        assert report.verified_bytes + report.padding_bytes == zero.verified_bytes + zero.padding_bytes
        # Only tensors of zeros look as before.
        assert sum(changed[slot] != loaded[slot] for slot in loaded) > len(loaded) // 2

        # A new engine holds what vLLM has loaded again, in a group that its predecessor has left.
        engines.apply(die_in_round, 1, deadline_s=DEADLINE_S)
        die_at_the_next_start(engines, monkeypatch)
        do(refit.run())
        assert engines.book.num_restarts == 2
        assert digest() == changed

        sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=None, max_new_tokens=2, stop_token_ids=())
        request = RolloutRequest("prompt", 0, 0, 0, (1, 2, 3), sampling)

        async def ask_twice() -> None:
            for _ in range(2):
                asyncio.ensure_future(engines.book.ask(request.request_id, request))
            await tasks.wait(lambda: False, what="generation", who=engines.book.called, limit_s=DEADLINE_S)

        with pytest.raises(ValueError, match="engine 0 failed in generation: requests were added twice"):
            do(ask_twice())
