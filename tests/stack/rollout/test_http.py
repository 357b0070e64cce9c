# SPDX-License-Identifier: Apache-2.0
"""The gateway in front of a real engine, asked for it by OpenAI's client; this thread steps the engine."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import openai
import pytest

from mrl.config.load import load_config
from mrl.rollout.agent_session import OWN, PASSED, AgentSession
from mrl.types import Rollout, hashed_seed
from tests.rollouts import StartEngine, differences, random_requests, request, run
from tests.stack.loop.conftest import write_inputs
from tests.stack.rollout.served import engine_url, gateway_of
from tests.stack.rollout.tool_tokenizer import save_tool_tokenizer
from tests.unit.rollout.gateways import RUN_KEY, SAMPLING, Running
from tests.waiting import HANG_S, SOON_S

if TYPE_CHECKING:
    from mrl.rollout.engine import Engine

KEY = RUN_KEY
TIMEOUT_S = HANG_S
Answer = TypeVar("Answer")
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose byte tokenizer knows the marks of tool calls."""
    folder = tmp_path_factory.mktemp("http")
    overrides = write_inputs(folder, num_rows=4)
    (folder / "overrides.json").write_text(json.dumps(overrides))
    save_tool_tokenizer(folder / "model")
    return folder


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine, folder: Path) -> Engine:
    engine = start_engine(folder / "model", tokenizer=folder / "model")
    engine.set_weight_version(0)
    return engine


@pytest.fixture(scope="module")
def running(engine: Engine, folder: Path) -> Running:
    vllm_cfg = "policy.generation.vllm_cfg"
    chat = f"{vllm_cfg}.http_server_serving_chat_kwargs"
    words = [f"{vllm_cfg}.max_num_seqs=128", f"{chat}.enable_auto_tools=true", f"{chat}.tool_parser=qwen3_coder"]
    config = load_config("grpo_tiny.yaml", [*json.loads((folder / "overrides.json").read_text()), *words])
    return gateway_of(engine, config.policy)


@pytest.fixture(scope="module")
def base_url(running: Running) -> str:
    return engine_url(running)


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key=KEY, max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


def served(engine: Engine, *calls: Callable[[], Answer], beside: dict[str, Rollout] | None = None) -> list[Answer]:
    """Answers to the calls, all made at once, while the engine is stepped; other rollouts are put into `beside`."""
    with ThreadPoolExecutor(len(calls)) as threads:
        futures = [threads.submit(call) for call in calls]
        while not all(future.done() for future in futures):
            if engine.callers.are_waiting or engine.num_unfinished:
                rollouts = {rollout.request.request_id: rollout for rollout in engine.step()}
                if beside is not None:
                    beside.update(rollouts)
        return [future.result() for future in futures]


def completion(client: openai.OpenAI, prompt: list[int], **sampling: object) -> Any:
    """A completion of token ids that stops at none of them."""
    create: Callable[..., Any] = client.completions.create
    extra = {"return_token_ids": True, "ignore_eos": True, "stop_token_ids": []}
    return create(model="", prompt=prompt, logprobs=1, extra_body=extra, **sampling)


def chat(client: openai.OpenAI, said: list, **body: object) -> Any:
    """An answer to messages."""
    create: Callable[..., Any] = client.chat.completions.create
    return create(**{"model": "", "messages": said} | body)


def test_a_completion_is_the_rollout_of_its_seed(engine: Engine, client: openai.OpenAI):
    asked = request(range(30, 50))
    rollout = run(engine, [asked])[asked.request_id]
    (answer,) = served(engine, lambda: completion(client, list(asked.token_ids), seed=asked.seed, max_tokens=16))
    (choice,) = answer.choices
    assert choice.token_ids == rollout.token_ids.tolist()
    assert choice.logprobs.token_logprobs == rollout.generator_logprobs.tolist()
    assert (choice.finish_reason, answer.weight_version, answer.num_weight_versions) == ("length", 0, 1)


