# SPDX-License-Identifier: Apache-2.0
"""The process in which a user's agents run, many at once in one event loop.

`python -m mrl.rollout.agent_child MODULE:FUNCTION LISTENER_FD PARENT_PID`, with the key of its address on stdin. It answers as every agent
with a URL does: see `mrl.rollout.agents`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mrl.config.own import AGENT, find_fitting
from mrl.envs.own import outcome
from mrl.envs.task import MASK_SAMPLE
from mrl.rollout import http_gate
from mrl.signals import die_with_parent, shield_process

MAX_TASK_BYTES = 64 * 2**20
JOIN_S = 60.0
NUM_POOLS = 32
AgentFunction = Callable[..., Awaitable[object]]
"""Called as `agent(client=..., row=...)`."""
logger = logging.getLogger(__name__)


class Connections(DefaultAsyncHttpxClient):
    """Connections of many rollouts. An agent that closes its client, as `async with client` does, leaves them to the others."""

    async def aclose(self) -> None:
        """Leaves them open."""


def main() -> None:
    """Loads the agent, and runs it for every request until the parent dies."""
    path, listener_fd, parent_pid = sys.argv[1:]
    die_with_parent(int(parent_pid))
    shield_process(passes_on=False)
    agent = cast(AgentFunction, find_fitting(path, AGENT))
    listener = socket.socket(fileno=int(listener_fd))
    serving = http_gate.start(make_app(agent), listener, api_key=sys.stdin.readline().strip(), max_body=MAX_TASK_BYTES)
    # It ends if a task that an agent has begun leaves the process, and then another process takes its place.
    while serving.is_alive():
        serving.join(JOIN_S)


def make_app(agent: AgentFunction) -> Starlette:
    """The routes: `POST /` runs the agent on a row."""
    # Made once: that takes longer than a short agent. Several, as httpx looks at all connections of a pool for each request.
    context = ssl.create_default_context()
    pools = itertools.cycle([Connections(trust_env=False, verify=context) for _ in range(NUM_POOLS)])

    async def run(request: Request) -> Response:
        task = await request.json()
        deadline_s, left_s = float(task["deadline_s"]), float(task["deadline_at"]) - time.monotonic()
        # Not again by itself: the gateway waits for engines, and asks another one if one dies.
        client = AsyncOpenAI(base_url=task["base_url"], api_key=task["api_key"], http_client=next(pools), max_retries=0, timeout=deadline_s)
        try:
            async with asyncio.timeout(left_s) as limit:
                found = outcome(await agent(client=client, row=task["row"]))
        except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return _json({"error": f"the agent has taken longer than {deadline_s:g} s (env.agent_timeout_s)", "status": "timeout"})
            current = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and current is not None and current.cancelling():
                raise  # by whoever ends the request, and not by what the agent waits for
            logger.warning("An agent failed", exc_info=error)
            return _json({"error": f"{type(error).__name__}: {error}"})
        return _json({"reward": found.reward, "components": dict(found.components), "mask": MASK_SAMPLE in found.flags})

    async def health(_: Request) -> Response:
        return _json({"status": "ok"})

    return Starlette(routes=[Route("/", run, methods=["POST"]), Route(http_gate.OPEN_PATH, health)])


def _json(answer: Mapping[str, object]) -> Response:
    # Starlette's own refuses NaN and halves of surrogate pairs, and whoever asks would learn nothing of them.
    return Response(json.dumps(answer), media_type="application/json")


if __name__ == "__main__":
    main()
