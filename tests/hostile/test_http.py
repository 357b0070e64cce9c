# SPDX-License-Identifier: Apache-2.0
"""Attacks of HTTP endpoint clients, over real sockets to the gate of engines; the app behind it says what it read."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from mrl.rollout import http_gate
from mrl.rollout.agent_session import AgentSession, NamedSessions, SampledReply
from mrl.rollout.callers import Callers, Question
from mrl.rollout.http_gate import MAX_ANSWERS, Limits, find_excess, find_refusal
from mrl.rollout.turn_tree import SampledAnswer
from mrl.types import SamplingParams
from tests.waiting import HANG_S, SOON_S, wait_until

pytestmark = pytest.mark.attack("a caller of the HTTP endpoint")

KEY = "the-key-of-this-run"
MAX_BODY = 100_000
AUTHORIZED = f"Authorization: Bearer {KEY}\r\n"


async def count(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the length of the body."""
    message = await receive()
    await JSONResponse({"read": len(message["body"])})(scope, receive, send)


@pytest.fixture(scope="module")
def server() -> tuple[str, int]:
    """Address where the gate listens."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    http_gate.start(count, listener, api_key=KEY, max_body=MAX_BODY)
    return listener.getsockname()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that nobody misses; a test that waits for one shortens it once what is honest has gone through."""
    monkeypatch.setattr(http_gate, "HEADER_S", HANG_S)
    monkeypatch.setattr(http_gate, "BODY_S", HANG_S)


