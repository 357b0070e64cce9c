# SPDX-License-Identifier: Apache-2.0
"""Limits for HTTP clients: key, sizes and deadlines before bodies are read, then what requests may ask for.

uvicorn bounds headers in bytes (`h11_max_incomplete_event_size`) and idle connections in time (`timeout_keep_alive`).
It has no deadline for headers or bodies, and its `limit_concurrency` would let strangers shut out those who have the
key. Needs no vLLM.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias, cast

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from mrl.types import SamplingParams

OPEN_PATH = "/health"
"""The only path that needs no key, of the server or of one engine behind it."""
# Agents keep connections open between their turns, while tools work.
KEEP_ALIVE_S = 120
HEADER_S = 10.0
"""Deadline for the headers of a request, from the connection or their first byte on."""
LATE_S = 1.0
BODY_S = 60.0
"""Deadline for the body of a request, from its headers on."""
MAX_HEADER_BYTES = 64 * 2**10
MAX_STRANGERS = 8192
"""Open connections on which nobody has shown the key yet; at most half of the files that the process may open.

A step's agents connect all at once, and the event loop accepts all of them before it reads from any.
"""
MAX_OPEN_FILES = 65536
# Texts have about 4 bytes a token, token ids in JSON up to 8, and a conversation may carry both twice.
BODY_BYTES_PER_TOKEN = 32
SMALL_BODY_BYTES = 2**20
STATE = "connection"
"""Key of the `Connection` in the scope of a request."""

MAX_ANSWERS = 1024
"""Answers of one request, over all its prompts."""
# The longest prompt is seldom above 5 characters a token; a run of spaces may be one token of many.
CHARACTERS_PER_TOKEN = 16
CONSTRAINTS = ("structured_outputs", "response_format", "tools")
"""Fields of a request that say which form its answers have."""
MAX_CONSTRAINT_CHARACTERS = 64 * 2**10
# At every token the engine, and training with it, waits until all of them have been looked at: 46 s for 50,000.
MAX_ALTERNATIVES = 1024
"""Entries of lists, and `|` of patterns and grammars, in a request's constraints."""
CHAT_KEY = "policy.generation.vllm_cfg.http_server_serving_chat_kwargs"
FLAGS = {
    "--enable-auto-tool-choice": f"{CHAT_KEY}.enable_auto_tools=true",
    "--tool-call-parser": f"{CHAT_KEY}.tool_parser=NAME",
    "--reasoning-parser": f"{CHAT_KEY}.reasoning_parser=NAME",
}
"""Flags of vLLM's server that its refusals name, and our keys for them."""
CONTEXT_EXCEEDED = "context_length_exceeded"
TOO_LONG = re.compile(r"context length|max_model_len|maximum model length|max_(completion_|output_)?tokens\b")
"""Texts about requests that are too long, vLLM's and ours."""
MAX_REPEATS = 16 * 2**10
"""Entries of a constraint's lists, each within the others: a grammar of 10**9 takes all memory of the node."""
REPEATS = "minItems maxItems minContains maxContains minProperties maxProperties".split()
"""Numbers of a JSON schema that repeat a part of it; others are values, or a text's length, which is only counted."""
UNSUPPORTED = ("stream", "use_beam_search", "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "chat_template")
"""Fields that mean nothing here, or something else: an engine that streams, searches, hands its cache to another one,
or takes programs of strangers."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "min_tokens": (0,),
    "structured_outputs": (None,),
    "thinking_token_budget": (None,),
}
"""vLLM's sampling parameters that bend the distribution, and the values at which they do not."""

_Refusal: TypeAlias = tuple[int, str]
"""Status and reason."""


def listen(host: str, ports: range) -> socket.socket:
    """A socket that listens at the first free port."""
    for port in ports:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            listener.bind((host, port))
            listener.listen(1024)
            return listener
        listener.close()
    raise RuntimeError(
        f"no free port from {ports.start} to {ports.stop - 1} on {host} (policy.generation.port_range_low and "
        "_high); widen the range"
    )


def start(app: ASGIApp, listener: socket.socket, *, api_key: str, max_body: int) -> threading.Thread:
    """Serves `app` behind the gate from a thread that lives as long as the process; gives it back."""
    given = b"Bearer " + api_key.encode()
    server = make_server(
        app, has_key=lambda _, authorization: secrets.compare_digest(authorization, given), max_body=max_body
    )
    runner = asyncio.Runner(loop_factory=server.config.get_loop_factory())
    # Never closed: while asyncio closes a loop that SystemExit has ended, it answers requests with half of its parts
    # gone.
    thread = threading.Thread(target=lambda: runner.run(server.serve([listener])), name="http server", daemon=True)
    thread.start()
    return thread


def make_server(app: ASGIApp, *, has_key: Callable[[str, bytes], bool], max_body: int) -> Server:
    """A server of `app` behind the gate; `has_key` looks at the path and the header `Authorization` of a request.

    Raises the process's limit of open files, as each running agent keeps a connection.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MAX_OPEN_FILES)), hard))
    strangers: dict[Connection, None] = {}

    def connect(
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> Connection:
        return Connection(lambda state: H11Protocol(config, server_state, app_state | state, _loop), strangers)

    config = Config(
        _gate(app, has_key=has_key, max_body=max_body),
        # uvicorn calls it as it calls its own classes of protocols.
        http=connect,  # pyright: ignore[reportArgumentType]
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        log_config=None,
        timeout_keep_alive=KEEP_ALIVE_S,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )
    return Server(config)


class Connection(asyncio.Protocol):
    """A client's connection in front of uvicorn's: closes it when headers take too long, or more strangers come."""

    def __init__(self, inner: Callable[[dict[str, object]], H11Protocol], strangers: dict[Connection, None]) -> None:
        """`inner` makes uvicorn's protocol for a request state; `strangers` are keyless connections, oldest first."""
        self._inner = inner({STATE: self})
        self._strangers = strangers
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._num_answering = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is of no class of asyncio's
        self._strangers[self] = None
        if len(self._strangers) > min(MAX_STRANGERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2):
            next(iter(self._strangers)).close()
        self._await_headers()
        self._inner.connection_made(self._transport)

    def data_received(self, data: bytes) -> None:
        """Passes bytes of the client on: of headers, unless a request is being answered."""
        if self._num_answering == 0:
            self._await_headers()
        self._inner.data_received(data)

    def eof_received(self) -> None:
        self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._strangers.pop(self, None)
        self._forget_deadline()
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def begin(self, *, is_trusted: bool) -> None:
        """The headers of a request are complete, which ends their deadline; `is_trusted` if they show the key."""
        self._num_answering += 1
        self._forget_deadline()
        if is_trusted:
            self._strangers.pop(self, None)

    def end(self) -> None:
        """Marks a request as answered; uvicorn closes the connection if no other follows."""
        self._num_answering -= 1

    def close(self) -> None:
        self._strangers.pop(self, None)
        if self._transport is not None:
            self._transport.abort()

    def _await_headers(self) -> None:
        if self._deadline is None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(HEADER_S, self._expire, loop.time() + HEADER_S + LATE_S)

    def _expire(self, latest: float) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() > latest:  # this loop was held up, not the client, whose headers may wait to be read
            self._deadline = loop.call_later(HEADER_S, self.close)
        else:
            self.close()

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _gate(app: ASGIApp, *, has_key: Callable[[str, bytes], bool], max_body: int) -> ASGIApp:
    """Puts the checks in front of `app`: 401 and 413 by the headers, 413 and 408 while the body is read.

    `app` gets bodies whole. The connection of a refused request is closed: what it still sends is read by nobody.
    """
    longest = f"{max_body} bytes, which the longest prompt takes"
    too_long = (
        413,
        f"the body is longer than {longest}: the context length is limited (policy.generation.vllm_cfg.max_model_len)",
    )

    def find_refusal_by_headers(path: str, headers: dict[bytes, bytes], *, is_trusted: bool) -> _Refusal | None:
        length = headers.get(b"content-length")
        if re.fullmatch(rf"(/engines/\d+)?{OPEN_PATH}", path):
            has_body = length not in (None, b"0") or b"transfer-encoding" in headers
            return (413, f"{OPEN_PATH} takes no body") if has_body else None
        if not is_trusted:
            return (
                401,
                "the API key is missing or wrong (the run's is in its endpoints.json), or the session is over",
            )
        # The parser has refused what is no number.
        return too_long if length is not None and int(length) > max_body else None

    async def read(receive: Receive) -> bytes | _Refusal:
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return 400, "the client has gone"
                    body += message.get("body", b"")
                    if len(body) > max_body:
                        return too_long
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            return 408, f"the body has not come within {BODY_S:g} s"

    async def gated(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        connection: Connection = scope["state"][STATE]
        headers = dict(scope["headers"])
        is_trusted = has_key(scope["path"], headers.get(b"authorization", b""))
        connection.begin(is_trusted=is_trusted)
        try:
            outcome = find_refusal_by_headers(scope["path"], headers, is_trusted=is_trusted) or await read(receive)
            if isinstance(outcome, tuple):
                response = openai_error(*outcome)
                response.headers["Connection"] = "close"
                await response(scope, receive, send)
                return
            messages: list[Message] = [{"type": "http.request", "body": outcome, "more_body": False}]

            async def replayed() -> Message:
                """The whole body, then the message that the client has gone."""
                return messages.pop() if messages else await receive()

            await app(scope, replayed, send)
        finally:
            connection.end()

    return gated


def openai_error(status: int, message: str, code: str | int | None = None) -> JSONResponse:
    """Builds an OpenAI error; over-long requests get the code that tells agents not to retry."""
    for flag, key in FLAGS.items():
        message = message.replace(flag, key)
    if status in (400, 413) and TOO_LONG.search(message):
        code = CONTEXT_EXCEEDED
    content = {
        "message": message,
        "type": "invalid_request_error",
        "param": None,
        "code": status if code is None else code,
    }
    return JSONResponse({"error": content}, status_code=status)


def default_parameters(sampling: SamplingParams) -> dict[str, object]:
    """Values of the parameters that a request leaves out, by vLLM's names: those of training's rollouts."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
    }


@dataclass(frozen=True)
class Limits:
    """Limits of one request."""

    max_model_len: int
    """Longest prompt plus answer, in tokens."""
    num_slots: int
    """Answers that the engine samples at the same time for requests over HTTP."""


def find_refusal(body: Mapping[str, object], limits: Limits) -> str:
    """Reason why the engine cannot answer a request; empty if it can."""
    if excess := find_excess(body, limits):
        return excess
    for name in UNSUPPORTED:
        if body.get(name):
            rule = "there is no beam search, extensions of vLLM take no arguments, and the chat template is the run's"
            return f"{name}: answers are not streamed, {rule}; leave it out"
    return ""


def find_excess(body: Mapping[str, object], limits: Limits) -> str:
    """Reason why a request asks for too much; empty if it does not. Leaves out what vLLM refuses by itself."""
    prompt = body.get("prompt")
    # vLLM would take "4000" and 4000.0 for numbers.
    num_answers = 1 if body.get("n") is None else body["n"]
    if type(num_answers) is not int:
        return "n: must be a whole number, not a text or a fraction"
    num_characters = sum(map(len, texts_of([prompt, body.get("messages")])))
    if num_characters > limits.max_model_len * CHARACTERS_PER_TOKEN:
        rule = (
            f"the context length of {limits.max_model_len} tokens (policy.generation.vllm_cfg.max_model_len) "
            "holds no such text"
        )
        return f"prompt or messages: {num_characters} characters; {rule}; shorten it"
    is_free = body.get("tool_choice") in (None, "auto", "none")  # no grammar is made of the tools
    constraints = {name: body[name] for name in CONSTRAINTS if name in body and not (name == "tools" and is_free)}
    form = body.get("structured_outputs")
    for name, text in form.items() if isinstance(form, dict) else ():
        if name in ("json", "structural_tag") and isinstance(text, str):
            with suppress(ValueError, RecursionError):  # vLLM refuses what is no JSON
                constraints[f"{name} of structured_outputs"] = json.loads(text)
    if not _repeats(constraints) <= MAX_REPEATS:
        rule = f"numbers of entries (minItems, maxItems), each within the others, may come to {MAX_REPEATS:,}"
        return f"{', '.join(CONSTRAINTS)}: {rule}; ask for fewer"
    texts = list(texts_of(constraints, with_keys=True))
    num_entries = sum(len(item) for item in _items(constraints) if isinstance(item, list))
    num_alternatives = sum(text.count("|") for text in texts) + num_entries
    if num_alternatives > MAX_ALTERNATIVES or sum(map(len, texts)) > MAX_CONSTRAINT_CHARACTERS:
        rule = f"they may have {MAX_ALTERNATIVES} and {MAX_CONSTRAINT_CHARACTERS}"
        given = f"{num_alternatives} alternatives and entries of lists, {sum(map(len, texts))} characters"
        return f"{', '.join(CONSTRAINTS)}: {given}; {rule}; ask for a simpler form"
    num_prompts = (
        len(prompt) if isinstance(prompt, list) and any(isinstance(item, str | list) for item in prompt) else 1
    )
    if num_answers > limits.num_slots:
        rule = (
            f"requests over HTTP have {limits.num_slots} of the engine's slots "
            "(policy.generation.vllm_cfg.http_server_share)"
        )
        return f"n={num_answers}: {rule}; ask for fewer answers, several times"
    if num_answers * num_prompts > MAX_ANSWERS:
        return (
            f"{num_prompts} prompts with n={num_answers}: a request has at most {MAX_ANSWERS} answers; send "
            "several requests"
        )
    return ""


def _repeats(value: object) -> float:
    """Most often that the numbers in a form repeat a part of it."""
    most, waiting = 1.0, [(value, 1.0)]
    while waiting:
        item, times = waiting.pop()
        if isinstance(item, dict):
            # xgrammar's RepeatFormat has min and max.
            names = [*REPEATS, "min", "max"] if item.get("type") == "repeat" else REPEATS
            counts = [number for name in names if isinstance(number := item.get(name), int | float)]
            times *= min(max([1, *counts]), 10.0**9)
            most = max(most, times)
            waiting += [(inner, times) for inner in item.values()]
        elif isinstance(item, list):
            waiting += [(inner, times) for inner in item]
    return most


def texts_of(value: object, *, with_keys: bool = False) -> Iterator[str]:
    """All texts in a value of JSON."""
    for item in _items(value):
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict) and with_keys:
            yield from item


def _items(value: object) -> Iterator[object]:
    """The value and all values in it. Without recursion: clients may nest as deep as they like."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        waiting += item if isinstance(item, list) else item.values() if isinstance(item, dict) else ()
        yield item


def find_deviation(parameters: Mapping[str, object], sampling: SamplingParams) -> str:
    """Reason why a request may not join a session; "" if its tokens come from the distribution that is trained on.

    `parameters` are vLLM's, by name; `sampling` is that of the run.
    """
    wanted = {
        "temperature": (sampling.temperature,),
        "top_p": (sampling.top_p,),
        "top_k": (sampling.top_k,) if sampling.top_k else (None, 0, -1),
        **NEUTRAL,
    }
    for name, values in wanted.items():
        if parameters[name] not in values:
            rule = (
                f"sessions are drawn as policy.generation says, with {name}={values[0]}, because they may be trained on"
            )
            return f"{name}={parameters[name]}: {rule}; leave it out, or ask outside of a session"
    return ""