def test_others_change_nothing(engine: Engine, client: openai.OpenAI):
    """Rollouts and answers have the bits that they have alone, whoever else is sampled, and however."""
    asked = random_requests(6)
    alone = run(engine, asked)
    calls = [
        lambda i=i: completion(client, [40 + i] * 9, seed=i, max_tokens=12, top_p=0.5 + 0.1 * i, temperature=0.7)
        for i in range(4)
    ]
    one_by_one = [served(engine, call)[0] for call in calls]
    engine.add(asked)
    beside: dict[str, Rollout] = {}
    together = served(engine, *calls, beside=beside)
    beside |= run(engine, [])
    assert differences(alone, beside) == []
    assert [answer.choices[0].model_dump() for answer in together] == [
        answer.choices[0].model_dump() for answer in one_by_one
    ]


def test_a_call_of_a_tool_is_parsed(engine: Engine, client: openai.OpenAI):
    parameters = "<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n</parameter>"
    said = f"<tool_call>\n<function=add>\n{parameters}\n</function>\n</tool_call>"
    messages = [{"role": "user", "content": "2+3"}]
    (answer,) = served(
        engine,
        lambda: chat(
            client,
            messages,
            tools=[TOOL],
            extra_body={"structured_outputs": {"choice": [said]}},
            max_completion_tokens=200,
        ),
    )
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": "3"})


def test_strict_tools_force_no_token(engine: Engine, running: Running):
    """All rows of NeMo Gym have strict tools: what a grammar forced could not be trained on."""
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    with running.session() as session, agent(running, session) as client:
        body = {"tools": [strict], "parallel_tool_calls": False, "max_completion_tokens": 4}
        served(engine, lambda: chat(client, [{"role": "user", "content": "2+3"}], **body))
        assert [node.untrained for node in session.tree.nodes] == [""]
        assert session.altered == {"dropped_tools": 1}, "the tiny model's template writes none"


def agent(running: Running, session: AgentSession) -> openai.OpenAI:
    return openai.OpenAI(base_url=running.base_url(session), api_key=session.key, max_retries=0, timeout=TIMEOUT_S)


def test_conversations_may_have_a_template_of_their_own(engine: Engine, folder: Path):
    policy = load_config("grpo_tiny.yaml", json.loads((folder / "overrides.json").read_text())).policy
    served_chat = policy.generation.vllm_cfg.http_server_serving_chat_kwargs
    served_chat.chat_template = (
        "{% for message in messages %}{{ message.content }}{{ mark }}{% endfor %}{{ strftime_now('%Y') }}"
    )
    policy.tokenizer.template_date = "2024-02-29"
    served_chat.default_chat_template_kwargs = {"mark": "!"}
    url = engine_url(gateway_of(engine, policy)).removesuffix("/v1") + "/tokenize"
    asked = {"messages": [{"role": "user", "content": "hi"}]}
    for values, expected in (({}, b"hi!2024"), ({"chat_template_kwargs": {"mark": "?"}}, b"hi?2024")):
        answer = httpx.post(url, json=asked | values, headers={"Authorization": f"Bearer {KEY}"})
        assert answer.json()["tokens"] == list(expected)