@pytest.fixture
def client(server: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(server, timeout=HANG_S) as client:
        yield client


def head(*lines: str, method: str = "POST", path: str = "/v1/completions") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: engine\r\n{''.join(lines)}\r\n".encode()


def received(client: socket.socket) -> bytes:
    """All that the server says until it closes the connection; fails when it leaves it open."""
    said = b""
    with suppress(ConnectionResetError):
        while part := client.recv(65536):
            said += part
    return said


def trickle_until_closed(client: socket.socket, trickle: bytes) -> None:
    """Sends bytes, one after the other, until the server has closed the connection."""

    def is_closed() -> bool:
        try:
            client.sendall(trickle)
        except ConnectionError:
            return True
        return False

    wait_until(is_closed, "end of the connection")


def status(said: bytes) -> int:
    return int(said.split()[1])


def answer(client: socket.socket) -> tuple[int, object]:
    """Status and JSON of the next answer, of a connection that stays open."""
    said = b""
    while b"\r\n\r\n" not in said:
        said += client.recv(65536)
    headers, _, body = said.partition(b"\r\n\r\n")
    (length,) = (
        int(line.split(b":")[1]) for line in headers.lower().splitlines() if line.startswith(b"content-length")
    )
    while len(body) < length:
        body += client.recv(65536)
    return status(said), json.loads(body)


def is_served(server: tuple[str, int]) -> bool:
    headers = {"Authorization": f"Bearer {KEY}"}
    done = httpx.post(
        f"http://{server[0]}:{server[1]}/v1/completions", content=b"x" * MAX_BODY, headers=headers, timeout=HANG_S
    )
    return (done.status_code, done.json()) == (200, {"read": MAX_BODY})


@pytest.mark.parametrize(
    "key",
    ["", "Authorization: Bearer\r\n", "Authorization: Bearer \r\n", f"Authorization: Bearer {KEY[:-1]}\r\n",
     f"Authorization: Bearer {KEY}x\r\n",
     f"Authorization: Basic {KEY}\r\n", f"Authorization: {KEY}\r\n",
     f"X-Authorization: Bearer {KEY}\r\n", f"Authorization: Bearer {KEY.upper()}\r\n",
     "Authorization: Bearer \xff\r\n", f"Cookie: api_key={KEY}\r\n"],
)  # fmt: skip
@pytest.mark.parametrize(
    "body", ["Content-Length: 536870912\r\n", "Transfer-Encoding: chunked\r\n"], ids=["long", "chunked"]
)
def test_without_the_key_no_body_is_waited_for(client: socket.socket, key: str, body: str):
    client.sendall(head(key, body))
    said = received(client)
    assert status(said) == 401 and b"API key is missing or wrong" in said


def test_a_body_without_the_key_is_not_kept(client: socket.socket):
    """The server closes the connection while the client still sends."""
    client.sendall(head("Content-Length: 536870912\r\n"))
    sent = 0
    with pytest.raises((ConnectionError, TimeoutError)):
        while sent < 536870912:
            sent += client.send(b"[" * 65536)
    assert sent < 64 * 2**20  # what both ends of a socket buffer


@pytest.mark.parametrize("length", [MAX_BODY + 1, 10**9, 10**18])
def test_a_body_that_is_too_long_is_refused_by_its_headers(client: socket.socket, length: int):
    client.sendall(head(AUTHORIZED, f"Content-Length: {length}\r\n"))
    assert status(received(client)) == 413


def test_a_body_in_chunks_is_counted_while_it_is_read(client: socket.socket):
    client.sendall(head(AUTHORIZED, "Transfer-Encoding: chunked\r\n"))
    with suppress(ConnectionError):
        for _ in range(MAX_BODY // 1000 + 1):
            client.sendall(b"3e8\r\n" + b"x" * 1000 + b"\r\n")
    assert status(received(client)) == 413


@pytest.mark.parametrize("body", ["Content-Length: 10\r\n", "Transfer-Encoding: chunked\r\n"])
def test_the_path_without_a_key_takes_no_body(client: socket.socket, body: str):
    client.sendall(head(body, path="/health"))
    assert status(received(client)) == 413


@pytest.mark.parametrize(
    "path", ["/health/", "//health", "/health/../v1/models", "/HEALTH", "/v1/models", "/docs", "/openapi.json"]
)
def test_other_paths_need_the_key(client: socket.socket, path: str):
    client.sendall(head(path=path, method="GET"))
    assert status(received(client)) == 401


@pytest.mark.parametrize(
    "lines",
    ["Content-Length: -1\r\n", "Content-Length: 1e3\r\n", "Content-Length: 1\r\nContent-Length: 2\r\n",
     "A" * 2_000_000 + ": b\r\n",
     "Content-Length: 1" + "0" * 30 + "\r\n", "A: b\r\n" * 200_000],
    ids=["negative", "no number", "two", "long header", "astronomic", "many headers"],
)  # fmt: skip
def test_headers_that_are_none_are_refused(client: socket.socket, lines: str):
    with suppress(ConnectionError):
        client.sendall(head(AUTHORIZED, lines))
    said = received(client)
    assert said == b"" or status(said) == 400  # who still sends may not hear the answer


def test_a_web_socket_is_a_request_like_others(client: socket.socket):
    client.sendall(head("Upgrade: websocket\r\nConnection: Upgrade\r\n", method="GET"))
    assert status(received(client)) == 401


def test_the_key_counts_for_its_own_request_alone(client: socket.socket):
    client.sendall(head(AUTHORIZED, "Content-Length: 3\r\n") + b"abc" + head("Content-Length: 3\r\n") + b"abc")
    said = received(client)
    assert status(said) == 200 and b'{"read":3}HTTP/1.1 401' in said


@pytest.mark.parametrize("is_known", [False, True], ids=["stranger", "after a request"])
@pytest.mark.parametrize("trickle", [b"", b"A"], ids=["silent", "byte by byte"])
def test_headers_have_a_deadline(
    server: tuple[str, int], monkeypatch: pytest.MonkeyPatch, is_known: bool, trickle: bytes
):
    with ExitStack() as stack:
        if not is_known:
            monkeypatch.setattr(http_gate, "HEADER_S", SOON_S)
        client = stack.enter_context(socket.create_connection(server, timeout=HANG_S))
        if is_known:
            client.sendall(head(AUTHORIZED, "Content-Length: 3\r\n") + b"abc")
            assert answer(client) == (200, {"read": 3})
            monkeypatch.setattr(http_gate, "HEADER_S", SOON_S)
        with suppress(ConnectionError):  # a slow client comes too late even for these
            client.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        if trickle:
            trickle_until_closed(client, trickle)
        assert received(client) == b""


@pytest.mark.parametrize("trickle", [b"", b"A"], ids=["silent", "byte by byte"])
def test_bodies_have_a_deadline(client: socket.socket, monkeypatch: pytest.MonkeyPatch, trickle: bytes):
    monkeypatch.setattr(http_gate, "BODY_S", SOON_S)
    client.sendall(head(AUTHORIZED, f"Content-Length: {MAX_BODY}\r\n"))
    if trickle:
        trickle_until_closed(client, trickle)
    assert status(received(client)) == 408


def test_a_connection_may_rest_between_two_requests(client: socket.socket, monkeypatch: pytest.MonkeyPatch):
    client.sendall(head(AUTHORIZED, "Content-Length: 3\r\n", "Expect: 100-continue\r\n"))
    assert client.recv(65536).startswith(b"HTTP/1.1 100 ")  # the headers have come in time
    monkeypatch.setattr(http_gate, "HEADER_S", SOON_S)
    client.sendall(b"abc")
    assert answer(client) == (200, {"read": 3})
    time.sleep(2 * SOON_S)  # as between the turns of an agent
    monkeypatch.setattr(http_gate, "HEADER_S", HANG_S)
    client.sendall(head(AUTHORIZED, "Content-Length: 4\r\n") + b"abcd")
    assert answer(client) == (200, {"read": 4})


def test_strangers_do_not_shut_out_who_has_the_key(server: tuple[str, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_gate, "MAX_STRANGERS", 50)
    with ExitStack() as stack:
        known = stack.enter_context(socket.create_connection(server, timeout=HANG_S))
        known.sendall(head(AUTHORIZED, "Content-Length: 3\r\n") + b"abc")
        assert answer(known) == (200, {"read": 3})
        strangers = [stack.enter_context(socket.create_connection(server, timeout=HANG_S)) for _ in range(300)]
        assert is_served(server)
        assert all(
            received(stranger) == b"" for stranger in strangers[: 300 - http_gate.MAX_STRANGERS]
        )  # closed, the oldest first
        known.sendall(head(AUTHORIZED, "Content-Length: 4\r\n") + b"abcd")
        assert answer(known) == (200, {"read": 4})


def test_a_step_of_callers_that_come_at_once_is_served(server: tuple[str, int]):
    async def ask() -> int:
        reader, writer = await asyncio.open_connection(*server)
        writer.write(head(AUTHORIZED, "Content-Length: 3\r\n") + b"abc")
        said = await reader.read(65536)
        writer.close()
        return status(said)

    async def ask_all() -> list[int]:
        return await asyncio.gather(*(ask() for _ in range(700)))

    assert asyncio.run(ask_all()) == [200] * 700


LIMITS = Limits(max_model_len=1000, num_slots=8)


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"prompt": ["a"] * 1000, "n": 16}, "n=16"),
        ({"prompt": "a", "n": 9}, "n=9"),
        ({"messages": [{"role": "user", "content": "a"}], "n": 10**9}, "n=1000000000"),
        *(
            ({"prompt": "a", "n": n}, "n: must be a whole number")
            for n in ("4000", 4000.0, "1", 1.0, [1], {}, True, "x", 1e999)
        ),
        ({"structured_outputs": {"choice": [f"c{i}" for i in range(50_000)]}}, "50000 alternatives"),
        ({"structured_outputs": {"regex": "|".join(f"c{i}" for i in range(20_000))}}, "19999 alternatives"),
        ({"structured_outputs": {"grammar": 'root ::= "a"' + ' | "a"' * 2_000}}, "2000 alternatives"),
        ({"structured_outputs": {"json": json.dumps({"enum": list(range(2_000))})}}, "2000 alternatives"),
        ({"response_format": {"json_schema": {"schema": {"enum": list(range(20_000))}}}}, "20000 alternatives"),
        (
            {
                "tool_choice": "required",
                "tools": [{"function": {"parameters": {"properties": {"a" * 10 + str(i): {} for i in range(9_000)}}}}],
            },
            "characters; they may have",
        ),
        *(
            ({"response_format": {"json_schema": {"schema": schema}}}, "each within the others, may come to 16,384")
            for schema in (
                {"type": "array", "minItems": 10**9},
                {"type": "array", "maxItems": 1e9},
                {"type": "array", "minItems": 10**400},
                {"anyOf": [{"maxItems": 1000, "items": {"maxItems": 1000}}]},
                {"contains": {}, "minContains": 10**6},
            )
        ),
        ({"structured_outputs": {"json": '{"minItems": 1000000000}'}}, "each within the others"),
        ({"structured_outputs": {"structural_tag": '{"a": [{"schema": {"minItems": 1e9}}]}'}}, "each within"),
        ({"structured_outputs": {"structural_tag": '{"format": {"type": "repeat", "max": 1e9}}'}}, "each within"),
        ({"prompt": ["a"] * (MAX_ANSWERS + 1)}, f"{MAX_ANSWERS + 1} prompts with n=1"),
        ({"prompt": [[1]] * 200, "n": 8}, "200 prompts with n=8"),
        ({"prompt": "a" * 16_001}, "16001 characters"),
        ({"prompt": ["a" * 9_000] * 2}, "18000 characters"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 9_000}]}] * 2}, "characters"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_request_that_asks_for_too_much_is_told_the_limit(body: dict[str, object], part: str):
    assert part in find_excess(body, LIMITS)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a" * 16_000, "n": 8},
        {"prompt": ["a"] * 128, "n": 8},
        {"prompt": list(range(999)), "n": 8},
        {"prompt": "a", "n": None},
        {},
        {"structured_outputs": {"choice": ["c"] * 1024}},
        {"structured_outputs": {"json": {"maxItems": 128, "items": {"maxItems": 128, "items": {"maxLength": 10**5}}}}},
        # Numbers that are values repeat nothing.
        {"structured_outputs": {"json": {"default": {"max": 10**5}, "examples": [{"id": 10**9}], "version": 20250101}}},
        {"structured_outputs": {"structural_tag": '{"format": {"type": "token", "token": 151657}}'}},
        {
            "response_format": {
                "json_schema": {"schema": {"properties": {f"p{i}": {"type": "string"} for i in range(3000)}}}
            }
        },
    ],
    ids=range(10),
)
def test_the_largest_request_is_none_too_much(body: dict[str, object]):
    assert find_excess(body, LIMITS) == ""


