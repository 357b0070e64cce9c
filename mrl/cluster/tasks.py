# SPDX-License-Identifier: Apache-2.0
"""Tasks of an event loop and waits for them; books of requests to actors, and the actors' work on these. Needs no Ray.

In the driver training is one coroutine; rollouts, calls to actors and watches of these are tasks beside it. Here are
also the driver's thread for what would block its loop, and the loop of an actor.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent import futures
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from heapq import heapify, heapreplace
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar, TypeVarTuple

from conversion.files.limits import LimitedThread
from mrl.cluster import hangs
from mrl.cluster.errors import ActorLost

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
def _worker() -> LimitedThread:
    return LimitedThread("worker")


async def in_worker(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Awaits a function that blocks: calls to all ranks, packing, files. One thread makes them all, in one order.

    Cancelling waits for the function's end, too: it may hold all ranks.
    """

    def at_work() -> T:
        try:
            return function(*arguments, **options)
        except (StopIteration, futures.CancelledError) as error:  # a loop takes these for its own
            raise RuntimeError(repr(error)) from error

    work = asyncio.wrap_future(_worker().begin(at_work))
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
        """True if no task is left."""
        return not self._running

    def raise_first(self) -> None:
        """Raises the first error of a task, if any."""
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


GENERATION = "generation"
"""Name of the driver's wait for sampling engines."""
VERDICTS = "rewards"
"""Name of the driver's wait for verdicts."""
Q = TypeVar("Q")
A = TypeVar("A")
# An actor that dies this often in a row without an answer will not get better.
MAX_FRUITLESS_RESTARTS = 3


@dataclass
class _Actor(Generic[Q, A]):
    """Requests under way with one actor."""

    owed: dict[str, tuple[Q, asyncio.Future[A]]] = field(default_factory=dict)
    """Its requests without an answer, by id."""
    unsent: list[Q] = field(default_factory=list)
    calls: set[asyncio.Future[Mapping[str, A]]] = field(default_factory=set)
    woken: asyncio.Future[None] | None = None
    task: asyncio.Task[None] | None = None
    num_fruitless: int = 0
    """Deaths in a row without an answer in between."""


