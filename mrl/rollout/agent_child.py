# SPDX-License-Identifier: Apache-2.0
"""The process in which a user's agents run, many at once in one event loop.

`python -m mrl.rollout.agent_child MODULE:FUNCTION LISTENER_FD PARENT_PID`, with the key of its address on stdin. It answers as every agent
with a URL does: see `mrl.rollout.agents`.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import cast

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mrl.config.own import AGENT, find_fitting
from mrl.envs.own import outcome
from mrl.envs.task import MASK_SAMPLE
from mrl.rollout import http_gate
from mrl.signals import shield_process

PR_SET_PDEATHSIG = 1
MAX_TASK_BYTES = 64 * 2**20
AgentFunction = Callable[[AsyncOpenAI, dict[str, object]], Awaitable[object]]
logger = logging.getLogger(__name__)


def main() -> None:
    """Loads the agent, and runs it for every request until the parent dies."""
    path, listener_fd, parent_pid = sys.argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    shield_process(passes_on=False)
    if os.getppid() != int(parent_pid):  # it died before the line above
        sys.exit("the parent is gone")
    agent = cast(AgentFunction, find_fitting(path, AGENT))
    listener = socket.socket(fileno=int(listener_fd))
    http_gate.start(make_app(agent), listener, api_key=sys.stdin.readline().strip(), max_body=MAX_TASK_BYTES)
    signal.pause()


def make_app(agent: AgentFunction) -> Starlette:
    """The routes: `POST /` runs the agent on a row."""
    # One for all rollouts: making another takes longer than a short agent.
    connections = DefaultAsyncHttpxClient(trust_env=False)

    async def run(request: Request) -> JSONResponse:
        task = await request.json()
        deadline_s = float(task["deadline_s"])
        # Not again by itself: the gateway waits for engines, and asks another one if one dies.
        client = AsyncOpenAI(base_url=task["base_url"], api_key=task["api_key"], http_client=connections, max_retries=0, timeout=deadline_s)
        try:
            async with asyncio.timeout(deadline_s):
                found = outcome(await agent(client, task["row"]))
        except TimeoutError:
            return JSONResponse({"error": f"the agent has taken longer than {deadline_s:g} s (env.agent_timeout_s)", "status": "timeout"})
        except Exception as error:
            logger.warning("An agent failed", exc_info=error)
            return JSONResponse({"error": f"{type(error).__name__}: {error}"})
        return JSONResponse({"reward": found.reward, "components": dict(found.components), "mask": MASK_SAMPLE in found.flags})

    async def health(_: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    return Starlette(routes=[Route("/", run, methods=["POST"]), Route(http_gate.OPEN_PATH, health)])


if __name__ == "__main__":
    main()