def nested(depth: int) -> object:
    value: object = "a"
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("field", ["messages", "structured_outputs", "tools"])
def test_deep_requests_are_measured_too(field: str):
    assert find_excess({field: nested(100_000)}, LIMITS) == "" or field != "messages"


def test_tools_of_which_no_grammar_is_made_may_be_many():
    tools = [
        {"function": {"name": f"f{i}", "description": "a|b " * 100, "parameters": {"enum": list(range(100))}}}
        for i in range(300)
    ]
    assert (
        find_excess({"prompt": "a", "tools": tools}, LIMITS)
        == find_excess({"tools": tools, "tool_choice": "auto"}, LIMITS)
        == ""
    )
    assert "alternatives" in find_excess({"tools": tools, "tool_choice": {"function": {"name": "f1"}}}, LIMITS)


@pytest.mark.parametrize(
    "body",
    [{"vllm_xargs": {"kv_transfer_params": "x"}}, {"kv_transfer_params": {"a": 1}}, {"ec_transfer_params": [1]}],
    ids=repr,
)
def test_fields_of_other_servers_are_refused(body: dict[str, object]):
    assert f"{next(iter(body))}: answers are not" in find_refusal(body, LIMITS)


@pytest.mark.parametrize("texts", [1, 1_000], ids=["tokens", "texts"])
def test_sessions_together_have_a_size(texts: int):
    """Turns of 20,000 tokens, or of long conversations, in one session and in many."""
    sampling = SamplingParams(1.0, 1.0, None, 100, ())
    sessions = NamedSessions(lambda name: AgentSession(name, "", sampling, 0, 10**6, is_named=True), 10 * 2**20)
    messages = [{"role": "user", "content": "é" * 100}] * texts
    drawn = SampledAnswer(np.full(100, 1, dtype=np.int32), np.zeros(100, dtype=np.float32), "stop", 0)

    def keep(name: str, token_id: int) -> None:
        session = sessions.opened(name)
        choice = {"message": {"role": "assistant", "content": "é" * 10_000}}
        session.keep({"messages": messages}, SampledReply({"choices": [choice]}, [token_id] * 20_000, [drawn]))
        sessions.keep(session)

    for index in range(200):
        keep(f"s{index}", 7)
    kept = [index for index in range(200) if sessions.get(f"s{index}") is not None]
    # The last ones, of 80 kB and more each.
    assert kept and kept == list(range(200 - len(kept), 200)) and len(kept) <= 131
    for index in range(200):
        keep("long", index)
    found = sessions.get("long")
    assert found is None or len(found.tree.nodes) <= 131


