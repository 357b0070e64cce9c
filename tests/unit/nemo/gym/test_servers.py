# SPDX-License-Identifier: Apache-2.0
"""NeMo Gym agents' rollouts, by the form of their requests and answers, in front of an engine that answers by rule."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace

import httpx
import numpy as np
import pytest

from mrl.nemo.gym import servers as gym_module
from mrl.nemo.gym.servers import GymServers, gym_row, reply_of
from mrl.rollout import agents as agents_module
from mrl.rollout.agent_session import AgentSession
from mrl.rollout.agents import AgentResult, AgentRunner, AgentTask
from mrl.rollout.receipts import Receipts
from mrl.rollout.remote import AgentUnreached
from mrl.rollout.turn_tree import SampledAnswer
from mrl.types import Prompt, SamplingParams
from tests.unit.nemo.gym.gym_server import GymForm
from tests.unit.rollout.gateways import CONTEXT, RUN_KEY, SAMPLING, FakeEngine, Running
from tests.waiting import HANG_S, SOON_S

GYM_KEY = "the-key-of-gym"
ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "12+1?"}], "max_output_tokens": 10**6},
    "expected": 13,
}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    running = Running()
    running.gateway.gym_key = GYM_KEY
    yield running
    running.stop()


@pytest.fixture
def engine(running: Running) -> FakeEngine:
    engine = FakeEngine()
    running.use(engine)
    return engine


def servers_of(runner: AgentRunner) -> GymServers:
    assert isinstance(runner.gym, GymServers)
    return runner.gym


@pytest.fixture(scope="module")
def server(running: Running) -> GymForm:
    return GymForm(f"{running.url}/gym/v1", GYM_KEY)


@pytest.fixture(scope="module")
def runner(running: Running, server: GymForm) -> Iterator[AgentRunner]:
    async def make() -> AgentRunner:
        runner = AgentRunner(running.gateway, url=running.url, timeout_s=HANG_S, masks_flagged=True)
        runner.gym = GymServers(server.head_url)
        runner.gym.set_up()
        return runner

    yield (runner := running.run(make()))

    async def end() -> None:
        for agent in servers_of(runner)._agents.values():
            if agent._client is not None:
                await agent._client.close()

    running.run(end())


def task(
    does: str, index: int = 0, *, agent: str = "two_turns", sampling: SamplingParams = SAMPLING, **row: object
) -> AgentTask:
    prompt = Prompt(
        does, (1, 2), "12+1?", "13", agent, json.dumps(ROW | {"does": does, "agent_ref": {"name": agent}} | row)
    )
    return AgentTask(prompt, index, 0, seed=5, sampling=sampling, weight_version=3)


def run(running: Running, runner: AgentRunner, *tasks: AgentTask) -> list[AgentResult]:
    async def all_of_them() -> list[AgentResult]:
        return await asyncio.gather(*map(runner.run, tasks))

    return running.run(all_of_them())


def test_a_rollout_is_what_was_sampled_with_its_reward(
    running: Running, runner: AgentRunner, server: GymForm, engine: FakeEngine
):
    (ran,) = run(running, runner, task("answer", 3))
    (rollout,) = ran.rollouts
    assert rollout.request.token_ids == (*b"12+1?", 2)
    assert rollout.token_ids.tolist() == [901, 800, 2, *b"13", 2, 902, 800, 2]
    assert rollout.generator_logprobs.tolist() == [-0.25, -0.5, -0.75, 0, 0, 0, -0.25, -0.5, -0.75]
    assert (len(rollout.turns), rollout.weight_version, ran.engines) == (2, 3, (0,))
    verdict = ran.verdict
    assert (verdict.reward, verdict.status, verdict.text) == (0.75, "ok", "answer 1.0\n\nanswer 2.0")
    (conversation,) = verdict.conversations
    assert [(said["role"], said["content"]) for said in conversation] == [
        ("user", "12+1?"),
        ("assistant", "answer 1.0"),
        ("tool", "13"),
        ("assistant", "answer 2.0"),
        ("tool", "13"),
    ]
    assert verdict.metrics == {"num_tries": 2, "is_right": 1, "sequences": 1, "lost_attempts": 0}
    # The second turn went on from the tokens of the first, and not from those of its text.
    assert engine.asked[1]["prefix"][0] == [*b"12+1?", 2, 901, 800, 2]
    assert not any("generation_token_ids" in message for message in engine.asked[1]["messages"])
    row = server.rows[-1]
    request = row["responses_create_params"]
    assert (request["temperature"], request["top_p"], request["max_output_tokens"]) == (
        0.9,
        1.0,
        SAMPLING.max_new_tokens,
    )
    assert (row["expected"], row["_rowidx"], row["agent_ref"]) == (13, 3, {"name": "two_turns"})


def test_a_rollout_has_the_routes_of_its_tokens(running: Running, runner: AgentRunner, engine: FakeEngine):
    """Each answer is known by a receipt alone, and tells the experts of what the one before does not."""
    engine.keeps_routes = True
    (ran,) = run(running, runner, task("answer"))
    (rollout,) = ran.rollouts
    assert rollout.routes is not None and rollout.routes.dtype == np.uint16
    assert rollout.routes[:, 0, 0].tolist() == list(range(len(rollout.request.token_ids) + len(rollout.token_ids) - 1))
    assert rollout.routes[:, 0, 1].tolist() == [1] * 8 + [2] * 6


def test_rollouts_at_once_get_their_own_tokens(running: Running, runner: AgentRunner, engine: FakeEngine):
    ran = run(running, runner, *(task("answer", index) for index in range(6)))
    trained = [
        rollout.token_ids[turn.start].item() for one in ran for rollout in one.rollouts for turn in rollout.turns
    ]
    assert sorted(trained) == [900 + number for number in range(1, 13)]
    assert all(one.verdict.status == "ok" and "untrained_tokens_no_receipt" not in one.verdict.metrics for one in ran)
    assert running.gateway.receipts == Receipts()  # nothing is left


@pytest.mark.parametrize(("age_s", "num_kept"), [(0.0, 0), (HANG_S, 1)])
def test_an_answer_that_no_rollout_can_claim_any_more_leaves_while_others_run(
    running: Running, age_s: float, num_kept: int
):
    receipts, session = Receipts(age_s), running.gateway.open_session(sampling=SAMPLING, seed=1)
    session.engines.append(0)
    with receipts.rollout(SAMPLING):
        with receipts.rollout(SAMPLING):
            receipts.keep(session.tree.add([1, 2], SampledAnswer(np.array([3]), np.array([-0.5]), "stop", 1)), session)
        assert len(receipts._kept) == num_kept
    assert receipts == Receipts(age_s)


def test_tokens_without_a_receipt_are_counted_and_not_trained(
    running: Running, runner: AgentRunner, engine: FakeEngine
):
    invented, repeated = run(running, runner, task("invent"), task("repeat"))
    (rollout,) = invented.rollouts
    assert len(rollout.turns) == 1 and rollout.token_ids.tolist()[1:] == [800, 2]
    assert invented.verdict.metrics["untrained_tokens_no_receipt"] == 4
    (rollout,) = repeated.rollouts
    assert len(rollout.turns) == 2 and repeated.verdict.metrics["untrained_tokens_no_receipt"] == 3


def test_what_a_request_may_not_choose_is_overridden_and_counted(
    running: Running, runner: AgentRunner, engine: FakeEngine
):
    (ran,) = run(running, runner, task("answer", ask={"temperature": 0.1, "seed": 7, "bad_words": ["x"]}))
    assert all((asked["temperature"], "bad_words" in asked) == (0.9, False) for asked in engine.asked)
    assert len({asked["seed"] for asked in engine.asked} - {7}) == 2
    counted = {name: count for name, count in ran.verdict.metrics.items() if name.startswith("overridden")}
    assert counted == {"overridden_temperature": 2, "overridden_seed": 2, "overridden_bad_words": 2}


def test_validation_beside_training_samples_in_its_own_way(running: Running, runner: AgentRunner, engine: FakeEngine):
    other = replace(SAMPLING, temperature=0.25)
    training, validation = run(running, runner, task("answer"), task("answer", sampling=other))
    assert sorted(asked["temperature"] for asked in engine.asked) == [0.25, 0.25, 0.9, 0.9]
    assert {rollout.request.sampling.temperature for rollout in validation.rollouts} == {0.25}
    assert not [
        name
        for ran in (training, validation)
        for name in ran.verdict.metrics
        if name.startswith(("untrained", "overridden"))
    ]


@pytest.mark.parametrize(
    ("result", "status", "reason"),
    [
        ({"reward": None}, "error", "reward=None"),
        ({"reward": float("nan")}, "error", "reward=None"),
        ({"reward_components": {"a": 0.5, "b": 0.5}}, "error", "reward_components that add up to 1.0"),
        ({"reward_components": {"a": 0.5, "b": 0.25}}, "ok", ""),
        ({"instance_config": {"mask_sample": True}}, "flagged", "its agent masks it"),
        ({"response": {"output": []}}, "error", "sampled nothing"),
        ({"response": None}, "error", "without response.output"),
        # A field of a verifier's own.
        ({"reward": 0.5, "error": "the program failed"}, "ok", ""),
        # A judge that fails is no wrong answer (nemo_gym/judge.py).
        (
            {"reward": 0.0, "_ng_failure_class": "judge_failed", "_ng_failure_judge_error": "502"},
            "error",
            "no verdict: judge_failed: 502",
        ),
    ],
)
def test_what_an_answer_says(
    running: Running, runner: AgentRunner, engine: FakeEngine, result: Mapping[str, object], status: str, reason: str
):
    if result.get("reward", 0) != result.get("reward", 0):  # JSON has no NaN
        session = AgentSession("", "", SAMPLING, 0, CONTEXT)
        assert reply_of({"reward": float("nan"), "response": {"output": []}}, session, Receipts(), {})["reward"] is None
        return
    (ran,) = run(running, runner, task("answer", result=result))
    assert ran.verdict.status == status and reason in ran.verdict.reason
    assert dict(ran.verdict.components) == (result.get("reward_components", {}) if status == "ok" else {})


def test_an_agent_that_fails_is_asked_again(running: Running, runner: AgentRunner, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agents_module, "RETRY_S", 0.01)
    (ran,) = run(running, runner, task("fail"))
    assert ran.verdict.status == "crash" and "lost 4 times" in ran.verdict.reason and "boom" in ran.verdict.reason


def test_rows_wait_while_nobody_listens(
    running: Running, runner: AgentRunner, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    """More often than a rollout's attempts: the head server, then the agent's, which the head server still names."""
    monkeypatch.setattr(gym_module, "RETRY_S", 0.0)
    servers = servers_of(runner)
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    refused, addresses = list[str](), servers.addresses

    async def moving(kind: str = "") -> dict[str, str]:
        if len(refused) < 8:
            refused.append("head")
            raise AgentUnreached("head")
        found = await addresses(kind)
        refused.append("agent")
        return dict.fromkeys(found, nobody) if len(refused) < 16 else found

    monkeypatch.setattr(runner.gym, "addresses", moving)
    monkeypatch.setattr(runner.gym, "_may_have_moved", True)
    (ran,) = run(running, runner, task("answer", 7))
    assert ran.verdict.is_valid and ran.verdict.metrics["lost_attempts"] == 0 and len(refused) >= 16
    # Nobody ever comes.
    monkeypatch.setattr(runner, "_timeout_s", SOON_S)
    monkeypatch.setattr(runner.gym, "head_url", nobody)
    monkeypatch.setattr(runner.gym, "addresses", addresses)
    monkeypatch.setattr(runner.gym, "_may_have_moved", True)
    (ran,) = run(running, runner, task("answer", 8))
    assert ran.verdict.status == "timeout"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("[" * 10**5, "nested too deeply"),
        (json.dumps("[" * 10**5), "nested more than 64 deep"),
        (json.dumps("a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{f'*a{n - 1},' * 9}]}}\n" for n in range(1, 15))),
         "aliases written out"),
        (json.dumps("a: 2026-99-99"), "month must be in 1..12"),
        (json.dumps("a: {responses_api_agents: {b: {port: 99999}}}"), "Port out of range"),
        (json.dumps("a: {responses_api_agents: {b: {port: 1, host: '[::'}}}"), "Invalid IPv6 URL"),
    ],
    ids=["nested JSON", "nested YAML", "aliases", "date", "port", "host"],
)  # fmt: skip
def test_a_head_server_that_answers_nonsense_is_one_that_does_not_answer(answer: str, reason: str):
    async def ask() -> None:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer.encode())
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(talk, "127.0.0.1", 0) as head:
            servers = GymServers(f"http://127.0.0.1:{head.sockets[0].getsockname()[1]}")
            for _ in range(2):
                with pytest.raises(AgentUnreached, match=reason):
                    await servers.addresses()

    asyncio.run(ask())


def test_an_agent_that_gym_does_not_have_ends_the_run(running: Running, runner: AgentRunner):
    with pytest.raises(
        RuntimeError, match="no agent browser, which rows name in agent_ref; theirs are two_turns. .*config_paths"
    ):
        run(running, runner, task("answer", agent="browser"))


def test_the_gateway_answers_gym_alone_and_only_for_rollouts_under_way(
    running: Running, runner: AgentRunner, engine: FakeEngine
):
    url, body = f"{running.url}/gym/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}

    def asked(key: str) -> int:
        return httpx.post(url, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=HANG_S).status_code

    assert [asked(key) for key in (RUN_KEY, GYM_KEY)] == [401, 410] and engine.asked == []
    models = httpx.get(f"{running.url}/gym/v1/models", headers={"Authorization": f"Bearer {GYM_KEY}"}, timeout=HANG_S)
    assert models.json()["data"][0]["id"] == "policy"


def test_what_is_too_long_is_told_as_gym_understands_it(running: Running, engine: FakeEngine):
    body = {"messages": [{"role": "user", "content": "x" * CONTEXT}]}

    async def ask() -> httpx.Response:
        with running.gateway.receipts.rollout(SAMPLING):
            async with httpx.AsyncClient() as client:
                headers = {"Authorization": f"Bearer {GYM_KEY}"}
                return await client.post(
                    f"{running.url}/gym/v1/chat/completions", json=body, headers=headers, timeout=HANG_S
                )

    response = running.run(ask())
    # responses_api_models/vllm_model/app.py takes it for the end of the context, and for a failure of its own
    # otherwise.
    assert response.status_code == 400 and "context length" in response.text


def test_rows_keep_their_own_shorter_limit():
    row = gym_row({"responses_create_params": {"max_output_tokens": 5}}, SAMPLING, index=0, group=1)
    assert row["responses_create_params"] == {
        "max_output_tokens": 5,
        "temperature": 0.9,
        "top_p": 1.0,
    }


def test_sessions_that_begin_together_ask_different_engines(running: Running):
    engines = [FakeEngine(), FakeEngine()]
    running.use(*engines)
    for engine in engines:
        engine.released.clear()
    bodies = [{"messages": [{"role": "user", "content": str(number)}]} for number in range(4)]

    async def ask() -> None:
        with running.gateway.receipts.rollout(SAMPLING):
            async with httpx.AsyncClient() as client:
                headers = {"Authorization": f"Bearer {GYM_KEY}"}
                url = f"{running.url}/gym/v1/chat/completions"
                asking = [
                    asyncio.ensure_future(client.post(url, json=body, headers=headers, timeout=HANG_S))
                    for body in bodies
                ]
                async with asyncio.timeout(HANG_S):
                    while sum(len(engine.asked) for engine in engines) < len(bodies):
                        await asyncio.sleep(0.01)
                for engine in engines:
                    engine.released.set()
                await asyncio.gather(*asking)

    running.run(ask())
    assert [len(engine.asked) for engine in engines] == [2, 2]
    assert set(running.gateway.engines._loads.values()) == {0}


def test_rollouts_of_a_group_have_its_number(
    running: Running, runner: AgentRunner, server: GymForm, engine: FakeEngine
):
    """Number by which `genrm_compare` tells them from another group of the same text, and from an earlier asking."""
    first, other, again = task("answer"), replace(task("answer"), epoch=-1), replace(task("answer"), weight_version=4)
    server.rows.clear()
    run(running, runner, first, replace(first, rollout_index=1), other, again)
    numbers: dict[int, list[int]] = {}
    for row in server.rows:
        numbers.setdefault(row["_ng_task_index"], []).append(row["_ng_rollout_index"])
    assert sorted(map(sorted, numbers.values())) == [[0], [0], [0, 1]]