class RequestBook(Generic[Q, A]):
    """Requests, each given to the actor with the fewest until answered, however often it dies. Lives in the event loop.

    A task for each actor carries its requests, many in one call. Actors in `lost` have died, and are to be started
    again.
    """

    def __init__(
        self,
        kind: str,
        num_actors: int,
        call: Callable[[int, list[Q]], Awaitable[Mapping[str, A]]],
        on_death: Callable[[int, ActorLost], None],
        *,
        tasks: BackgroundTasks,
        max_fruitless_restarts: int = MAX_FRUITLESS_RESTARTS,
        num_calls: int = 1,
    ) -> None:
        """`call(index, requests)` hands an actor requests; its new answers by id. One has up to `num_calls` at once.

        An actor may die `max_fruitless_restarts` times in a row without an answer; each time `on_death` is called.
        """
        self.kind = kind
        self.num_restarts = 0
        self.lost: set[int] = set()
        self.absent: set[int] = set()
        """Actors that get no requests, as they have left and not joined again."""
        self._actors = [_Actor[Q, A]() for _ in range(num_actors)]
        self._call, self._on_death, self._tasks = call, on_death, tasks
        self._max_fruitless, self._max_calls = max_fruitless_restarts, num_calls
        self._new: list[tuple[str, Q, asyncio.Future[A], Sequence[int]]] = []
        self.is_held = False
        """True while `hold` holds back calls."""

    @property
    def num_unfinished(self) -> int:
        return sum(len(actor.owed) for actor in self._actors) + len(self._new)

    @property
    def num_lost(self) -> int:
        """Requests of the actors that are lost, and all others while every actor is absent."""
        waiting = len(self._new) if len(self.absent) == len(self._actors) else 0
        return sum(len(self._actors[index].owed) for index in self.lost) + waiting

    def called(self) -> list[str]:
        """Names of actors with an unanswered call. Any thread may ask."""
        return [f"{self.kind} {index}" for index, actor in enumerate(self._actors) if actor.calls]

    def unanswered(self) -> list[Q]:
        """The unfinished requests."""
        dealt = [request for actor in self._actors for request, _ in list(actor.owed.values())]
        return [*dealt, *(request for _, request, _, _ in self._new)]

    def missing(self, more: str = "") -> str:
        """The unfinished requests, for messages: `12 rollouts (0/train:7/3 of engine 0 and others)`."""
        first = next(
            (
                f"{next(iter(actor.owed))} of {self.kind} {index}"
                for index, actor in enumerate(self._actors)
                if actor.owed
            ),
            "none",
        )
        return f"{self.num_unfinished} rollouts ({first} and others{more})"

    async def ask(self, request_id: str, request: Q, among: Sequence[int] = ()) -> A:
        """The answer to a request, of any actor, or of one `among` these."""
        loop = asyncio.get_running_loop()
        if not self._new:  # all that is asked now is dealt out together
            loop.call_soon(self._deal)
        self._new.append((request_id, request, answer := loop.create_future(), among))
        return await answer

    def begin(self, index: int) -> None:
        """Starts carrying requests to an actor; after a restart it gets all unanswered ones again."""
        actor = self._actors[index]
        actor.unsent = [request for request, _ in actor.owed.values()]
        if actor.task is not None:
            actor.task.cancel()
        actor.task = self._tasks.begin(self._serve(index, actor))

    def leave(self, index: int) -> tuple[int, bool]:
        """Deals a dead actor's requests to the others, or keeps them until one joins.

        Gives their number, and whether another actor may be started, as it has not died too often without an answer.
        """
        actor = self._actors[index]
        if actor.task is not None:
            actor.task.cancel()
        actor.num_fruitless += 1
        self.num_restarts += index not in self.absent
        self.absent.add(index)
        owed, actor.owed, actor.unsent = actor.owed, {}, []
        self._new += [(request_id, request, answer, ()) for request_id, (request, answer) in owed.items()]
        self._deal()
        return len(owed), actor.num_fruitless <= self._max_fruitless

    def join(self, index: int) -> None:
        """Deals requests to an actor that was absent, too."""
        self.absent.discard(index)
        self.lost.clear()
        self.begin(index)
        self._deal()

    def end(self, index: int, log_file: Path) -> int:
        """Stops carrying to a dead actor; its number of unanswered requests. RuntimeError: it dies too often."""
        actor = self._actors[index]
        if actor.task is not None:
            actor.task.cancel()
        actor.num_fruitless += 1
        if actor.num_fruitless > self._max_fruitless:
            times = f"{actor.num_fruitless} times in a row without finishing a rollout"
            raise RuntimeError(f"{self.kind} {index} died {times}; see {log_file}")
        self.num_restarts += 1
        self.lost.discard(index)
        return len(actor.owed)

    def note_answer(self, index: int) -> None:
        """Notes that an actor has answered another call."""
        self._actors[index].num_fruitless = 0

    def hold(self, is_held: bool) -> None:
        """Holds back further calls while `is_held`."""
        self.is_held = is_held
        self._wake()

    def _deal(self) -> None:
        loads = [(len(actor.owed), index) for index, actor in enumerate(self._actors) if index not in self.absent]
        if not loads:
            return
        heapify(loads)
        new, self._new = self._new, []
        for request_id, request, answer, among in new:
            if among:
                index = min(among, key=lambda one: (len(self._actors[one].owed), one))
            else:
                load, index = loads[0]
                heapreplace(loads, (load + 1, index))
            self._actors[index].owed[request_id] = request, answer
            self._actors[index].unsent.append(request)
        self._wake()

    def _wake(self) -> None:
        for actor in self._actors:
            if actor.woken is not None and not actor.woken.done() and self._wants_call(actor):
                actor.woken.set_result(None)

    def _wants_call(self, actor: _Actor[Q, A]) -> bool:
        is_due = actor.unsent or (actor.owed and not actor.calls)
        return bool(is_due) and len(actor.calls) < self._max_calls and not self.is_held

    async def _serve(self, index: int, actor: _Actor[Q, A]) -> None:
        try:
            await self._carry(index, actor)
        except ActorLost as lost:
            self._on_death(index, lost)

    async def _carry(self, index: int, actor: _Actor[Q, A]) -> None:
        calls = actor.calls = set()
        try:
            while True:
                if self._wants_call(actor):
                    unsent, actor.unsent = actor.unsent, []
                    calls.add(asyncio.ensure_future(self._call(index, unsent)))
                actor.woken = asyncio.get_running_loop().create_future()
                done, _ = await asyncio.wait({*calls, actor.woken}, return_when=asyncio.FIRST_COMPLETED)
                for call in calls & done:
                    calls.remove(call)
                    for request_id, answer in (await call).items():
                        actor.num_fruitless = 0
                        actor.owed.pop(request_id)[1].set_result(answer)
        finally:
            for call in calls:
                call.cancel()
            calls.clear()


class ActorWork(Generic[A]):
    """An actor's work, a coroutine per request, and its answers since they were taken last. Lives in an event loop."""

    def __init__(self) -> None:
        self._tasks = BackgroundTasks()
        self.begin = self._tasks.begin
        """Starts work in the background; `take` raises its errors."""
        self._answers: dict[str, A] = {}
        self._num_takes = 0

    def answer(self, request_id: str, answer: A) -> None:
        """Notes the answer to a request."""
        self._answers[request_id] = answer
        if len(self._answers) == 1:
            self._tasks.wake()

    async def take(self, limit_s: float, *, gather_s: float) -> dict[str, A]:
        """Waits up to `limit_s` for the first answer, then `gather_s` for others under way; all answers by request id.

        A later call ends the waits of an earlier one.
        """
        self._num_takes += 1
        take = self._num_takes
        self._tasks.wake()
        await self._wait(take, lambda: bool(self._answers), limit_s)
        if self._answers:
            await self._wait(take, lambda: self._tasks.are_over, gather_s)
        answers, self._answers = self._answers, {}
        return answers

    async def _wait(self, take: int, is_enough: Callable[[], bool], limit_s: float) -> None:
        end = time.monotonic() + limit_s
        self._tasks.raise_first()
        while not (is_enough() or take < self._num_takes) and (left_s := end - time.monotonic()) > 0:
            await self._tasks.news(left_s)
            self._tasks.raise_first()
