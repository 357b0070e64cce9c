# SPDX-License-Identifier: Apache-2.0
"""A service: actors of one kind, which the driver starts, asks, watches and starts again. A row for each kind."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import ray

from mrl.cluster.calls import Actors, answered
from mrl.cluster.errors import ActorLost
from mrl.cluster.scheduling import ENGINE, JUDGE
from mrl.cluster.tasks import GENERATION, MAX_FRUITLESS_RESTARTS, VERDICTS, BackgroundTasks, RequestBook
from mrl.config.texts import rounded

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)
V = TypeVar("V")
Q = TypeVar("Q")
A = TypeVar("A")
R = TypeVar("R")
T = TypeVar("T")
LOOK_S = 5.0
"""Seconds between two looks at an actor that nobody may be asking."""
ANSWER_S = 1.0
"""An actor that has no answer says so this often, as a sign of life."""
STUCK_S = 60.0
"""Its loop answers at once, unless the kernel keeps it from its work, or from starting or killing a child."""
NUM_THREADS = 5
"""Calls at once: one hands requests in, another waits for answers; a look, news of engines, and what tests ask."""


@dataclass(frozen=True)
class ServiceKind:
    """One kind of actors: its words in messages, and how it is asked and restarted."""

    name: str
    wait: str
    """Name of the driver's wait for answers."""
    log: str
    requests: str = ""
    """Unanswered requests that the driver has given it, for messages; "" if others ask it."""
    num_calls: int = 2
    """Calls under way at once: with two, one hands requests in while the other waits for answers."""
    is_lone: bool = True
    """True where most runs have one: the log of actor 0 has no number."""
    waits_for_refit: bool = False
    """True for actors that `EngineGroup.restart` starts again, before a refit; the others are at once."""


ENGINES = ServiceKind(ENGINE, GENERATION, ENGINE, "requests", num_calls=1, is_lone=False, waits_for_refit=True)
REWARDS = ServiceKind("reward actor", VERDICTS, "rewards", "unjudged rollouts")
GATEWAYS = ServiceKind("gateway", GENERATION, "gateway", "rollouts of its agents")


def judges_kind(name: str) -> ServiceKind:
    """The engines of a judge, for messages: `judge fair engine`."""
    return ServiceKind(f"{JUDGE} {name} engine", VERDICTS, f"{JUDGE}-{name}", is_lone=False)


