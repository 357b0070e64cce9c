# SPDX-License-Identifier: Apache-2.0
"""Engines of two pipeline stages, and of two groups that share experts: the bits of one process, over HTTP too, and
refits of both parts, also between passes under way."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import openai
import pytest

from conversion.families.common import VllmParallel
from mrl.config.load import load_config
from mrl.config.model import sizes_of
from mrl.plan.engine import cache_layout
from mrl.recipes import tokenizer
from mrl.refit.checksum import digest
from mrl.types import Rollout, RolloutRequest
from tests import models
from tests.rollouts import MAX_MODEL_LEN, StartEngine, differences, random_requests, run
from tests.stack.rollout.served import engine_url, gateway_of
from tests.stack.rollout.test_http import TIMEOUT_S, chat, completion, served
from tests.stack.rollout.test_plan import CPU_BLOCK
from tests.stack.rollout.trainer import Trainer, expected_tensors, refit
from tests.stack.rollout.witness import GROUPS, PP2
from tests.unit.rollout.gateways import RUN_KEY, Running
from tests.waiting import wait_until

if TYPE_CHECKING:
    from mrl.rollout.engine import Engine

REQUESTS = random_requests(12)
# Prompts are cut into chunks, and several passes are under way.
CHUNK_TOKENS = 128


@pytest.mark.parametrize(("model_type", "parallel"), [("qwen3", PP2), ("qwen3_moe", GROUPS)], ids=["stages", "groups"])
def test_an_engine_of_two_parts_draws_what_one_process_draws(
    start_engine: StartEngine, tmp_path: Path, model_type: str, parallel: VllmParallel
) -> None:
    loaded, other = (models.save_model(tmp_path / str(seed), model_type, seed) for seed in range(2))
    alone = start_engine(loaded, max_num_batched_tokens=CHUNK_TOKENS)
    from vllm.v1.engine.core_client import InprocClient

    trainer = Trainer(loaded)
    alone.enter("load")
    alone.prepare_refit(trainer.workers())
    refit(alone, trainer, version=1)
    expected = {1: run(alone, REQUESTS)}
    trainer.load(other)
    refit(alone, trainer, version=2)
    expected[2] = run(alone, REQUESTS)

    tokenizer.save(loaded, model_max_length=MAX_MODEL_LEN)
    sizes = dict(pipeline_parallel_size=parallel.pp, expert_parallel_size=parallel.ep, kv_cache_memory_mib=64)
    engine = start_engine(loaded, max_num_batched_tokens=CHUNK_TOKENS, tokenizer=loaded, **sizes)
    layout = cache_layout(
        sizes_of(trainer.inputs.hf_config), 1, element_bytes=4, kernel_block=CPU_BLOCK, pp=parallel.pp
    )
    assert engine.llm.vllm_config.cache_config.num_gpu_blocks == (64 << 20) // layout.block_bytes
    engine.enter("load")
    before, trainer = engine.live_digest(), Trainer(loaded, parallel)
    engine.prepare_refit(trainer.workers())
    refit(engine, trainer, version=1)
    assert engine.live_digest() == before == [digest(expected_tensors(loaded, parallel, worker)) for worker in range(2)]
    # With one request a group has none, with three they are uneven; others come while some run.
    for arrivals in (
        {0: REQUESTS},
        {0: REQUESTS[:1]},
        {0: REQUESTS[:3]},
        {0: REQUESTS[:2], 3: REQUESTS[2:7], 5: REQUESTS[7:]},
    ):
        rollouts = run(engine, arrivals)
        assert differences(rollouts, {key: expected[1][key] for key in rollouts}) == []
    policy = load_config("grpo_tiny.yaml", [f"policy.model_name={loaded}"]).policy
    gateway = gateway_of(engine, policy)
    check_answers(engine, gateway, expected[1])

    assert isinstance(engine.llm.engine_core, InprocClient)
    core = engine.llm.engine_core.engine_core
    # Dropped while passes are under way; a second time the next weights come.
    for hangs_up in (False, True):
        engine.add(REQUESTS)
        line = ask(engine, gateway, REQUESTS[0])
        for _ in range(6):
            engine.step()
        # Stages have several passes under way.
        assert core.batch_queue if parallel.pp > 1 else core.scheduler.get_request_counts() == (len(REQUESTS) + 1, 0)
        assert engine.num_unfinished == len(REQUESTS)
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
    assert engine.live_digest() == [digest(expected_tensors(other, parallel, worker)) for worker in range(2)]
    assert differences(run(engine, REQUESTS), expected[2]) == []
    if parallel.num_groups > 1:
        check_groups(engine, core.scheduler)


def check_groups(engine: Engine, scheduler: object) -> None:
    """Groups of an engine step alone, and share requests out; the answers to one question stay together."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    from mrl.rollout.groups import GroupScheduler

    # As vLLM's warm-up does on GPUs.
    assert engine.llm.collective_rpc(runs_alone) == [True, True]
    # Two of these requests in a group and one in the other, to which all answers to a question come.
    engine.add(REQUESTS[:3])
    engine.llm.add_request("many", tokens_input([1, 2, 3]), SamplingParams(n=3))
    assert isinstance(scheduler, GroupScheduler)
    assert sorted(len(one.requests) for one in scheduler.schedulers) == [2, 4]