def test_a_session_goes_on_from_the_tokens_that_were_sampled(engine: Engine, client: openai.OpenAI, base_url: str):
    session = {"extra_headers": {"X-Session-ID": "s1"}, "extra_body": {"return_token_ids": True}}
    messages: list = [{"role": "user", "content": "hello"}]
    (first,) = served(engine, lambda: chat(client, messages, max_completion_tokens=8, seed=1, **session))
    # The bytes of a random model are hardly UTF-8: their text would be other tokens.
    messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and?"}]
    (second,) = served(engine, lambda: chat(client, messages, max_completion_tokens=8, seed=2, **session))
    sampled = [*first.prompt_token_ids, *first.choices[0].token_ids]
    user, assistant, end = 260, 261, 258
    assert second.prompt_token_ids == [*sampled, end, user, *b"and?", assistant]
    with httpx.Client(base_url=base_url, headers={"Authorization": f"Bearer {KEY}"}) as plain:
        turns = plain.get("/sessions/s1").json()["turns"]
        tokens = plain.post(
            base_url.removesuffix("/v1") + "/tokenize",
            json={"messages": messages, "required_prefix_token_ids": sampled},
        ).json()["tokens"]
        assert plain.delete("/sessions/s1").json()["deleted"] and plain.get("/sessions/s1").status_code == 404
    assert tokens == second.prompt_token_ids
    assert [turn["token_ids"] for turn in turns] == [first.choices[0].token_ids, second.choices[0].token_ids]
    assert [turn["is_continuation"] for turn in turns] == [False, True]
    # What the trainer would be told is what sampling alone gives.
    asked = dataclasses.replace(request(second.prompt_token_ids, max_new_tokens=8, stop_token_ids=(end,)), seed=2)
    alone = run(engine, [asked])[asked.request_id]
    assert turns[1]["logprobs"] == alone.generator_logprobs.tolist()


def test_a_session_keeps_tokens_and_what_a_grammar_chose(engine: Engine, running: Running):
    messages, ids = [{"role": "user", "content": "hello"}], {"return_token_ids": True}
    as_asked = dataclasses.replace(SAMPLING, temperature=1.0)
    with running.session(as_asked) as session, agent(running, session) as client:
        (free,) = served(engine, lambda: chat(client, messages, n=2, max_completion_tokens=8, extra_body=ids))
        forced = ids | {"structured_outputs": {"choice": ["yes", "no"]}}
        (chosen,) = served(engine, lambda: chat(client, messages, max_completion_tokens=8, extra_body=forced))
        (single,) = served(engine, lambda: chat(client, messages, max_completion_tokens=8, extra_body=ids))
        nodes = session.tree.nodes
    assert [node.untrained for node in nodes] == ["", "", "forced", ""]
    told = [[*answer.prompt_token_ids, *one.token_ids] for answer in (free, chosen, single) for one in answer.choices]
    assert [node.token_ids.tolist() for node in nodes] == told
    sampled = request(single.prompt_token_ids, max_new_tokens=8, stop_token_ids=(2,))
    alone = run(engine, [dataclasses.replace(sampled, seed=hashed_seed("7/2"))])[sampled.request_id]
    assert nodes[-1].answer is not None
    assert nodes[-1].answer.token_ids.tolist() == alone.token_ids.tolist()
    assert nodes[-1].answer.logprobs.tolist() == alone.generator_logprobs.tolist()


def test_known_tokens_may_end_before_the_last_answer(engine: Engine, running: Running):
    """An answer that another model gave is tokenised behind those that are known."""
    messages: list = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "a"},
    ]
    messages += [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    gateway, body = running.gateway, {"messages": messages, "max_completion_tokens": 2}
    (reply,) = served(
        engine,
        lambda: running.run(gateway.handlers.answer(body, gateway.engines.ask, is_chat=True, prefix=([5, 6, 7], 2))),
    )
    user, assistant, end = 260, 261, 258
    assert reply.prompt_ids == [5, 6, 7, end, user, *b"a", assistant, *b"b", end, user, *b"c", assistant]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"stream": True}, openai.BadRequestError, "not streamed"),
        ({"model": "other"}, openai.NotFoundError, "does not exist"),
        (
            {"temperature": 0.5, "extra_headers": {"X-Session-ID": "s2"}},
            openai.BadRequestError,
            "temperature=0.5: sessions are drawn",
        ),
        ({"n": 2, "extra_body": {"session_id": "s2"}}, openai.BadRequestError, "n=2: sessions"),
        ({"top_p": 7.0}, openai.BadRequestError, "top_p"),
        ({"extra_body": {"required_prefix_token_ids": ["a"]}}, openai.BadRequestError, "list of token ids"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, openai.BadRequestError, "context length"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    engine: Engine, client: openai.OpenAI, changes: dict, error: type[Exception], words: str
):
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(error, match=words):
        served(engine, lambda: chat(client, messages, **{"max_completion_tokens": 4} | changes))