class Service(Actors[V], ABC, Generic[V, Q, A, R]):
    """Actors, and a `book` that carries requests `Q` to them and answers `A` back; `R` is the answer to a start."""

    def __init__(
        self,
        service: ServiceKind,
        num_actors: int,
        *,
        tasks: BackgroundTasks,
        log_folder: Path,
        deadline_s: float,
        start_s: float,
        look_s: float | None = None,
        max_restarts: int = MAX_FRUITLESS_RESTARTS,
        on_death: Callable[[int, ActorLost], None] | None = None,
    ) -> None:
        """Starts the actors. A call may take `deadline_s`, a start `start_s`; for `max_restarts` see `RequestBook`.

        An actor that gives no sign of life for `look_s` is started again; None: who asks it notices. `on_death(index,
        lost)`, in the event loop, replaces what the kind of service does, after a failed start, too.
        """
        super().__init__(service.name, deadline_s=deadline_s)
        self.service, self.tasks, self.log_folder = service, tasks, log_folder
        self.start_s, self._look_s = start_s, look_s
        self._may_go = on_death is not None
        self._on_death = on_death or (self._lose if service.waits_for_refit else self._restart)
        self.book = RequestBook[Q, A](
            service.name,
            num_actors,
            self._carry,
            self._on_death,
            tasks=tasks,
            max_fruitless_restarts=max_restarts,
            num_calls=service.num_calls,
        )
        self.on_up: Callable[[], None] = lambda: None
        """Called in the event loop whenever an actor is up, after a restart, too."""
        self._starts: dict[int, ray.ObjectRef[R]] = {}
        self._newest: dict[int, ActorHandle[Any]] = {}
        """The actor that was started last: it may wait for its place while `handles` still has the dead one."""
        self.handles = [self._start(index) for index in range(num_actors)]
        for index in range(num_actors):
            self.book.begin(index)
            self._watch_soon(index)

    @abstractmethod
    def _launch(self, index: int) -> tuple[ActorHandle[Any], ray.ObjectRef[R]]:
        """Starts an actor; its handle, and a call that ends when it is up."""

    @abstractmethod
    async def _carry(self, index: int, requests: list[Q]) -> Mapping[str, A]:
        """Hands requests to an actor; see `RequestBook`."""

    async def _answer(self, call: Any, index: int, *arguments: object) -> tuple[Any, ray.ObjectRef]:
        """The answer of a method of an actor that returns packed items beside it, and a reference to these."""
        answer, items = call.options(num_returns=2).remote(*arguments)
        return await answered(answer, actor=self.name(index), what=self.service.wait), items

    def wait_until_up(self) -> dict[int, R]:
        """Waits until all actors are up that are not absent; their answers to the start, by index."""
        absent = self.book.absent
        pending = {self.name(index): start for index, start in self._starts.items() if index not in absent}
        return self.wait(pending, deadline_s=self.start_s, what="start")

    async def up(self, index: int) -> None:
        """Waits until an actor is up, in the event loop. ActorLost: it has died."""
        await answered(self._starts[index], actor=self.name(index), what="start")

    def log_file(self, index: int) -> Path:
        number = "" if self.service.is_lone and not index else f"-{index}"
        return self.log_folder / f"{self.service.log}{number}.log"

    def start_again(self, index: int, reason: object) -> None:
        """Replaces a dead actor, in the event loop; its requests wait. RuntimeError: it dies too often."""
        num_requests, requests = self.book.end(index, self.log_file(index)), self.service.requests
        logger.warning("%s; starting it again%s", reason, f", with its {requests} ({num_requests})" if requests else "")
        ray.kill(self.handles[index])
        self.handles[index] = self._start(index)
        self._watch_soon(index, self.start_s)

    def _start(self, index: int) -> ActorHandle[Any]:
        self._newest[index], self._starts[index] = self._launch(index)
        return self._newest[index]

    def _lose(self, index: int, lost: ActorLost) -> None:
        if index in self.book.lost or lost.what == "start":  # the owner waits for starts
            return
        logger.warning("%s; it is started again at the next refit, or when its rollouts are waited for", lost)
        self.book.lost.add(index)
        self.tasks.tell(self.service.wait)

    def _restart(self, index: int, lost: ActorLost) -> None:
        self.start_again(index, lost)
        self.tasks.tell(self.service.wait, time.monotonic() + self.start_s)
        self.book.begin(index)

    def _watch_soon(self, index: int, start_s: float | None = None) -> None:
        self.tasks.begin(self._watch(index, self._newest[index], start_s))

    async def _watch(self, index: int, handle: ActorHandle[Any], start_s: float | None) -> None:
        """Notices that an actor dies or hangs which nobody asks. Limits its start to `start_s`."""
        try:
            try:
                await self._sign(index, self._starts[index], "start", start_s)
            except (RuntimeError, ValueError) as error:
                if isinstance(error, ActorLost) or not self._may_go:
                    raise
                raise ActorLost(self.name(index), "start", str(error)) from error
            self.on_up()
            while True:
                if await self._sign(index, handle.look.remote(), "work", self._look_s):
                    self.book.note_answer(index)
        except ActorLost as lost:
            if handle is self._newest[index]:
                self._on_death(index, lost)

    async def _sign(self, index: int, reference: ray.ObjectRef[T], what: str, limit_s: float | None) -> T:
        try:
            async with asyncio.timeout(limit_s):
                return await answered(reference, actor=self.name(index), what=what)
        except TimeoutError:
            if ray.wait([reference], timeout=0)[0]:  # the loop was blocked meanwhile
                return await answered(reference, actor=self.name(index), what=what)
            raise ActorLost(self.name(index), what, f"it gave no sign of life for {rounded(limit_s or 0)} s") from None