def runs_alone(worker: Any) -> bool:
    from vllm.v1.core.sched.output import SchedulerOutput

    return worker.execute_model(SchedulerOutput.make_empty()).req_ids == []


def check_answers(engine: Engine, gateway: Running, expected: Mapping[str, Rollout]) -> None:
    """Asks for some rollouts over HTTP beside the others, by two routes, and for a chat that a grammar chooses."""
    places = engine_url(gateway), f"{gateway.url}/v1"
    clients = [openai.OpenAI(base_url=place, api_key=RUN_KEY, max_retries=0, timeout=TIMEOUT_S) for place in places]
    calls: list[Callable[[], Any]] = [
        lambda one=one, client=client: completion(client, list(one.token_ids), seed=one.seed, max_tokens=16)
        for one, client in zip(REQUESTS[:4], 2 * clients, strict=True)
    ]
    # Two grammars in one pass, in two groups if there are.
    choices = (["yes", "no"], ["maybe", "never"])
    calls += [
        lambda choice=choice: chat(
            clients[0],
            [{"role": "user", "content": "hello"}],
            max_completion_tokens=8,
            extra_body={"structured_outputs": {"choice": choice}},
        )
        for choice in choices
    ]
    beside: dict[str, Rollout] = {}
    engine.add(REQUESTS[4:])
    *answers, first, second = served(engine, *calls, beside=beside)
    beside |= run(engine, ())
    assert differences(beside, {one.request_id: expected[one.request_id] for one in REQUESTS[4:]}) == []
    for one, answer in zip(REQUESTS[:4], answers, strict=True):
        rollout, (choice,) = expected[one.request_id], answer.choices
        assert (choice.token_ids, answer.weight_version) == (rollout.token_ids.tolist(), 1)
        assert choice.logprobs.token_logprobs == rollout.generator_logprobs.tolist()
    for chosen, choice in zip((first, second), choices, strict=True):
        assert chosen.choices[0].message.content in choice


def ask(engine: Engine, gateway: Running, one: RolloutRequest) -> http.client.HTTPConnection:
    """A connection on which the engine owes a long answer."""
    address = urlsplit(engine_url(gateway))
    line = http.client.HTTPConnection(str(address.hostname), address.port, timeout=TIMEOUT_S)
    body = {"prompt": list(one.token_ids), "max_tokens": 150, "ignore_eos": True}
    line.request(
        "POST",
        f"{address.path}/completions",
        json.dumps(body),
        {"Authorization": f"Bearer {RUN_KEY}", "Content-Type": "application/json"},
    )
    wait_until(lambda: engine.callers.are_waiting, "question over HTTP")
    return line
