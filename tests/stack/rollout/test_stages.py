# SPDX-License-Identifier: Apache-2.0
"""An engine of two pipeline stages: the bits of one process, over HTTP too, and refits of both stages, also between passes under way."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import openai

from mrl.config.load import load_config
from mrl.config.model import sizes_of
from mrl.plan.engine import cache_layout
from mrl.recipes import tokenizer
from mrl.refit.checksum import digest
from mrl.types import Rollout, RolloutRequest
from tests import models
from tests.rollouts import MAX_MODEL_LEN, StartEngine, differences, random_requests, run
from tests.stack.rollout.test_http import TIMEOUT_S, chat, completion, served
from tests.stack.rollout.test_plan import CPU_BLOCK
from tests.stack.rollout.trainer import Trainer, expected_tensors, refit
from tests.stack.rollout.witness import PP2
from tests.unit.rollout.gateways import ENGINE_KEY, RUN_KEY, Running
from tests.waiting import wait_until

if TYPE_CHECKING:
    from mrl.rollout.engine import Engine

REQUESTS = random_requests(12)
# Prompts are cut into chunks, and several passes are under way.
CHUNK_TOKENS = 128


def test_an_engine_of_two_stages_draws_what_one_process_draws(start_engine: StartEngine, tmp_path: Path) -> None:
    loaded, other = (models.save_model(tmp_path / str(seed), "qwen3", seed) for seed in range(2))
    alone = start_engine(loaded, max_num_batched_tokens=CHUNK_TOKENS)
    from vllm.v1.engine.core_client import InprocClient

    from mrl.rollout.http_server import start_server

    trainer = Trainer(loaded)
    alone.enter("load")
    alone.prepare_refit(trainer.workers())
    refit(alone, trainer, version=1)
    expected = {1: run(alone, REQUESTS)}
    trainer.load(other)
    refit(alone, trainer, version=2)
    expected[2] = run(alone, REQUESTS)

    tokenizer.save(loaded, model_max_length=MAX_MODEL_LEN)
    engine = start_engine(loaded, max_num_batched_tokens=CHUNK_TOKENS, pipeline_parallel_size=2, tokenizer=loaded)
    layout = cache_layout(sizes_of(trainer.inputs.hf_config), 1, element_bytes=4, kernel_block=CPU_BLOCK, pp=2)
    assert engine.llm.vllm_config.cache_config.num_gpu_blocks == (64 << 20) // layout.block_bytes
    engine.enter("load")
    before, trainer = engine.live_digest(), Trainer(loaded, PP2)
    engine.prepare_refit(trainer.workers())
    refit(engine, trainer, version=1)
    assert engine.live_digest() == before == [digest(expected_tensors(loaded, PP2, worker)) for worker in range(2)]
    assert differences(run(engine, REQUESTS), expected[1]) == []
    policy = load_config("grpo_tiny.yaml", [f"policy.model_name={loaded}"]).policy
    url = start_server(engine, policy, host="127.0.0.1", api_key=ENGINE_KEY, wake=lambda: None)
    check_answers(engine, url, expected[1])

    # Dropped while passes are under way; a second time the next weights come.
    for hangs_up in (False, True):
        engine.add(REQUESTS)
        line = ask(engine, url, REQUESTS[0])
        for _ in range(6):
            engine.step()
        assert isinstance(engine.llm.engine_core, InprocClient)
        assert engine.llm.engine_core.engine_core.batch_queue and engine.num_unfinished == len(REQUESTS)
        if hangs_up:
            line.close()
            wait_until(lambda: not engine.callers._coming.empty(), "withdrawal of the question")
            engine.step()
            engine.abort(list(engine._unfinished))
            assert not engine.callers.are_waiting and not engine.llm.has_unfinished_requests()
        else:
            engine.abort(list(engine._unfinished)[::2])
            trainer.load(other)
            refit(engine, trainer, version=2)
            mixed = run(engine, ())
            assert len(mixed) == len(REQUESTS) // 2
            assert {rollout.num_weight_versions for rollout in mixed.values()} == {2}
            assert all(rollout.token_ids[0] == expected[1][key].token_ids[0] for key, rollout in mixed.items())
            (answer,) = served(engine, lambda line=line: json.loads(line.getresponse().read()))
            assert (answer["weight_version"], answer["num_weight_versions"]) == (1, 2)
    assert engine.live_digest() == [digest(expected_tensors(other, PP2, worker)) for worker in range(2)]
    assert differences(run(engine, REQUESTS), expected[2]) == []


def check_answers(engine: Engine, url: str, expected: Mapping[str, Rollout]) -> None:
    """Asks for some of the rollouts over HTTP, beside the others: the engine and the gateway, and for a chat that a grammar chooses."""
    gateway = Running()
    gateway.use(url)
    places = (url, ENGINE_KEY), (f"{gateway.url}/v1", RUN_KEY)
    clients = [openai.OpenAI(base_url=place, api_key=key, max_retries=0, timeout=TIMEOUT_S) for place, key in places]
    calls: list[Callable[[], Any]] = [
        lambda one=one, client=client: completion(client, list(one.token_ids), seed=one.seed, max_tokens=16)
        for one, client in zip(REQUESTS[:4], 2 * clients, strict=True)
    ]
    forced = {"structured_outputs": {"choice": ["yes", "no"]}, "record": True}
    calls.append(lambda: chat(clients[0], [{"role": "user", "content": "hello"}], max_completion_tokens=8, extra_body=forced))
    beside: dict[str, Rollout] = {}
    engine.add(REQUESTS[4:])
    *answers, chosen = served(engine, *calls, beside=beside)
    gateway.stop()
    beside |= run(engine, ())
    assert differences(beside, {one.request_id: expected[one.request_id] for one in REQUESTS[4:]}) == []
    for one, answer in zip(REQUESTS[:4], answers, strict=True):
        rollout, (choice,) = expected[one.request_id], answer.choices
        assert (choice.token_ids, answer.weight_version) == (rollout.token_ids.tolist(), 1)
        assert choice.logprobs.token_logprobs == rollout.generator_logprobs.tolist()
    assert chosen.record["is_forced"] and chosen.choices[0].message.content in ("yes", "no")


def ask(engine: Engine, url: str, one: RolloutRequest) -> http.client.HTTPConnection:
    """A connection on which the engine owes a long answer."""
    address = urlsplit(url)
    line = http.client.HTTPConnection(str(address.hostname), address.port, timeout=TIMEOUT_S)
    body = {"prompt": list(one.token_ids), "max_tokens": 150, "ignore_eos": True}
    line.request(
        "POST",
        f"{address.path}/completions",
        json.dumps(body),
        {"Authorization": f"Bearer {ENGINE_KEY}", "Content-Type": "application/json"},
    )
    wait_until(lambda: engine.callers.are_waiting, "question over HTTP")
    return line
