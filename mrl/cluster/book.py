# SPDX-License-Identifier: Apache-2.0
"""Books of requests: the driver's, each given to an actor until answered, and an actor's work on them. Needs no Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from pathlib import Path
from typing import Generic, TypeVar

from mrl.cluster.errors import ActorLost
from mrl.cluster.tasks import BackgroundTasks

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
