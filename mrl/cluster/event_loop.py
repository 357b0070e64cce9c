# SPDX-License-Identifier: Apache-2.0
"""The event loop of a process, in its own thread: the driver's, an actor's. Other threads call into it and wait."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from concurrent import futures
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar, TypeVarTuple

from mrl.cluster import hangs

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# What the main thread calls in the loop waits for nobody; a loop that does not answer is stuck in a call of Ray's.
CALL_TIMEOUT_S = 60.0
# Halves the processor time of a rollout; garbage in circles of so many objects takes megabytes.
GC_THRESHOLD = 50_000
TICK_S = 0.25
# A run that ends because the loop is stuck must not be stuck, too.
END_TIMEOUT_S = 5.0


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The loop, which lives as long as the process."""
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


@contextmanager
def tasks_ended() -> Iterator[None]:
    """Ends all tasks of the loop at the end of the `with` block, and waits for them as long as the loop answers."""

    async def end() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    try:
        yield
    finally:
        futures.wait([asyncio.run_coroutine_threadsafe(end(), event_loop())], timeout=END_TIMEOUT_S)


class Silence(Exception):
    """A wait ended because no news came in time."""


class News:
    """Wakes a waiting thread on events of the loop, which calls `tell` and `fail`; that thread calls the others."""

    def __init__(self) -> None:
        self.heard_at: dict[str, float] = {}
        """Time of the last sign of life, by what is waited for."""
        self._error: Exception | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._watchers: list[Callable[[], None]] = []

    @contextmanager
    def watched_by(self, watcher: Callable[[], None]) -> Iterator[None]:
        """Calls `watcher` now and then, and at the end of each wait of the `with` block, which its exception ends."""
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    def look(self) -> None:
        """Calls all watchers: one that finds a signal raises."""
        for watcher in tuple(self._watchers):
            watcher()

    def tell(self, what: str, heard_at: float | None = None) -> None:
        """Notes news: it has come, or is expected from a given moment on."""
        moment = time.monotonic() if heard_at is None else heard_at
        self.heard_at[what] = max(moment, self.heard_at.get(what, 0.0))
        self._wake()

    def fail(self, error: Exception) -> None:
        """Raises the first error in every present and later wait."""
        self._error = self._error or error
        self._wake()

    def wait(
        self,
        is_enough: Callable[[], bool],
        *,
        what: str,
        who: Callable[[], Collection[str]],
        limit_s: float,
    ) -> None:
        """Waits until `is_enough`, which the loop looks at after all news; the watchers are called meanwhile.

        `who` names those that have not answered. Silence: for `limit_s` there was no sign of life.
        """
        self.heard_at[what] = max(time.monotonic(), self.heard_at.get(what, 0.0))
        waiting = asyncio.run_coroutine_threadsafe(self._until(is_enough), event_loop())
        try:
            while not waiting.done():
                heard_at = self.heard_at[what]
                with hangs.waiting(what, who, heard_at):
                    while self.heard_at[what] == heard_at and not waiting.done():
                        left_s = heard_at + limit_s - time.monotonic()
                        if left_s < 0:
                            raise Silence
                        self.look()
                        futures.wait([waiting], timeout=min(left_s, TICK_S))
            waiting.result(timeout=0)
            self.look()
        finally:
            waiting.cancel()

    async def _until(self, is_enough: Callable[[], bool]) -> None:
        while self._error is None and not is_enough():
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
