# SPDX-License-Identifier: Apache-2.0
"""Part "async", too: engines answer over HTTP while weights are updated in flight, and after one of them was killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from mrl.config.load import load_config
from mrl.envs.endpoints import read_endpoints
from mrl.loop.rollouts import prepare
from mrl.loop.run import Budget
from mrl.store.run_folder import RunFolder
from tests.drivers import do, opened, train_step
from tests.stack.loop.conftest import DEADLINE_S, SMALL, toss_coins, write_inputs
from tests.stack.loop.test_http import ask

pytestmark = [pytest.mark.long("async"), pytest.mark.timeout(1200)]

SERVED_AHEAD = [
    "grpo.async_grpo.enabled=true",
    "grpo.async_grpo.in_flight_weight_updates=true",
    "policy.generation.colocated.enabled=false",
    "policy.generation.num_cpu_engines=2",
    "policy.generation.vllm_cfg.expose_http_server=true",
    "loss_fn.use_importance_sampling_correction=true",
]


def pid_of(engine) -> int:
    return os.getpid()


def test_engines_answer_through_refits_and_after_a_death(tmp_path: Path):
    config = load_config("grpo_tiny.yaml", [*write_inputs(tmp_path), *SMALL, *SERVED_AHEAD])
    training = prepare(config)
    folder = RunFolder(training.config)
    folder.open()
    checkpoint = folder.newest_checkpoint()
    with folder, opened(training.open(folder, Budget(None, started=time.monotonic()))) as run:
        session = run.supplier.session
        session.rewards.apply(toss_coins)
        state = do(run.resume(checkpoint))
        file = folder.log_folder / "actors" / "endpoints.json"
        first, is_over = read_endpoints(file), threading.Event()

        def ask_on(engine: int) -> tuple[list[int], int]:
            versions, num_lost = [], 0
            while not is_over.is_set():
                found = read_endpoints(file)
                try:
                    versions.append(ask(found, found.base_urls[engine], "hello", seed=1)["weight_version"])
                except httpx.TransportError:
                    num_lost += 1
                    time.sleep(0.5)
            return versions, num_lost

        with ThreadPoolExecutor(2) as threads:
            askers = [threads.submit(ask_on, engine) for engine in range(2)]
            try:
                train_step(run, state)
                train_step(run, state)
                os.kill(int(str(session.engines.apply(pid_of, deadline_s=DEADLINE_S)[0])), signal.SIGKILL)
                train_step(run, state)
                train_step(run, state)
                found = read_endpoints(file)
                after = [ask(found, base_url, "hello", seed=1) for base_url in found.base_urls]
            finally:
                is_over.set()
            (versions, num_lost), (others, num_lost_others) = (asker.result(timeout=DEADLINE_S) for asker in askers)
    assert session.engines.book.num_restarts == 1
    assert found.base_urls[1] == first.base_urls[1] and found.api_key == first.api_key
    assert [answer["weight_version"] for answer in after] == [state.weight_version] * 2
    assert num_lost > 0 and num_lost_others == 0
    assert len(set(versions)) > 2 and len(set(others)) > 3
    assert not file.exists()
    print(
        f"{len(versions)} and {len(others)} answers, {num_lost} connections lost, weight versions {sorted(set(others))}"
    )
