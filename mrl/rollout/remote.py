# SPDX-License-Identifier: Apache-2.0
"""An agent's server, asked over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import cast

import aiohttp

Json = Mapping[str, object]
# An agent is ended by its own process at its deadline; one whose process does not even do that is ended with it.
GRACE_S = 10.0
BUSY = (408, 429, 503)
"""Answers of a server that may have time later."""


class AgentLost(Exception):
    """The agent's process or server has gone."""


class AgentUnreached(AgentLost):
    """The agent has got no task: nothing listens at its address, or its server has no time now."""


async def until_readable(descriptor: int) -> None:
    """Returns when a read would not wait: of a process's pidfd when that has ended, of a pipe when all writers are gone."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, lambda: found.done() or found.set_result(None))
    try:
        await found
    finally:
        loop.remove_reader(descriptor)


class RemoteAgent:
    """An agent at a URL of the user's."""

    def __init__(self, url: str, *, api_key: str = "") -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client: aiohttp.ClientSession | None = None

    async def ask(self, task: Json) -> Json:
        """The agent's answer to a task; AgentLost: it gives none. TimeoutError: nor does it say that its deadline is over."""
        return await self.post(task, deadline_s=cast(float, task["deadline_s"]))

    async def post(self, body: Json, *, deadline_s: float) -> Json:
        """The server's answer; `{"error": ...}` if it refuses. Errors as `ask`."""
        if self._client is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._client = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None), trust_env=False)
        try:
            async with (
                asyncio.timeout(deadline_s + GRACE_S),
                # Of a redirected POST some servers get a GET, and the key would go to another one.
                self._client.post(self.url, json=body, headers=self._headers, allow_redirects=False) as response,
            ):
                content = await response.read()
        except aiohttp.ClientConnectorError as error:
            raise AgentUnreached(f"{self.url}: {error}") from error
        except aiohttp.ClientError as error:
            raise AgentLost(f"{self.url}: {error or type(error).__name__}") from error
        text = content.decode("utf-8", errors="replace")
        if response.status >= 500 or response.status in BUSY:
            raise (AgentUnreached if response.status in BUSY else AgentLost)(f"{self.url} answers {response.status}: {text[:300]}")
        if (moved := response.headers.get("Location")) and response.status < 400:
            return {"error": f"{self.url} answers {response.status}, a redirection to {moved[:300]}: name that address in the config"}
        if response.status != 200:
            return {"error": f"{self.url} answers {response.status}: {text[:300]}"}
        try:
            reply = json.loads(text)
        except (ValueError, RecursionError) as error:
            return {"error": f"{self.url} answers what is no JSON: {error}: {text[:200]}"}
        return reply if isinstance(reply, dict) else {"error": f"{self.url} answers a {type(reply).__name__}, not an object"}

    async def start(self) -> None:
        """Nothing: the server is the user's."""
