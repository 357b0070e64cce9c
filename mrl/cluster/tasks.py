# SPDX-License-Identifier: Apache-2.0
"""Tasks of an event loop, waits for them, the driver's thread for what would block its loop, and the loop of an actor.

In the driver training is one coroutine; rollouts, calls to actors and watches of these are tasks beside it.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

from mrl.cluster import hangs

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# Halves the processor time of a rollout; garbage in circles of so many objects takes megabytes.
GC_THRESHOLD = 50_000
AT_WORK = "at_work"
"""Name of the worker's function that calls another: by it the watchdog knows the thread."""
# A signal ends a wait, and its progress is shown, after so long.
TICK_S = 0.25
# A run that ends because a task is stuck must not be stuck, too.
END_TIMEOUT_S = 5.0
# What Ray's threads call in an actor's loop waits for nobody.
CALL_TIMEOUT_S = 60.0


@cache
def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "worker")


async def in_worker(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Awaits a function that blocks: calls to all ranks, packing, files. One thread makes them all, in one order.

    Who cancels this waits for the function's end, too: it may hold all ranks.
    """

    def at_work() -> T:
        try:
            return function(*arguments, **options)
        except (StopIteration, futures.CancelledError) as error:  # a loop takes these for its own
            raise RuntimeError(repr(error)) from error

    work = asyncio.get_running_loop().run_in_executor(_worker(), at_work)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


class Silence(Exception):
    """A wait ended because no news came in time."""


class BackgroundTasks:
    """Tasks beside a training or a call. Their errors, and news of what they wait for, reach whoever waits."""

    def __init__(self) -> None:
        self.heard_at: dict[str, float] = {}
        """Time of the last sign of life, by what is waited for."""
        self.checks: list[Callable[[], None]] = []
        """Called now and then in each wait: one that finds a signal raises."""
        self._running: set[asyncio.Task[None]] = set()
        self._error: Exception | None = None
        self._news: asyncio.Future[None] | None = None

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task. Its error is raised in every present and later wait, if it is the first."""
        task = asyncio.create_task(self._run(work))
        self._running.add(task)
        task.add_done_callback(self._end)
        return task

    @property
    def are_over(self) -> bool:
        """True when no task is left."""
        return not self._running

    def raise_first(self) -> None:
        """Raises the first error of a task, if there is one."""
        if self._error is not None:
            raise self._error

    def check(self) -> None:
        """Calls all `checks`."""
        for check in self.checks:
            check()

    def tell(self, what: str, heard_at: float | None = None) -> None:
        """Notes news: it has come, or is expected from a given moment on."""
        moment = time.monotonic() if heard_at is None else heard_at
        self.heard_at[what] = max(moment, self.heard_at.get(what, 0.0))
        self.wake()

    def wake(self) -> None:
        """Has everyone who waits look again."""
        news, self._news = self._news, None
        if news is not None:
            news.set_result(None)

    async def news(self, limit_s: float) -> None:
        """Waits until `wake`, or the end of a task, but not longer than `limit_s`."""
        self._news = self._news or asyncio.get_running_loop().create_future()
        await asyncio.wait([self._news], timeout=limit_s)

    async def wait(
        self,
        is_enough: Callable[[], bool],
        *,
        what: str,
        who: Callable[[], Collection[str]],
        limit_s: float,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits until `is_enough`, which is asked after all news; calls `look` meanwhile, and at the end.

        `who` names those that have not answered. Silence: for `limit_s` there was no sign of life.
        """
        self.heard_at[what] = max(time.monotonic(), self.heard_at.get(what, 0.0))
        looked_at = 0.0

        def is_over() -> bool:
            nonlocal looked_at
            if time.monotonic() >= looked_at + TICK_S:
                looked_at = time.monotonic()
                self.check()
                look()
            self.raise_first()
            return is_enough()

        while not is_over():
            heard_at = self.heard_at[what]
            with hangs.waiting(what, who, heard_at):
                while self.heard_at[what] == heard_at and not is_over():
                    left_s = heard_at + limit_s - time.monotonic()
                    if left_s < 0:
                        raise Silence
                    await self.news(min(left_s, TICK_S))
        look()

    async def end(self) -> None:
        """Ends all tasks, and waits for them a while."""
        tasks = tuple(self._running)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_TIMEOUT_S)

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # whoever waits raises it
            self._error = self._error or error

    def _end(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self.wake()


@asynccontextmanager
async def started_tasks() -> AsyncIterator[BackgroundTasks]:
    """The tasks of a run, which end with the `async with` block."""
    gc.set_threshold(GC_THRESHOLD)
    tasks = BackgroundTasks()
    try:
        yield tasks
    finally:
        await tasks.end()


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The loop of an actor, in a thread: Ray's threads call into it and wait. It lives as long as the process.

    Ray would run an actor class with coroutines in an event loop of its own, beside which no signal is handled.
    """
    gc.set_threshold(GC_THRESHOLD)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="event loop", daemon=True).start()
    return loop


def wait_in_loop(work: Coroutine[Any, Any, T], limit_s: float) -> T:
    """Runs a coroutine in the loop and returns its result. TimeoutError: none within `limit_s`."""
    return asyncio.run_coroutine_threadsafe(work, event_loop()).result(limit_s)


def in_loop(function: Callable[[*Ts], T], *arguments: *Ts) -> T:
    """Runs a function on the loop's thread and returns its result."""

    async def call() -> T:
        return function(*arguments)

    return wait_in_loop(call(), CALL_TIMEOUT_S)
