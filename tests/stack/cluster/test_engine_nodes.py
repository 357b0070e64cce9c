# SPDX-License-Identifier: Apache-2.0
"""An engine with a worker on each of two nodes of a real Ray cluster: its tokens, refits, and its parts' deaths."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import cast

import numpy as np
import openai
import pytest
import ray

from conversion.boxes import Slot
from mrl.cluster.calls import ask, start_actor
from mrl.cluster.engines import EngineActor
from mrl.cluster.environment import engine_variables
from mrl.cluster.gateway import start_gateways
from mrl.cluster.runtime import placed_slots
from mrl.cluster.session import start_models
from mrl.cluster.tasks import started_tasks
from mrl.cluster.verbs import EngineVerbs
from mrl.config.load import load_config
from mrl.types import Rollout
from tests.drivers import do, opened
from tests.models import save_model
from tests.rollouts import differences, random_requests, run
from tests.stack.loop.conftest import SMALL, write_inputs
from tests.stack.rollout.test_http import completion
from tests.waiting import HANG_S, wait_until

DEADLINE_S = HANG_S
REQUESTS = random_requests(6)


def sample(engine) -> dict[str, Rollout]:
    return run(engine, REQUESTS)


def serve_alone(engine) -> dict[str, Rollout]:
    engine.set_weight_version(1)
    return sample(engine)


def worker_pids(engine) -> list[int]:
    """Process of each worker, in the order of their ranks."""
    return [int(key.split()[-1]) for key, _ in engine._workers("memory_facts")]


def scale_weights(policy) -> None:
    """Other weights, the same on every replica."""
    for tensor in policy._tensors.values():
        tensor.data.mul_(1.25)


def is_running(pid: int) -> bool:
    return (
        Path(f"/proc/{pid}").exists()
        and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    )


@pytest.mark.long("cluster")
@pytest.mark.parametrize("kinds", [("tensor",), ("tensor", "expert"), ("pipeline",), ("expert",)], ids="+".join)
def test_an_engine_over_two_nodes_samples_is_refitted_and_comes_back(
    two_nodes: None, tmp_path: Path, kinds: tuple[str, ...]
):
    sizes = [
        "cluster.num_nodes=2",
        "cluster.cpu_units_per_node=1",
        "policy.generation.vllm_cfg.expose_http_server=true",
    ]
    engine = [f"policy.generation.vllm_cfg.{kind}_parallel_size=2" for kind in kinds]
    inputs = write_inputs(tmp_path, num_rows=8)
    if kinds == ("pipeline",):  # vLLM needs attention on both stages
        save_model(tmp_path / "model", "nemotron_h", hybrid_override_pattern="M*EM*EM")
    config = load_config("grpo_tiny.yaml", [*inputs, *SMALL, *sizes, *engine])
    with placed_slots(config) as placement, opened(started_tasks()) as tasks:
        (slots,) = placement.engines
        assert slots.parts(placement.node_of) == [(0,), (1,)]
        models, engines, refit = do(
            start_models(config, placement, pad_token_id=256, log_folder=tmp_path / "logs", tasks=tasks)
        )
        zero = do(refit.zero())
        assert zero.verified_bytes == sum(refit.schedule.class_of(worker).written_bytes for worker in (0, 1))
        (together,) = engines.apply(sample, deadline_s=DEADLINE_S)
        loaded = engines.call(EngineVerbs.live_digest)[0]
        before = worker_pids_of(engines)

        def kill(worker: int) -> None:
            """Ends a worker process, and waits for the processes of both nodes."""
            pids = worker_pids_of(engines)
            os.kill(pids[worker], signal.SIGKILL)
            for pid in pids:
                wait_until(lambda pid=pid: not is_running(pid), f"end of worker process {pid}")

        # A part on a further node dies: the engine does, and a refit starts it again.
        kill(1)
        assert do(refit.run()).verified_bytes == zero.verified_bytes
        assert engines.book.num_restarts == 1 and not set(before) & set(worker_pids_of(engines))
        assert engines.call(EngineVerbs.live_digest)[0] == loaded
        (again,) = engines.apply(sample, deadline_s=DEADLINE_S)
        assert differences(together, again) == []
        gateways = do(start_gateways(config, placement, engines, judges={}, log_folder=tmp_path / "logs"))
        assert gateways is not None
        with openai.OpenAI(
            base_url=f"{gateways.urls[0]}/engines/0/v1", api_key=gateways.api_key, max_retries=0, timeout=HANG_S
        ) as client:
            for one in REQUESTS:
                (choice,) = completion(client, list(one.token_ids), seed=one.seed, max_tokens=16).choices
                rollout = together[one.request_id]
                assert choice.token_ids == rollout.token_ids.tolist()
                assert choice.logprobs.token_logprobs == rollout.generator_logprobs.tolist()

        # The first node's part dies in its turn, and other weights arrive at both.
        kill(0)
        models["policy"].apply(scale_weights, deadline_s=DEADLINE_S)
        assert do(refit.run()).verified_bytes == zero.verified_bytes
        for old, new in zip(loaded, engines.call(EngineVerbs.live_digest)[0], strict=True):
            assert num_changed(old, new) > len(old) // 2

        # One process, without tensor parallelism, draws the same tokens.
        alone = load_config("grpo_tiny.yaml", [f"policy.model_name={config.policy.model_name}", *SMALL, *sizes])
        actor = start_actor(
            EngineActor, placement.options(0, engine_variables(alone, {})), tmp_path / "logs/alone.log", {}
        )
        ray.get(ask(actor, EngineActor.build, alone, (), (), None), timeout=DEADLINE_S)
        expected = cast(dict[str, Rollout], ray.get(ask(actor, EngineActor.apply, serve_alone), timeout=DEADLINE_S))
        for key, rollout in together.items():
            assert rollout.token_ids.tolist() == expected[key].token_ids.tolist()
            assert np.allclose(rollout.generator_logprobs, expected[key].generator_logprobs, rtol=1e-6, atol=1e-5)


def worker_pids_of(engines) -> list[int]:
    (pids,) = engines.apply(worker_pids, deadline_s=DEADLINE_S)
    return pids


def num_changed(old: dict[Slot, int], new: dict[Slot, int]) -> int:
    return sum(old[slot] != new[slot] for slot in old)
