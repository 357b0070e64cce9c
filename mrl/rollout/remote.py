# SPDX-License-Identifier: Apache-2.0
"""An agent's server, asked over HTTP, and the program behind one, started again whenever it ends."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import zlib
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

import aiohttp

logger = logging.getLogger(__name__)

Json = Mapping[str, object]
MAX_FAILED_STARTS = 3
# An agent is ended by its own process at its deadline; one whose process does not even do that is ended with it.
GRACE_S = 10.0
CONNECT_S = 30.0
MAX_ANSWER_BYTES = 64 * 2**20
"""Most bytes of an answer, as sent and unpacked: a conversation of 10 M characters with its tokens and logprobs."""
BLOCKED = "blocked"
"""Status of an agent whose time was up while another one blocked its process."""
BUSY = (408, 429, 503)
"""Answers of a server that may have time later."""


class AgentLost(Exception):
    """The agent's process or server has gone."""


class AgentBlocked(AgentLost):
    """Another agent has blocked the process for longer than this one had time."""


class AgentUnreached(AgentLost):
    """The agent has got no task: nothing listens at its address, or its server has no time now."""


class AgentBusy(AgentUnreached):
    """The agent's server listens, and has no time now."""


async def keep_running(name: str, run: Callable[[], Awaitable[tuple[bool, int | None]]], *, log: object) -> None:
    """Runs a program again whenever it ends. `run` runs it once, and tells whether it was up, and its exit code.

    RuntimeError: it was not up `MAX_FAILED_STARTS` times in a row.
    """
    num_failed = 0
    while num_failed < MAX_FAILED_STARTS:
        was_up, exit_code = await run()
        num_failed = 0 if was_up else num_failed + 1
        logger.warning("%s has ended (exit code %s) and is started again; see %s", name, exit_code, log)
    raise RuntimeError(f"{name} has ended {num_failed} times in a row before it was up; see {log}")


async def until_readable(descriptor: int) -> None:
    """Returns when a read would not wait: of a process's pidfd when it ended, of a pipe when all writers are gone."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, lambda: found.done() or found.set_result(None))
    try:
        await found
    finally:
        loop.remove_reader(descriptor)


async def read_answer(response: aiohttp.ClientResponse, most: int = MAX_ANSWER_BYTES) -> bytes:
    """Unpacked body from a session without `auto_decompress`. ValueError: over `most` bytes, or not gzip or deflate."""
    content = bytearray()
    async for part in response.content.iter_any():
        content += part
        if len(content) > most:
            raise ValueError(f"over {most:,} bytes")
    encoding = response.headers.get("Content-Encoding", "").strip().lower() or "identity"
    if encoding == "identity":
        return bytes(content)
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise ValueError(f"the Content-Encoding {encoding[:40]!r}, which was not asked for")
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)  # reads both headers
    try:
        unpacked = await asyncio.to_thread(unpacker.decompress, content, most + 1)
    except zlib.error as error:
        raise ValueError(f"what is no {encoding}: {error}") from error
    if len(unpacked) > most:
        raise ValueError(f"over {most:,} bytes once unpacked")
    if not unpacker.eof:
        raise ValueError(f"{encoding} that ends early")
    return unpacked


def open_client(
    timeout: aiohttp.ClientTimeout, *, limit: int = 100, on_connected: Callable[[], None] = lambda: None
) -> aiohttp.ClientSession:
    """A session of at most `limit` connections to a server, 0 = any number, whose answers `read_answer` reads.

    `on_connected` is called when a new connection is made.
    """

    async def note(*_: object) -> None:
        on_connected()

    connector, trace = aiohttp.TCPConnector(limit=limit), aiohttp.TraceConfig()
    trace.on_connection_create_end.append(note)
    headers = {"Accept-Encoding": "gzip, deflate"}
    return aiohttp.ClientSession(
        connector=connector,
        timeout=timeout,
        headers=headers,
        trust_env=False,
        auto_decompress=False,
        trace_configs=[trace],
    )


class RemoteAgent:
    """An agent at a URL of the user's."""

    def __init__(self, url: str, *, api_key: str = "") -> None:
        self.url = url
        self.on_connected: Callable[[], None] = lambda: None
        """Called when a request has got a connection to it."""
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client: aiohttp.ClientSession | None = None

    async def ask(self, task: Json) -> Json:
        """The agent's answer to a task; AgentLost: it gives none. TimeoutError: nor does it say its time is over."""
        return await self.post(task, deadline_s=cast(float, task["deadline_s"]))

    async def post(self, body: Json, *, deadline_s: float) -> Json:
        """The server's answer; `{"error": ...}` if it refuses. Errors as `ask`."""
        if (client := self._client) is None:
            client = self._client = open_client(
                aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
                limit=0,
                on_connected=lambda: self.on_connected(),
            )
        try:
            async with (
                asyncio.timeout(deadline_s + GRACE_S),
                # Of a redirected POST some servers get a GET, and the key would go to another one.
                client.post(self.url, json=body, headers=self._headers, allow_redirects=False) as response,
            ):
                content = await read_answer(response)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            # A wait that ends has no number, a name's look-up one below 0, and TLS one of OpenSSL.
            number = getattr(error, "errno", None) or 0
            is_plain = number > 0 and not isinstance(error, aiohttp.ClientSSLError)
            said = f"Cannot connect: {os.strerror(number)}" if is_plain else str(error)
            raise AgentUnreached(f"{self.url}: {said}") from error
        except aiohttp.ClientError as error:
            raise AgentLost(f"{self.url}: {error or type(error).__name__}") from error
        except ValueError as error:
            return {"error": f"{self.url} answers {error}"}
        text = content.decode("utf-8", errors="replace")
        if response.status >= 500 or response.status in BUSY:
            raise (AgentBusy if response.status in BUSY else AgentLost)(
                f"{self.url} answers {response.status}: {text[:300]}"
            )
        if (moved := response.headers.get("Location")) and response.status < 400:
            return {
                "error": (
                    f"{self.url} answers {response.status}, a redirection to {moved[:300]}: name that address "
                    "in the config"
                )
            }
        if response.status != 200:
            return {"error": f"{self.url} answers {response.status}: {text[:300]}"}
        try:
            reply = json.loads(text)
        except (ValueError, RecursionError) as error:
            return {"error": f"{self.url} answers what is no JSON: {error}: {text[:200]}"}
        if isinstance(reply, dict):
            return reply
        return {"error": f"{self.url} answers a {type(reply).__name__}, not an object"}

    async def start(self) -> None:
        """Nothing: the server is the user's."""
