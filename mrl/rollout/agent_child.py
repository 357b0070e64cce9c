# SPDX-License-Identifier: Apache-2.0
"""The process in which a user's agents run, many at once in one event loop.

`python -m mrl.rollout.agent_child MODULE:FUNCTION LISTENER_FD REPORT_FD PARENT_PID`, with the key of its address on
stdin. It answers as every agent with a URL does: see `mrl.rollout.agents`. To REPORT_FD it writes a line of JSON when
an agent blocks the loop of all.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import socket
import ssl
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, cast

from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mrl.config.own import AGENT, find_fitting
from mrl.envs.child import own_frames, traced
from mrl.envs.own import outcome
from mrl.envs.task import MASK_SAMPLE
from mrl.rollout import http_gate
from mrl.rollout.remote import BLOCKED
from mrl.signals import die_with_parent, shield_process

MAX_TASK_BYTES = 64 * 2**20
JOIN_S = 60.0
NUM_POOLS = 32
BEAT_S, BLOCKED_S = 0.5, 3.0
"""Seconds between two looks at the loop, and after which one that does not answer is blocked."""
AgentFunction = Callable[..., Awaitable[object]]
"""Called as `agent(client=..., row=...)`."""
logger = logging.getLogger(__name__)


class Connections(DefaultAsyncHttpxClient):
    """Connections of many rollouts. An agent closing its client, as `async with client` does, leaves them to others."""

    async def aclose(self) -> None:
        """Leaves them open."""


def main() -> None:
    """Loads the agent, and runs it for every request until the parent dies."""
    path, listener_fd, report_fd, parent_pid = sys.argv[1:]
    die_with_parent(int(parent_pid))
    shield_process(passes_on=False)
    agent = cast(AgentFunction, find_fitting(path, AGENT))
    listener = socket.socket(fileno=int(listener_fd))
    serving = http_gate.start(
        make_app(agent, LoopWatch(int(report_fd))),
        listener,
        api_key=sys.stdin.readline().strip(),
        max_body=MAX_TASK_BYTES,
    )
    # It ends if a task that an agent has begun leaves the process, and then another process takes its place.
    while serving.is_alive():
        serving.join(JOIN_S)


_AGENT: ContextVar[str] = ContextVar("agent")
"""URL of the session whose agent runs; tasks that an agent starts inherit it."""


class LoopWatch:
    """Watches the event loop all agents of the process share, from a thread, and reports an agent that blocks it."""

    def __init__(self, report_fd: int) -> None:
        self.late_s = 0.0
        """Seconds that the loop has been blocked, all times together."""
        self._report_fd, self._beat = report_fd, 0.0
        self._agents = weakref.WeakKeyDictionary[asyncio.Task[object], str]()

    def start(self) -> None:
        """Watches the running loop from now on. Later calls do nothing."""
        if not self._beat:
            loop = asyncio.get_running_loop()
            loop.set_task_factory(cast(Any, self._new_task))
            self._beat = time.monotonic()
            threading.Thread(
                target=self._watch, args=(loop, threading.get_ident()), name="loop watch", daemon=True
            ).start()

    def _new_task(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(work, loop=loop, **options)
        self._agents[task] = _AGENT.get("")
        return task

    def note(self, session: str) -> None:
        """Counts the running task, and those that it starts, as a session's."""
        _AGENT.set(session)
        if (task := asyncio.current_task()) is not None:
            self._agents[task] = session

    def _watch(self, loop: asyncio.AbstractEventLoop, thread_id: int) -> None:
        asked, told = 0.0, False
        while not loop.is_closed():
            if asked <= self._beat:
                if told:
                    self.late_s += self._beat - asked
                asked, told = time.monotonic(), False
                loop.call_soon_threadsafe(self._answer)
            elif not told and time.monotonic() - asked > BLOCKED_S and (task := asyncio.current_task(loop)) is not None:
                told = True
                frames = traceback.extract_stack(sys._current_frames().get(thread_id))
                report = {"session": self._agents.get(task, ""), "place": place_of(frames)}
                os.write(self._report_fd, f"{json.dumps(report)}\n".encode())
            time.sleep(BEAT_S)

    def _answer(self) -> None:
        self._beat = time.monotonic()


def place_of(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line of a stack that is no library's, as `FILE:LINE in FUNCTION: SOURCE`."""
    frame = (own_frames(frames) or list(frames))[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"


def make_app(agent: AgentFunction, watch: LoopWatch) -> Starlette:
    """The routes: `POST /` runs the agent on a row."""
    # Made once: that takes longer than a short agent. Several, as httpx looks at all connections of a pool for each
    # request.
    context = ssl.create_default_context()
    logged = set[str]()
    """Errors whose traceback has been logged, by type and place."""
    pools = itertools.cycle([Connections(trust_env=False, verify=context) for _ in range(NUM_POOLS)])

    async def run(request: Request) -> Response:
        task = await request.json()
        watch.start()
        watch.note(task["base_url"])
        late_s = watch.late_s
        deadline_s, left_s = float(task["deadline_s"]), float(task["deadline_at"]) - time.monotonic()
        # Not again by itself: the gateway waits for engines, and asks another one if one dies.
        client = AsyncOpenAI(
            base_url=task["base_url"],
            api_key=task["api_key"],
            http_client=next(pools),
            max_retries=0,
            timeout=deadline_s,
        )
        try:
            async with asyncio.timeout(left_s) as limit:
                found = outcome(await agent(client=client, row=task["row"]))
        except (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
            if isinstance(error, TimeoutError) and limit.expired() and watch.late_s > late_s:
                return _json({"error": "its process was blocked", "status": BLOCKED})
            if isinstance(error, TimeoutError) and limit.expired():
                return _json({"error": "the agent has taken longer than env.agent_timeout_s", "status": "timeout"})
            current = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and current is not None and current.cancelling():
                raise  # by whoever ends the request, and not by what the agent waits for
            whole = error
            while isinstance(error, BaseExceptionGroup):  # of asyncio.TaskGroup, and says nothing itself
                error = error.exceptions[0]
            place, trace = traced(error)
            if (kind := f"{type(error).__name__}{place}") not in logged:
                logged.add(kind)
                logger.warning("An agent failed; further ones alike are not logged here", exc_info=whole)
            return _json({"error": f"{type(error).__name__}: {error}{place}", "trace": trace})
        texts = {"columns": dict(found.columns), "extracted": found.extracted}
        is_masked = MASK_SAMPLE in found.flags
        return _json({"reward": found.reward, "components": dict(found.components), "mask": is_masked, **texts})

    async def health(_: Request) -> Response:
        return _json({"status": "ok"})

    return Starlette(routes=[Route("/", run, methods=["POST"]), Route(http_gate.OPEN_PATH, health)])


def _json(answer: Mapping[str, object]) -> Response:
    # Starlette's own refuses NaN and halves of surrogate pairs, and whoever asks would learn nothing of them.
    return Response(json.dumps(answer), media_type="application/json")


if __name__ == "__main__":
    main()
