# SPDX-License-Identifier: Apache-2.0
"""Part "async", too: HTTP requests while a run trains, from a reward actor's function and outside, through a refit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from mrl.cluster import scheduling
from mrl.envs.endpoints import Endpoints, read_endpoints
from mrl.envs.task import Task
from mrl.loop.rollouts import VALIDATION_EPOCH
from mrl.store.summary import Clock
from mrl.types import RolloutGroup, Verdict
from tests.drivers import do, train_step
from tests.stack.loop.conftest import CoinToss, LiveRun, live_run
from tests.waiting import HANG_S

pytestmark = pytest.mark.long("async")

TIMEOUT_S = HANG_S


def ask(endpoints: Endpoints, base_url: str, prompt: str, seed: int) -> dict:
    """The answer to a chat of one message."""
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 6, "seed": seed, "return_token_ids": True}
    headers = {"Authorization": f"Bearer {endpoints.api_key}"}
    response = httpx.post(f"{base_url}/chat/completions", json=body, headers=headers, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    return response.json()


class Judge(CoinToss):
    """Asks the model itself about every answer before it tosses its coin."""

    def __init__(self, file: Path) -> None:
        self.file = file

    async def judge(self, task: Task) -> Verdict:
        found = read_endpoints(self.file)
        opinion = await asyncio.to_thread(ask, found, found.base_url(task.text), "is it right?", 1)
        assert len(opinion["choices"][0]["token_ids"]) >= 1
        return await super().judge(task)


def set_environment(actor, environment: object) -> None:
    actor.scorer.environments["math"] = environment


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    """A run of its own, whose engines have servers."""
    folder = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MRL_CACHE", str(folder / "cache"))
        # As on two nodes: a gateway for each engine.
        patch.setattr(scheduling, "num_gateways", lambda config: 2)
        yield from live_run(folder, "policy.generation.vllm_cfg.expose_http_server=true")


@pytest.fixture
def endpoints(live: LiveRun) -> Iterator[Endpoints]:
    file = live.run.supplier.session.engines.log_folder / "endpoints.json"
    assert file.stat().st_mode & 0o777 == 0o600
    found = read_endpoints(file)
    assert len(found.base_urls) == live.run.supplier.session.engines.num_engines == 2
    assert len({urlsplit(base_url).port for base_url in found.base_urls}) == 2
    live.run.supplier.session.rewards.apply(set_environment, Judge(file))
    yield found
    live.run.supplier.session.rewards.apply(set_environment, CoinToss())


def test_rewards_and_others_ask_the_engines_while_the_run_trains(live: LiveRun, endpoints: Endpoints):
    before = live.state.weight_version
    is_over = threading.Event()

    def ask_on(base_url: str) -> list[int]:
        versions = []
        while not is_over.is_set():
            versions.append(ask(endpoints, base_url, "hello", seed=len(versions))["weight_version"])
        return versions

    with ThreadPoolExecutor(2) as threads:
        askers = [threads.submit(ask_on, base_url) for base_url in endpoints.base_urls]
        try:
            train_step(live.run, live.state)
            after = [ask(endpoints, base_url, "hello", seed=1)["weight_version"] for base_url in endpoints.base_urls]
        finally:
            is_over.set()
        assert after == [live.state.weight_version] * 2
        for asker in askers:
            versions = asker.result(timeout=TIMEOUT_S)
            assert (
                versions == sorted(versions)
                and {before, live.state.weight_version} >= set(versions)
                and len(versions) > 1
            )
    assert live.state.metrics["rollout/failed"] == 0
    assert live.state.metrics["train/token_mult_prob_error"] <= 1.001


def test_the_key_stands_in_one_file_alone(live: LiveRun, endpoints: Endpoints):
    files = [path for path in live.run.folder.path.rglob("*") if path.is_file()]
    assert [path.name for path in files if endpoints.api_key.encode() in path.read_bytes()] == ["endpoints.json"]


def texts(groups: Sequence[RolloutGroup]) -> list[list[str]]:
    return [[verdict.text for verdict in group.verdicts] for group in groups]


def test_rollouts_are_the_same_whoever_else_asks(live: LiveRun, endpoints: Endpoints):
    run = live.run
    asked = [(VALIDATION_EPOCH, prompt) for prompt in run.supplier.data.validation[:4]]

    def sampled() -> list[list[str]]:
        version = live.state.weight_version
        return texts(
            do(
                run.supplier.queue.sample(
                    asked, run.supplier.data.sampling, num_generations=3, weight_version=version, clock=Clock()
                )
            )
        )

    with ThreadPoolExecutor(8) as threads:
        others = [
            threads.submit(ask, endpoints, base_url, f"hello {i}", i)
            for i in range(8)
            for base_url in endpoints.base_urls
        ]
        beside_others = sampled()
        assert all(other.result(timeout=TIMEOUT_S) for other in others)
    run.supplier.session.rewards.apply(set_environment, CoinToss())
    assert beside_others == sampled()
