"""Checks requests before their bodies are read: the key, the size, and deadlines for all that a client sends. Needs no vLLM.

uvicorn bounds headers in bytes (`h11_max_incomplete_event_size`) and idle connections in time (`timeout_keep_alive`). It has no deadline
for headers or bodies, and its `limit_concurrency` would let strangers shut out those who have the key.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import Callable
from typing import cast

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

OPEN_PATH = "/health"
"""The only path that needs no key."""
# Agents keep connections open between their turns, while tools work.
KEEP_ALIVE_S = 120
HEADER_S = 10.0
"""Deadline for the headers of a request, from the connection or their first byte on."""
BODY_S = 60.0
"""Deadline for the body of a request, from its headers on."""
MAX_HEADER_BYTES = 64 * 2**10
MAX_STRANGERS = 256
"""Open connections on which nobody has shown the key yet."""
# Texts have about 4 bytes a token, token ids in JSON up to 8, and a conversation may carry both twice.
BODY_BYTES_PER_TOKEN = 32
SMALL_BODY_BYTES = 2**20
STATE = "connection"
"""Key of the `Connection` in the scope of a request."""


def max_body_bytes(max_model_len: int) -> int:
    """Longest body of a request: the longest prompt, and 1 MiB for tools and schemas."""
    return SMALL_BODY_BYTES + BODY_BYTES_PER_TOKEN * max_model_len


class Connection(asyncio.Protocol):
    """A client's connection in front of uvicorn's: closes it when headers take too long, or when more strangers come."""

    def __init__(self, inner: Callable[[dict[str, object]], H11Protocol], strangers: dict[Connection, None]) -> None:
        """`inner` makes uvicorn's protocol for a state of requests; `strangers` are the connections without a key, oldest first."""
        self._inner = inner({STATE: self})
        self._strangers = strangers
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._num_answering = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accepts a client; closes the oldest stranger where there are too many."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is of no class of asyncio's
        self._strangers[self] = None
        if len(self._strangers) > MAX_STRANGERS:
            next(iter(self._strangers)).close()
        self._await_headers()
        self._inner.connection_made(self._transport)

    def data_received(self, data: bytes) -> None:
        """Passes bytes of the client on: of headers, unless a request is being answered."""
        if self._num_answering == 0:
            self._await_headers()
        self._inner.data_received(data)

    def eof_received(self) -> None:
        """Passes on that the client sends nothing more."""
        self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Passes on that the connection is closed."""
        self._strangers.pop(self, None)
        self._forget_deadline()
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """Passes on that the client reads slowly."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Passes on that the client has read."""
        self._inner.resume_writing()

    def begin(self) -> None:
        """Ends the deadline: the headers of a request are complete."""
        self._num_answering += 1
        self._forget_deadline()

    def end(self) -> None:
        """Marks a request as answered; uvicorn closes the connection if no other follows."""
        self._num_answering -= 1

    def trust(self) -> None:
        """Takes the client off the strangers: it has shown the key."""
        self._strangers.pop(self, None)

    def close(self) -> None:
        """Ends the connection at once."""
        self._strangers.pop(self, None)
        if self._transport is not None:
            self._transport.abort()

    def _await_headers(self) -> None:
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(HEADER_S, self.close)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def start(app: ASGIApp, listener: socket.socket, *, api_key: str, max_body: int) -> None:
    """Serves `app` behind the gate from a thread that lives as long as the process."""
    config = Config(
        gate(app, api_key=api_key, max_body=max_body),
        # uvicorn calls it as it calls its own classes of protocols.
        http=connections(),  # pyright: ignore[reportArgumentType]
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        log_config=None,
        timeout_keep_alive=KEEP_ALIVE_S,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )
    threading.Thread(target=Server(config).run, args=([listener],), name="http server", daemon=True).start()


def connections() -> Callable[..., Connection]:
    """Factory of one server's `Connection`s, for uvicorn's setting `http`."""
    strangers: dict[Connection, None] = {}

    def connect(
        config: Config, server_state: ServerState, app_state: dict[str, object], _loop: asyncio.AbstractEventLoop | None = None
    ) -> Connection:
        return Connection(lambda state: H11Protocol(config, server_state, app_state | state, _loop), strangers)

    return connect


def gate(app: ASGIApp, *, api_key: str, max_body: int) -> ASGIApp:
    """Puts the checks in front of `app`: 401 and 413 by the headers, 413 and 408 while the body is read.

    `app` gets bodies whole. The connection of a refused request is closed: what it still sends is read by nobody.
    """
    expected = api_key.encode()

    async def gated(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        connection: Connection = scope["state"][STATE]
        connection.begin()
        try:
            headers = dict(scope["headers"])
            has_key = secrets.compare_digest(headers.get(b"authorization", b"").removeprefix(b"Bearer "), expected)
            if has_key:
                connection.trust()
            refusal = _find_refusal(scope["path"], headers, has_key=has_key, max_body=max_body)
            outcome = refusal or await _read(receive, max_body)
            if isinstance(outcome, tuple):
                await _refuse(*outcome)(scope, receive, send)
            else:
                await app(scope, _replay(outcome, receive), send)
        finally:
            connection.end()

    return gated


Refusal = tuple[int, str]
"""Status and reason."""


def _find_refusal(path: str, headers: dict[bytes, bytes], *, has_key: bool, max_body: int) -> Refusal | None:
    """The reason to refuse a request before its body is read, if there is one."""
    length = headers.get(b"content-length")
    if path == OPEN_PATH:
        has_body = length not in (None, b"0") or b"transfer-encoding" in headers
        return (413, f"{OPEN_PATH} takes no body") if has_body else None
    if not has_key:
        return 401, "the API key is missing or wrong; it stands with the addresses in the run's endpoints.json"
    # The parser has refused what is no number.
    return (413, _too_long(max_body)) if length is not None and int(length) > max_body else None


def _too_long(max_body: int) -> str:
    return f"the body is longer than {max_body} bytes, which the longest prompt takes (policy.generation.vllm_cfg.max_model_len)"


async def _read(receive: Receive, max_body: int) -> bytes | Refusal:
    """Reads the body; returns the reason where it cannot be read to its end."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return 400, "the client has gone"
                body += message.get("body", b"")
                if len(body) > max_body:
                    return 413, _too_long(max_body)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        return 408, f"the body has not come within {BODY_S:g} s"


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receiver that gives the whole body, then what follows it: that the client has gone."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed


def _refuse(code: int, reason: str) -> JSONResponse:
    """A refusal in OpenAI's shape, after which the connection is closed."""
    content = {"error": {"message": reason, "type": "invalid_request_error", "param": None, "code": code}}
    return JSONResponse(content, status_code=code, headers={"Connection": "close"})
