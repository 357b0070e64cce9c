# SPDX-License-Identifier: Apache-2.0
"""Agents in front of a real engine: what their rollouts train on is, token by token, what the engine has sampled."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mrl.config.load import load_config
from mrl.rollout.agents import AgentResult, AgentRunner, AgentTask, FunctionAgent
from mrl.types import Prompt, Rollout, SamplingParams, hashed_seed
from tests.rollouts import StartEngine, request, run
from tests.stack.loop.conftest import write_inputs
from tests.stack.rollout.served import gateway_of
from tests.unit.rollout.gateways import Running
from tests.waiting import HANG_S

if TYPE_CHECKING:
    from mrl.rollout.engine import Engine

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=None, max_new_tokens=8, stop_token_ids=(258,))
Drawn = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""Prompt, answer and its logprobs."""


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("gateway")
    overrides = write_inputs(folder, num_rows=4)
    (folder / "overrides.json").write_text(json.dumps(overrides))
    engine = start_engine(folder / "model", tokenizer=folder / "model")
    engine.set_weight_version(0)
    return engine


@pytest.fixture(scope="module")
def runner(engine: Engine, running: Running) -> AgentRunner:
    async def make() -> AgentRunner:
        runner = AgentRunner(running.gateway, url=running.url, timeout_s=HANG_S, masks_flagged=True)
        runner.agents["busy"] = [agent := FunctionAgent("tests.stack.loop.trial_agents:busy")]
        await agent.start()
        return runner

    return running.run(make())


@pytest.fixture(scope="module")
def running(engine: Engine) -> Running:
    folder = Path(engine.llm.model_config.model).parent
    words = [*json.loads((folder / "overrides.json").read_text()), "policy.generation.vllm_cfg.max_num_seqs=128"]
    policy = load_config("grpo_tiny.yaml", words).policy
    return gateway_of(engine, policy)


def test_ids_trained_are_ids_sampled_once_each(
    engine: Engine, running: Running, runner: AgentRunner, monkeypatch: pytest.MonkeyPatch
):
    """Two agents at once, each with a conversation, a retry, a sub-agent and a forced answer."""
    drawn, answer = Counter[Drawn](), engine.callers.answer

    def noted(output, **counts) -> bool:
        for one in output.outputs:
            logprobs = [step[token].logprob for token, step in zip(one.token_ids, one.logprobs, strict=True)]
            drawn[tuple(output.prompt_token_ids), tuple(one.token_ids), rounded(logprobs)] += 1
        return answer(output, **counts)

    monkeypatch.setattr(engine.callers, "answer", noted)
    prompts = [Prompt(name, (104, 105), f"{name}+30=", "42", "busy") for name in ("12", "13")]
    tasks = [
        AgentTask(prompt, 0, 0, seed=index, sampling=SAMPLING, weight_version=0) for index, prompt in enumerate(prompts)
    ]
    found = stepped(engine, [asyncio.run_coroutine_threadsafe(runner.run(task), running.loop) for task in tasks])
    trained = Counter(turn for ran in found for rollout in ran.rollouts for turn in turns(rollout))
    assert drawn.total() == 2 * 5 and trained.total() == 2 * 4 and trained <= drawn
    for ran in found:
        assert ran.verdict.is_valid and len(ran.rollouts) == 3 and ran.verdict.metrics["untrained_tokens_forced"] > 0
    # The same again, whoever else asks: seeds are those of the session's requests.
    (alone,) = stepped(engine, [asyncio.run_coroutine_threadsafe(runner.run(tasks[1]), running.loop)])
    assert [turns(rollout) for rollout in alone.rollouts] == [turns(rollout) for rollout in found[1].rollouts]


def test_a_turn_has_the_logprobs_of_a_rollout(engine: Engine, running: Running, runner: AgentRunner):
    """Sampling alone from the prompt and the seed of a turn gives the turn."""
    prompt = Prompt("12", (104, 105), "12+30=", "42", "busy")
    task = AgentTask(prompt, 0, 0, seed=3, sampling=SAMPLING, weight_version=0)
    (ran,) = stepped(engine, [asyncio.run_coroutine_threadsafe(runner.run(task), running.loop)])
    first = next(rollout for rollout in ran.rollouts if len(rollout.turns) == 2)
    asked = request(first.request.token_ids, max_new_tokens=6, stop_token_ids=(258,))
    rollout = run(engine, [dataclasses.replace(asked, seed=hashed_seed("3/0"))])[asked.request_id]
    ((_, ids, logprobs), _) = turns(first)
    assert rollout.token_ids.tolist() == list(ids) and rollout.generator_logprobs.tolist() == list(logprobs)


def stepped(engine: Engine, futures: list[Future[AgentResult]]) -> list[AgentResult]:
    """Results of the futures, while this thread steps the engine."""
    while not all(future.done() for future in futures):
        if engine.callers.are_waiting:
            engine.step()
    return [future.result() for future in futures]


def rounded(logprobs: list[float]) -> tuple[float, ...]:
    return tuple(np.array(logprobs, dtype=np.float32).tolist())


def turns(rollout: Rollout) -> list[Drawn]:
    """The trained turns of a sequence as the engine drew them."""
    whole, first = [*rollout.request.token_ids, *rollout.token_ids.tolist()], len(rollout.request.token_ids)
    return [
        (
            tuple(whole[: first + turn.start]),
            tuple(whole[first + turn.start : first + turn.stop]),
            tuple(rollout.generator_logprobs[turn.start : turn.stop].tolist()),
        )
        for turn in rollout.turns
    ]
