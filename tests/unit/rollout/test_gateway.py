# SPDX-License-Identifier: Apache-2.0
"""The gateway asked by OpenAI's own client, in front of engines that answer by rule."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from mrl.rollout import agent_session, callers
from mrl.rollout.agent_session import AgentSession, NamedSessions
from tests.rollouts import request
from tests.unit.rollout.gateways import CONTEXT, RUN_KEY, SAMPLING, FakeEngine, Running
from tests.waiting import HANG_S, wait_until

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    running = Running()
    yield running
    running.stop()


@pytest.fixture
def engine(running: Running, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    monkeypatch.setattr(callers, "RETRY_S", 0.01)
    engine = FakeEngine()
    running.use(engine)
    return engine


@pytest.fixture
def session(running: Running, engine: FakeEngine) -> Iterator[AgentSession]:
    with running.session() as session:
        yield session


@pytest.fixture
def client(running: Running, session: AgentSession) -> Iterator[openai.OpenAI]:
    # An agent needs the address and the key, and nothing else.
    with openai.OpenAI(
        base_url=running.base_url(session), api_key=session.key, max_retries=0, timeout=HANG_S
    ) as client:
        yield client


def chat(client: openai.OpenAI, *said: Any, **body: Any) -> Any:
    create: Callable[..., Any] = client.chat.completions.create
    messages = [{"role": "user", "content": one} if isinstance(one, str) else one for one in said]
    return create(**{"model": "gpt-4o", "messages": messages} | body)


def answers(session: AgentSession) -> list[list[int]]:
    return [node.answer.token_ids.tolist() for node in session.tree.nodes if node.answer is not None]


def test_a_conversation_goes_on_from_the_tokens_that_were_sampled(
    client: openai.OpenAI, session: AgentSession, engine: FakeEngine
):
    first = chat(client, "hi")
    said = first.choices[0].message
    chat(client, "hi", {"role": "assistant", "content": said.content}, "and?")
    assert engine.asked[1]["prefix"][0] == [*b"hi", 2, 901, 800, 2]
    (sequence,) = session.tree.sequences(request([1]))
    assert (list(sequence.request.token_ids), sequence.token_ids.tolist()) == (
        [*b"hi", 2],
        [901, 800, 2, *b"and?", 2, 902, 800, 2],
    )
    assert sequence.generator_logprobs.tolist() == [-0.25, -0.5, -0.75, 0, 0, 0, 0, 0, -0.25, -0.5, -0.75]
    assert session.text == "answer 1.0\n\nanswer 2.0"
    (conversation,) = session.heard.shown()
    assert [(message["role"], message["content"]) for message in conversation] == [
        ("user", "hi"),
        ("assistant", "answer 1.0"),
        ("user", "and?"),
        ("assistant", "answer 2.0"),
    ]


def test_turns_bring_the_experts_of_their_tokens(client: openai.OpenAI, session: AgentSession, engine: FakeEngine):
    engine.keeps_routes = True
    first = chat(client, "hi", n=2).choices[0].message
    chat(client, "hi", {"role": "assistant", "content": first.content}, "and?")
    whole, other = session.tree.sequences(request([1]))
    assert whole.routes is not None and other.routes is not None
    assert whole.routes[:, 0].tolist() == [*([place, 1] for place in range(5)), *([place, 2] for place in range(5, 13))]
    assert other.routes[:, 0].tolist() == [[place, 1] for place in range(5)]


def test_only_the_run_cuts_an_answer_off(running: Running, engine: FakeEngine):
    """An agent that asks for few tokens gets them."""
    with running.session() as session, running.session(replace(SAMPLING, max_new_tokens=3)) as other:
        for asked, text in ((session, "hi"), (other, "hi"), (session, "x" * (CONTEXT - 4))):
            with openai.OpenAI(base_url=running.base_url(asked), api_key=asked.key, timeout=HANG_S) as client:
                chat(client, text, max_tokens=3)
        reasons = [
            [sequence.finish_reason for sequence in one.tree.sequences(request([1]))] for one in (session, other)
        ]
    assert reasons == [["length", "stop"], ["length"]]


def test_branches_rewrites_and_other_tools_are_told_apart(
    client: openai.OpenAI, session: AgentSession, engine: FakeEngine
):
    said = {"role": "assistant", "content": chat(client, "hi").choices[0].message.content}
    chat(client, "hi", said, "a")
    chat(client, "hi", said, "b")  # a branch of the first turn, although another one came since
    chat(client, "hi", {"role": "assistant", "content": "rewritten"}, "c")
    chat(client, "a sub-agent")
    chat(
        client, "hi", said, "d", {"role": "assistant", "content": "of another model"}, "e"
    )  # goes on behind the last known one
    chat(client, "hi", said, "f", tools=[TOOL])  # the template writes tools in front
    prefixes = [asked.get("prefix", ((), 0))[1] for asked in engine.asked]
    assert prefixes == [0, 2, 2, 0, 0, 2, 0]
    sequences = session.tree.sequences(request([1]))
    assert sorted(len(sequence.turns) for sequence in sequences) == [1, 1, 1, 1, 1, 2]
    trained = sorted(
        ids for s in sequences for turn in s.turns for ids in [s.token_ids[turn.start : turn.stop].tolist()]
    )
    assert trained == [[900 + number, 800, 2] for number in range(1, 8)]


def test_several_answers_are_branches_and_each_may_go_on(
    client: openai.OpenAI, session: AgentSession, engine: FakeEngine
):
    first = chat(client, "hi", n=3)
    chat(client, "hi", {"role": "assistant", "content": first.choices[1].message.content}, "and?")
    assert engine.asked[1]["prefix"][0][-3:] == [901, 801, 2]
    assert [len(messages) for messages in session.heard.shown()] == [2, 4, 2]
    assert sorted(len(sequence.turns) for sequence in session.tree.sequences(request([1]))) == [1, 1, 2]


def test_what_a_session_may_not_choose_is_overridden_and_counted(
    client: openai.OpenAI, session: AgentSession, engine: FakeEngine
):
    extra = {"top_k": 5, "min_tokens": 3, "vllm_xargs": {"a": "b"}, "priority": None, "chat_template_kwargs": {"x": 1}}
    chat(client, "hi", temperature=0.1, top_p=1.0, seed=1, logit_bias={"5": 1}, stop="x", user="me", extra_body=extra)
    chat(client, "hi", temperature=0.9, seed=1, frequency_penalty=0.0, presence_penalty=0, logit_bias={})
    (asked, again) = engine.asked
    assert session.altered == {
        "overridden_temperature": 1,
        "overridden_seed": 2,
        "overridden_logit_bias": 1,
        "overridden_top_k": 1,
        "overridden_min_tokens": 1,
        "overridden_vllm_xargs": 1,
    }
    assert (asked["temperature"], asked["top_p"], asked["top_k"], asked["stop"]) == (0.9, 1.0, 0, ["x"])
    assert asked["chat_template_kwargs"] == {"x": 1} and asked["seed"] != again["seed"] != 1
    assert not {"logit_bias", "min_tokens", "vllm_xargs", "user", "model", "priority"} & asked.keys()


def test_parts_that_the_template_drops_are_counted(client: openai.OpenAI, session: AgentSession):
    chat(client, "hi", tools=[TOOL])
    chat(client, "hi")
    chat(client, "hi", tools=[TOOL])
    assert session.altered == {"dropped_tools": 2}


def test_what_a_grammar_forced_is_not_trained(client: openai.OpenAI, session: AgentSession):
    call = chat(client, "hi", tools=[TOOL], tool_choice="required").choices[0].message
    assert call.tool_calls[0].function.name == "add"
    assert session.tree.sequences(request([1])) == [] and session.tree.num_untrained() == {"forced": 3}
    assert '"add"' in session.text


def test_streams_of_one_chunk(client: openai.OpenAI, session: AgentSession):
    chunks = list(chat(client, "hi", tools=[TOOL], stream=True, stream_options={"include_usage": True}))
    assert [len(chunk.choices) for chunk in chunks] == [1, 0]
    delta = chunks[0].choices[0].delta
    assert (delta.content, delta.tool_calls[0].index, delta.tool_calls[0].function.name) == ("answer 1.0", 0, "add")
    assert chunks[0].choices[0].finish_reason == "tool_calls" and chunks[1].usage.completion_tokens == 3
    with client.chat.completions.stream(model="any", messages=[{"role": "user", "content": "again"}]) as stream:
        assert stream.get_final_completion().choices[0].message.content == "answer 2.0"
    create: Callable[..., Any] = client.completions.create
    assert [chunk.choices[0].text for chunk in create(model="any", prompt="text", stream=True)] == ["answer 3.0"]
    assert answers(session) == [[900 + number, 800, 2] for number in (1, 2, 3)]


def test_token_ids_stand_on_the_message_and_may_come_back(
    client: openai.OpenAI, session: AgentSession, engine: FakeEngine
):
    plain = chat(client, "hi").choices[0]
    assert plain.logprobs is None and not hasattr(plain.message, "generation_token_ids")
    message = chat(client, "hi", extra_body={"return_token_ids": True}).choices[0].message
    assert message.generation_token_ids == [902, 800, 2] and message.generation_log_probs == [-0.25, -0.5, -0.75]
    assert message.prompt_token_ids == [*b"hi", 2]
    chat(client, "hi", message.model_dump(), "and?")
    assert engine.asked[-1]["prefix"][0][-3:] == [902, 800, 2]
    assert not any("generation_token_ids" in one for one in engine.asked[-1]["messages"])


def test_bodies_may_carry_the_ids_of_every_turn(running: Running):
    # 200 turns, each with all ids so far, of which the longest have 7 bytes with their comma.
    assert running.gateway.max_body > 200 * CONTEXT * 7


def test_errors_are_openais(running: Running, client: openai.OpenAI, session: AgentSession):
    with pytest.raises(openai.BadRequestError, match="context length") as caught:
        chat(client, "x" * (CONTEXT + 1))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="one prompt"):
        client.completions.create(model="any", prompt=["a", "b"])
    assert client.completions.create(model="any", prompt=["a"]).choices[0].text
    for also in (None, [], [{"role": "user", "content": "hi"}]):  # of a chat: a completion has no place for them
        with pytest.raises(openai.BadRequestError, match="one prompt"):
            client.completions.create(model="any", prompt=["a", "b"], extra_body={"messages": also})
        (chunk,) = client.completions.create(model="any", prompt="a", stream=True, extra_body={"messages": also})
        assert chunk.choices[0].text
    with pytest.raises(openai.NotFoundError) as missing:
        client.embeddings.create(model="any", input="a")
    assert isinstance(missing.value.body, dict) and missing.value.body["message"].startswith(
        "there is no embeddings here: ask by chat"
    )
    headers = {"Authorization": f"Bearer {session.key}"}
    refused = httpx.post(f"{running.base_url(session)}/chat/completions", content=b"{", headers=headers)
    assert refused.status_code == 400 and "no JSON" in refused.json()["error"]["message"]
    assert [model.id for model in client.models.list()] == ["policy"]


@pytest.mark.attack("a caller of the HTTP endpoint")
def test_keys_open_their_own_door_alone(running: Running, engine: FakeEngine, session: AgentSession):
    with running.session() as other:
        url, body = f"{running.base_url(session)}/chat/completions", {"messages": []}

        def status(key: str, url: str = url) -> int:
            return httpx.post(url, json=body, headers={"Authorization": f"Bearer {key}"}).status_code

        assert [status(key) for key in (session.key, RUN_KEY, other.key, "guessed")] == [
            200,
            200,
            401,
            401,
        ]
        assert [status(key, f"{running.url}/v1/chat/completions") for key in (RUN_KEY, session.key)] == [200, 401]
        assert status(session.key, f"{running.url}/sessions/{session.session_id}/../../v1/chat/completions") == 401
    assert status(other.key, f"{running.base_url(other)}/chat/completions") == 401
    assert status(RUN_KEY, f"{running.base_url(other)}/chat/completions") == 404


def test_another_engine_goes_on_after_a_death(
    running: Running, engine: FakeEngine, session: AgentSession, client: openai.OpenAI
):
    said = {"role": "assistant", "content": chat(client, "hi").choices[0].message.content}
    dying, other = FakeEngine(), FakeEngine()
    dying.released.clear()
    running.use(dying, other)
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(chat, client, "hi", said, "and?")
        wait_until(lambda: len(dying.asked) == 1, what="the session's engine takes the request")
        dying.is_dead = True
        future.result(HANG_S)
    assert session.engines == [0, 1]
    (sequence,) = session.tree.sequences(request([1]))
    assert sequence.token_ids.tolist() == [901, 800, 2, *b"and?", 2, 901, 800, 2] and len(sequence.turns) == 2


def test_requests_wait_while_there_is_no_engine(
    running: Running, engine: FakeEngine, client: openai.OpenAI, caplog: pytest.LogCaptureFixture
):
    running.use(FakeEngine(is_dead=True))
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(chat, client, "hi")
        wait_until(lambda: "Requests to engine 0 are asked again" in caplog.text, what="a request finds no engine")
        running.use(engine)
        assert future.result(HANG_S).choices[0].message.content == "answer 1.0"


def test_an_engine_that_moves_is_not_waited_for(running: Running, engine: FakeEngine, client: openai.OpenAI):
    engine.released.clear()
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(chat, client, "hi")
        wait_until(lambda: len(engine.asked) == 1, what="the request is under way")
        running.use(other := FakeEngine())
        assert future.result(HANG_S).choices[0].message.content == "answer 1.0" and len(other.asked) == 1
        engine.released.set()


def test_sessions_are_spread_and_stay(running: Running, engine: FakeEngine):
    other = FakeEngine()
    running.use(engine, other)
    with running.session() as one, running.session() as two:
        for session in (one, two, one, two, two):
            with openai.OpenAI(base_url=running.base_url(session), api_key=session.key, max_retries=0) as client:
                chat(client, "hi")
        assert [one.engines, two.engines] == [[0], [1]]
    assert [len(engine.asked), len(other.asked)] == [2, 3]


def test_requests_without_a_session_go_to_the_engine_with_fewest_questions(running: Running, engine: FakeEngine):
    running.use(*(engines := [engine, FakeEngine(), FakeEngine()]))
    for one in engines:
        one.released.clear()
    body = {"messages": [{"role": "user", "content": "hi"}]}
    with (
        ThreadPoolExecutor(6) as threads,
        httpx.Client(base_url=running.url, headers={"Authorization": f"Bearer {RUN_KEY}"}, timeout=HANG_S) as plain,
    ):
        waiting = [threads.submit(plain.post, "/v1/chat/completions", json=body) for _ in range(6)]
        wait_until(lambda: sum(len(one.asked) for one in engines) == 6, what="all questions are under way")
        for one in engines:
            one.released.set()
        assert all(one.result(HANG_S).is_success for one in waiting)
    assert [len(one.asked) for one in engines] == [2, 2, 2]


def test_who_hangs_up_or_is_over_leaves_nothing(running: Running, engine: FakeEngine):
    engine.released.clear()
    with ThreadPoolExecutor(1) as thread:
        with running.session() as session:
            client = openai.OpenAI(
                base_url=running.base_url(session), api_key=session.key, max_retries=0, timeout=HANG_S
            )
            future = thread.submit(chat, client, "hi")
            wait_until(lambda: len(engine.asked) == 1, what="the engine is asked")
        # The session has ended while its agent still waits.
        with pytest.raises(openai.APIStatusError, match="is over"):
            future.result(HANG_S)
    engine.released.set()
    assert session.tree.nodes == []


def test_a_client_that_wants_one_engine_names_its_index(running: Running, engine: FakeEngine):
    running.use(engine, other := FakeEngine(weight_version=4))
    headers = {"Authorization": f"Bearer {RUN_KEY}"}
    body = {"messages": [{"role": "user", "content": "hi"}]}
    with httpx.Client(base_url=running.url, headers=headers, timeout=HANG_S) as plain:
        for index in (1, 0, 1):
            assert plain.post(f"/engines/{index}/v1/chat/completions", json=body).json()["weight_version"] == 3 + index
        assert [len(engine.asked), len(other.asked)] == [1, 2]
        del plain.headers["Authorization"]
        assert plain.get("/engines/1/health").json() == {"status": "sampling", "weight_version": 4}
        assert plain.get("/engines/2/health").status_code == 404
        assert plain.post("/engines/1/v1/chat/completions", json=body).status_code == 401
        assert plain.get("/engines/1/v1/health").status_code == 401
        other.is_dead = True
        assert plain.get("/engines/1/health").status_code == 503


def test_a_session_that_a_client_names_goes_on_and_is_told(running: Running, engine: FakeEngine):
    with httpx.Client(base_url=f"{running.url}/v1", headers={"Authorization": f"Bearer {RUN_KEY}"}) as plain:

        def said(*messages: str, **body: object) -> httpx.Response:
            roles = ["user", "assistant"] * 2
            told = [{"role": role, "content": text} for role, text in zip(roles, messages, strict=False)]
            return plain.post("/chat/completions", json={"messages": told, **body}, timeout=HANG_S)

        first = said("hi", session_id="s").json()["choices"][0]["message"]["content"]
        said("hi", first, "and?", session_id="s", max_tokens=3)
        said("hi", "rewritten", "and?", session_id="s")
        assert [asked.get("prefix", ((), 0))[1] for asked in engine.asked] == [0, 2, 0]
        assert not any("session_id" in asked for asked in engine.asked)
        turns = plain.get("/sessions/s").json()["turns"]
        assert [turn["is_continuation"] for turn in turns] == [False, True, False]
        assert [turn["finish_reason"] for turn in turns] == ["stop", "length", "stop"]
        assert turns[1] | {"untrained": ""} == {
            "prompt_token_ids": [*b"hi", 2, 901, 800, 2, *b"and?", 2],
            "token_ids": [902, 800, 2],
            "logprobs": [-0.25, -0.5, -0.75],
            "finish_reason": "length",
            "weight_version": 3,
            "num_weight_versions": 1,
            "is_continuation": True,
            "untrained": "",
        }
        assert said("hi", session_id="s" * 257).status_code == 400
        assert plain.post("/completions", json={"session_id": "s", "prompt": ["a", "b"]}).status_code == 400
        assert plain.delete("/sessions/s").json()["deleted"] and plain.get("/sessions/s").status_code == 404


def test_the_named_session_that_was_used_longest_ago_makes_room(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agent_session, "MAX_NAMED", 2)
    sessions = NamedSessions(lambda name: AgentSession(name, "", SAMPLING, 0, CONTEXT, is_named=True))
    for name in ("a", "b", "a", "c"):
        sessions.keep(sessions.opened(name))
    assert [sessions.get(name) is not None for name in "abc"] == [True, False, True]


@pytest.mark.parametrize("place", ["session", "gym", "run"])
def test_fields_of_a_wrong_type_are_named_before_they_are_read(running: Running, session: AgentSession, place: str):
    url, key = {
        "session": (running.base_url(session), session.key),
        "gym": (f"{running.url}/gym/v1", RUN_KEY),
        "run": (f"{running.url}/v1", RUN_KEY),
    }[place]
    good = {"messages": [{"role": "user", "content": "hi"}]}
    wrong: dict[str, list[object]] = {
        "messages": ["x", 1, ["x"], {"a": 1}, [good["messages"]], [None]],
        "stop": [1, {"a": 1}, [1], [["x"]]],
        "stream": ["x", [], {}],
        "stream_options": ["x", 1, ["include_usage"]],
        "logprobs": ["x", -1, [True]],
        "user": ["half \ud800", ["\ud800"], {"\ud800": 1}],
    }
    with httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=HANG_S) as plain:
        for name, values in wrong.items():
            for value in values:
                answer = plain.post(f"{url}/chat/completions", content=json.dumps(good | {name: value}))
                assert (answer.status_code, name in answer.json()["error"]["message"]) == (400, True), (
                    name,
                    value,
                    answer.text,
                )