@pytest.mark.attack("a caller of the HTTP endpoint")
@pytest.mark.parametrize(
    "asked",
    [
        {"structured_outputs": ["a"]},
        {"structured_outputs": "a"},
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "[[["}},
        {"structured_outputs": {"json": {"type": "nonsense"}}},
        {"structured_outputs": {"choice": ["a"], "regex": "b"}},
        {"structured_outputs": {"choice": ["a"], "grammar": "b"}},
        {"structured_outputs": {"grammar": "root ::= root"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "[[["}}},
        {"messages": [{"role": "user", "content": "half \ud800"}]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}],
                }
            ]
        },
        {"bad_words": ["\ud800"]},
        {"n": 10**9},
        {"kv_transfer_params": {"prompt_token_ids": [10**9]}},
    ],
    ids=lambda asked: json.dumps(asked)[:50],
)
def test_a_request_that_nobody_can_answer_is_refused_and_ends_nothing(engine: Engine, base_url: str, asked: dict):
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3} | asked)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    (answer,) = served(
        engine, lambda: httpx.post(f"{base_url}/chat/completions", content=body, headers=headers, timeout=TIMEOUT_S)
    )
    assert answer.status_code == 400, answer.text
    assert not engine.callers.are_waiting


@pytest.mark.attack("a caller of the HTTP endpoint")
def test_every_field_of_a_wrong_type_is_named(engine: Engine, running: Running, base_url: str):
    """Each field of each request with values of many types. vLLM's own model says which of them are wrong."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest

    said, given = {"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "a", "max_tokens": 1}
    kinds = [
        (f"{base_url}/chat/completions", ChatCompletionRequest, said | {"max_completion_tokens": 1}),
        (f"{base_url}/completions", CompletionRequest, given),
        (f"{base_url}/tokenize", TokenizeChatRequest, said),
        (f"{base_url}/tokenize", TokenizeCompletionRequest, {"prompt": "a"}),
    ]
    own = ("session_id", "required_prefix_token_ids")
    parts = ("role", "content", "tool_calls", "name", "tool_call_id", "prompt_token_ids")
    bodies = [
        (url, kind, name, base | {name: value})
        for url, kind, base in kinds
        for name in (*kind.model_fields, *own)
        for value in ("x", 1.5, ["x"], {"a": 1}, "half \ud800", None, [None], 10**30, math.nan)
    ]
    bodies += [(url, kind, name, {}) for (url, kind, _), name in zip(kinds, ("messages", "prompt"), strict=False)]
    bodies += [
        (kinds[0][0], ChatCompletionRequest, "messages", {"messages": [{"role": role, "content": "a", part: value}]})
        for role in ("user", "assistant", "tool", "system")
        for part in parts
        for value in (1.5, ["x"], [{}], {"a": 1})
    ]
    with running.session() as session, running.gateway.receipts.rollout(SAMPLING), httpx.Client() as plain:
        # Agents' doors, which read a request before vLLM does: with what is of the other kind of request, too.
        in_sessions = [
            (f"{door}/{path}", None, name, said | given | {name: value})
            for door in (running.base_url(session), f"{running.url}/gym/v1")
            for path in ("chat/completions", "completions")
            for name in (*PASSED, *OWN, *own)
            for value in (None, "x", [None], 10**30)
        ]

        def ask(url: str, body: dict) -> httpx.Response:
            headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
            return plain.post(url, content=json.dumps(body), headers=headers, timeout=TIMEOUT_S)

        asked = [*bodies, *in_sessions]
        answers = [
            answer
            for start in range(0, len(asked), 16)
            for answer in served(engine, *(lambda one=one: ask(one[0], one[3]) for one in asked[start : start + 16]))
        ]
    num_wrong = 0
    for (_, kind, name, body), answer in zip(asked, answers, strict=True):
        said_back = (name, body.get(name), answer.text)
        assert answer.status_code in (200, 400) or name == "model", said_back
        if kind is None:
            continue
        try:
            kind.model_validate(copy.deepcopy(body))
        except Exception:  # vLLM's validators raise errors of many classes; any is a refusal
            num_wrong += 1
            assert answer.status_code == 400, said_back
        if answer.status_code == 400:
            # A list of ids, or of a message's, is asked for by both names.
            assert name in answer.json()["error"]["message"] or name in own, said_back
    assert num_wrong > 800


@pytest.mark.attack("a caller of the HTTP endpoint")
def test_callers_leave_training_its_slots(engine: Engine, client: openai.OpenAI):
    """However much callers ask for, rollouts are sampled beside at most their share of it."""
    calls = [lambda i=i: completion(client, [40 + i % 9] * 9, n=4, seed=i, max_tokens=60) for i in range(12)]
    with ThreadPoolExecutor(len(calls)) as threads:
        futures = [threads.submit(call) for call in calls]
        while not engine.callers.are_waiting:
            pass
        asked = random_requests(6)
        engine.add(asked)
        most = 0
        while engine.num_unfinished:
            engine.step()
            most = max(most, engine.callers.num_inside)
        assert 0 < most <= 8 and not all(future.done() for future in futures)
        while not all(future.done() for future in futures):
            if engine.callers.are_waiting:
                engine.step()
        assert all(len(future.result().choices) == 4 for future in futures)


def test_several_answers_and_models(engine: Engine, client: openai.OpenAI, folder: Path):
    assert [model.id for model in client.models.list()] == [str(folder / "model")]
    (answer,) = served(
        engine, lambda: chat(client, [{"role": "user", "content": "hello"}], n=3, seed=5, max_completion_tokens=6)
    )
    assert len({choice.message.content for choice in answer.choices}) == 3


def test_whoever_hangs_up_is_forgotten(engine: Engine, client: openai.OpenAI):
    with ThreadPoolExecutor(1) as thread:
        hasty = client.with_options(timeout=SOON_S)
        future = thread.submit(completion, hasty, [40] * 9, max_tokens=100)
        while not engine.callers.are_waiting:
            pass
        engine.step()
        with pytest.raises(openai.APITimeoutError):
            future.result()
    for _ in range(99):
        if not engine.callers.are_waiting:
            break
        engine.step()
    assert not engine.callers.are_waiting and not engine.llm.has_unfinished_requests()


def test_who_hangs_up_in_a_conversation_is_not_asked_for_again(engine: Engine, running: Running):
    """vLLM makes an error of a cancelled request; a conversation would be sampled again as text."""
    said: list = [{"role": "user", "content": "hello"}]
    with running.session() as session, agent(running, session) as client:
        (first,) = served(engine, lambda: chat(client, said, max_completion_tokens=4))
        said += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and?"}]
        with ThreadPoolExecutor(1) as thread:
            hasty = client.with_options(timeout=SOON_S)
            future = thread.submit(chat, hasty, said, max_completion_tokens=100)
            while not engine.callers.are_waiting:
                pass
            with pytest.raises(openai.APITimeoutError):
                future.result()
        while engine.callers.are_waiting:
            engine.step()
        # Whatever the gateway had begun for that request is over when it answers another one.
        served(engine, lambda: chat(client, said, max_completion_tokens=4))
        assert len(session.tree.nodes) == 2 and session.num_asked == 3


def test_requests_wait_for_the_next_weights(engine: Engine, client: openai.OpenAI):
    engine.enter("load")  # as before a refit, and as while memory is lent: from here on the engine must not sample
    assert not engine.can_sample
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(completion, client, [40] * 9, max_tokens=4)
        while not engine.callers.are_waiting:
            pass
        engine.enter("refit")
        engine.set_weight_version(1)
        engine.enter("generate")
        while not future.done():
            if engine.callers.are_waiting:
                engine.step()
        assert future.result().weight_version == 1