def test_a_question_that_can_never_have_its_slots_is_refused():
    """A question that came through the gate, by whatever number vLLM has read: it would block all after it."""
    callers = Callers(8)
    with pytest.raises(ValueError, match="n=9 is more than the 8 slots"):
        callers.ask(question("greedy", 9))
    callers.ask(question("honest", 8))
    taken, _ = callers.take()
    assert [one.question_id for one in taken] == ["honest"]


def question(name: str, n: int) -> Question:
    """One that nobody answers; of vLLM's parameters and outputs only the number of answers and the name count here."""
    nothing = cast(Any, SimpleNamespace(n=n, structured_outputs=None))
    return Question(name, nothing, nothing, lambda _: None)


def finish(callers: Callers, one: Question) -> None:
    callers.answer(cast(Any, SimpleNamespace(request_id=one.question_id)), num_refits=0)


@pytest.mark.parametrize("n", [1, 3, 8])
def test_callers_never_have_more_than_their_share(n: int):
    callers = Callers(8)
    for index in range(1000):
        callers.ask(question(str(index), n))
    served: list[str] = []
    inside: list[Question] = []
    while callers.are_waiting:
        taken, _ = callers.take()
        for one in taken:
            callers.note(one, one.question_id, weight_version=0, num_refits=0)
        inside += taken
        assert n * len(inside) <= 8
        assert n * (len(inside) + 1) > 8 or len(served) + len(inside) == 1000  # none is left free
        served.append(inside[0].question_id)
        finish(callers, inside.pop(0))
    assert served == [str(index) for index in range(1000)]


def test_whoever_hangs_up_while_waiting_takes_no_slot():
    callers = Callers(1)
    for name in "abc":
        callers.ask(question(name, 1))
    (first,), _ = callers.take()
    callers.note(first, "vllm-a", weight_version=0, num_refits=0)
    callers.withdraw("b")
    callers.withdraw("a")
    taken, withdrawn = callers.take()
    assert ([one.question_id for one in taken], withdrawn) == (["c"], ["a"])
