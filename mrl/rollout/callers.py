# SPDX-License-Identifier: Apache-2.0
"""Questions to engines besides rollouts. Needs no vLLM.

At the gateway: which engine gets a question, and who answers when one dies. At an engine: the one thread that touches
it, which steps and answers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

from starlette.exceptions import HTTPException

from conversion.files.limits import deferred
from mrl import spans
from mrl.rollout.agent_session import AgentSession

if TYPE_CHECKING:
    import numpy as np
    from vllm import RequestOutput, SamplingParams
    from vllm.inputs import EngineInput

    from mrl.types import Rollout

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EngineLost(Exception):
    """An engine has died; it may not have answered."""


@dataclass(frozen=True)
class Answered:
    """The answer of vLLM to a question."""

    output: RequestOutput
    weight_version: int
    """Version of the engine when it took the question in: no token is older."""
    num_weight_versions: int
    """Number of versions of the engine until the answer was complete: 1 unless a refit came in between."""
    is_forced: bool = False
    """True when a schema or grammar chose among the tokens."""
    routes: Sequence[np.ndarray | None] | None = None
    """Routes of each answer, as in `mrl.types.Rollout`, where the engine knows them; None where none are kept."""


@dataclass(frozen=True)
class Question:
    """One request, in vLLM's own terms."""

    question_id: str
    """Unique."""
    prompt: EngineInput
    params: SamplingParams
    answer: Callable[[Answered | Exception], None]
    """Gets the answer, or the reason for a refusal; called once, by the thread that steps the engine, unless the
    question is withdrawn.
    """


Prompt: TypeAlias = "EngineInput"
Params: TypeAlias = "SamplingParams"
Ask = Callable[[Prompt, Params], Awaitable[Answered]]
"""Asks an engine; raises its reason for a refusal."""
Sent = tuple[str, Prompt, Params]
"""A question that comes from another process: unique id, prompt and parameters."""
TakeRoutes = Callable[[Sequence[str], "RequestOutput"], "Sequence[np.ndarray | None] | None"]
"""Takes the routes of each answer in an output, by vLLM's ids of the answers."""


class Callers:
    """Questions to an engine. Any thread may `ask` and `withdraw`; the rest is for the thread that steps the engine."""

    def __init__(self, num_slots: int) -> None:
        """`num_slots` answers may be in the engine together; further questions wait here, in order."""
        self._num_slots = num_slots
        self._waiting: deque[Question] = deque()
        self._coming: queue.SimpleQueue[Question | str] = queue.SimpleQueue()
        self._asked: dict[str, tuple[Question, str, int, int]] = {}

    def ask(self, question: Question) -> None:
        """Queues a question. ValueError: it wants more answers than there are slots, and would block all others."""
        if question.params.n > self._num_slots:
            raise ValueError(
                f"n={question.params.n} is more than the {self._num_slots} slots of http_server_share; ask for fewer"
            )
        self._coming.put(question)

    def withdraw(self, question_id: str) -> None:
        """Drops a question whose asker has gone."""
        self._coming.put(question_id)

    @property
    def are_waiting(self) -> bool:
        """True while a question has no answer yet."""
        return bool(self._asked or self._waiting) or not self._coming.empty()

    @property
    def num_inside(self) -> int:
        """Answers that the engine owes to questions inside."""
        return sum(question.params.n for question, *_ in self._asked.values())

    def take(self) -> tuple[list[Question], list[str]]:
        """The questions that have slots now, in order, and the ids of questions inside that were withdrawn."""
        withdrawn = []
        for _ in range(self._coming.qsize()):
            item = self._coming.get_nowait()
            if isinstance(item, Question):
                self._waiting.append(item)
            elif self._asked.pop(item, None) is not None:
                withdrawn.append(item)
            else:
                self._waiting = deque(question for question in self._waiting if question.question_id != item)
        taken = []
        num_free = self._num_slots - self.num_inside
        while self._waiting and self._waiting[0].params.n <= num_free:
            taken.append(self._waiting.popleft())
            num_free -= taken[-1].params.n
        return taken, withdrawn

    def note(self, question: Question, vllm_id: str, *, weight_version: int, num_refits: int) -> None:
        """Records that the engine has accepted a question: vLLM's id of it, weight version, and number of refits."""
        self._asked[question.question_id] = (question, vllm_id, weight_version, num_refits)

    def answer(
        self, output: RequestOutput, *, num_refits: int, take_routes: TakeRoutes = lambda ids, output: None
    ) -> bool:
        """Passes an output of vLLM to its asker; False if nobody asked. `num_refits`: refits so far; see `note`."""
        found = self._asked.pop(output.request_id, None)
        if found is not None:
            question, vllm_id, weight_version, earlier = found
            # vLLM names the parts of a request for several answers so.
            ids = [vllm_id] if question.params.n == 1 else [f"{index}_{vllm_id}" for index in range(question.params.n)]
            is_forced = question.params.structured_outputs is not None
            question.answer(
                Answered(output, weight_version, 1 + num_refits - earlier, is_forced, take_routes(ids, output))
            )
        return found is not None


Client = tuple[int, str]
"""A process that asks: its place among the gateways, and a name that another process in that place has not had."""


@dataclass
class _Owed:
    """Questions of a client without an answer, and answers that it has not taken."""

    client: Client
    ids: set[str] = field(default_factory=set)
    answers: queue.SimpleQueue[tuple[str, Answered | ValueError]] = field(default_factory=queue.SimpleQueue)


class RemoteCallers:
    """Callers of other processes, the gateways: hand questions in, and take answers. Any thread may call both."""

    def __init__(self, callers: Callers, wake: Callable[[], None]) -> None:
        """`wake` makes the owner step the engine."""
        self._callers, self._wake = callers, wake
        self._clients: dict[int, _Owed] = {}
        self.num_answered = 0
        """Answers since the start."""

    def ask(self, client: Client, questions: Sequence[Sent], withdrawn: Sequence[str]) -> None:
        """Queues questions, drops those `withdrawn`, and those of an earlier client in its place, which has died."""
        owed = self._clients.get(client[0])
        if owed is None or owed.client != client:
            withdrawn = [] if owed is None else list(owed.ids)
            owed = self._clients[client[0]] = _Owed(client)
        ids, answers = owed.ids, owed.answers
        for question_id in withdrawn:
            ids.discard(question_id)
            self._callers.withdraw(question_id)
        for question_id, prompt, params in questions:

            def answer(answered: Answered | Exception, question_id: str = question_id) -> None:
                ids.discard(question_id)
                self.num_answered += 1
                # Another process may not be able to read an error of vLLM's.
                is_refused = isinstance(answered, Exception)
                answers.put((question_id, ValueError(str(answered)) if is_refused else answered))

            ids.add(question_id)
            try:
                self._callers.ask(Question(question_id, prompt, params, answer))
            except ValueError as error:
                answer(error)
        self._wake()

    def take(self, client: Client, limit_s: float) -> list[tuple[str, Answered | ValueError]]:
        """Answers to this client, with the ids of their questions; waits up to `limit_s` for the first."""
        owed, found = self._clients.get(client[0]), list[tuple[str, Answered | ValueError]]()
        if owed is None or owed.client != client:
            return found
        with suppress(queue.Empty):
            found.append(owed.answers.get(timeout=limit_s))
            while True:
                found.append(owed.answers.get_nowait())
        return found


LOOK_S = 60.0
"""A call takes as long as it takes: a wait for it begins anew after this long."""


class Stepped(Protocol):
    """An engine: `mrl.rollout.engine.Engine`."""

    callers: Callers

    @property
    def can_sample(self) -> bool: ...
    def step(self) -> list[Rollout]: ...


class EngineThread:
    """A thread that lives as long as the process. The engine is built in it, too: a GPU is a thread's choice."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._engine: Stepped | None = None
        self.finished: list[Rollout] = []
        """Rollouts that steps for callers have finished; only tasks of `do` may take them."""
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def do(self, function: Callable[[], T]) -> T:
        """Runs `function` in the thread, after earlier calls; returns its result, or raises its error."""
        outcome, task = deferred(function)
        self._tasks.put(task)
        while not wait([outcome], timeout=LOOK_S).done:
            pass
        return outcome.result(timeout=0)

    def serve(self, engine: Stepped) -> None:
        """Steps this engine from now on, between two tasks, while it has callers and can sample."""
        self._engine = engine

    def wake(self) -> None:
        """Makes the thread look for questions of callers. Any thread may call it."""
        self._tasks.put(lambda: None)

    def _run(self) -> None:
        while True:
            engine = self._engine
            is_asked = engine is not None and engine.can_sample and engine.callers.are_waiting
            try:
                task = self._tasks.get(timeout=0 if is_asked else LOOK_S)
            except queue.Empty:
                if engine is not None and is_asked:
                    self._step(engine)
            else:
                task()

    def _step(self, engine: Stepped) -> None:
        start = time.monotonic()
        try:
            self.finished += engine.step()
        except Exception:
            # Nobody waits for this step. The driver starts an engine that is gone again.
            logger.exception("A step for requests over HTTP failed; ending the engine")
            os._exit(1)
        spans.stretch("serve HTTP", start)
        if not engine.callers.are_waiting:
            spans.end_stretch()


# After no engine has answered; an engine that dies is started again within minutes.
RETRY_S = 0.5
WARN_S = 60.0


class Line(Protocol):
    """One engine, as the gateway reaches it. Both raise EngineLost."""

    async def ask(self, prompt: Prompt, params: Params) -> Answered: ...

    async def health(self) -> tuple[bool, int | None]:
        """Tells whether it can sample now, and its weight version."""
        ...


class EngineLines:
    """The engines. One that has died is left out of a question."""

    def __init__(self, first: int = 0, name: str = "engine") -> None:
        """`first` is the engine that gets the first session: several gateways begin with different ones."""
        self._first, self.name = first, name
        self._engines: list[Line] = []
        self._loads: dict[int, int] = {}
        """Number of sessions, by engine."""
        self._asking: dict[int, set[asyncio.Future[Answered]]] = {}
        """Questions under way, by engine."""

    @property
    def num_asked(self) -> int:
        """Questions under way at engines."""
        return sum(map(len, self._asking.values()))

    def set(self, engines: Sequence[Line]) -> None:
        """Sets the engines, by index. Questions to one that was replaced are asked again."""
        before, self._engines = self._engines, list(engines)
        for index, asking in self._asking.items():
            if self._engines[index : index + 1] != before[index : index + 1]:
                for one in list(asking):
                    one.cancel()  # its node may have gone without a word

    def asked_by(self, session: AgentSession) -> Ask:
        """A session's way to its engine, or to another if it dies."""
        return lambda prompt, params: self.ask(prompt, params, session=session)

    async def ask(
        self,
        prompt: Prompt,
        params: Params,
        *,
        session: AgentSession | None = None,
        first: int | None = None,
    ) -> Answered:
        """The answer of the session's engine, or of engine `first`, or of another if it has died.

        Waits while there is none, as long as the asker does.
        """
        warned_at = time.monotonic()
        while True:
            for index in self._in_order(session.asks if session is not None else first):
                if session is not None and session.asks != index:
                    self.join(session, index)  # at once, so that sessions that begin together ask different engines
                answered = await self._try(index, prompt, params)
                if answered is not None:
                    if session is not None and session.engines[-1:] != [index]:
                        session.engines.append(index)
                    return answered
            if time.monotonic() > warned_at + WARN_S:
                warned_at = time.monotonic()
                logger.warning("No %s has answered for %g s; requests wait for one", self.name, WARN_S)
            await asyncio.sleep(RETRY_S)

    async def health(self, index: int) -> tuple[bool, int | None]:
        """See `Line.health`. HTTPException: there is no such engine, or it is dead."""
        if index >= len(self._engines):
            raise HTTPException(404, f"no engine {index}: there are {len(self._engines)}")
        try:
            return await self._engines[index].health()
        except EngineLost as lost:
            raise HTTPException(503, str(lost)) from lost

    def join(self, session: AgentSession, index: int) -> None:
        """Assigns the session to this engine."""
        self.leave(session)
        session.asks, self._loads[index] = index, self._loads.get(index, 0) + 1

    def leave(self, session: AgentSession) -> None:
        """Takes the session from its engine."""
        if session.asks is not None:
            self._loads[session.asks] -= 1
            session.asks = None

    def _in_order(self, first: int | None) -> list[int]:
        """Orders engines: `first`, whose cache may have the conversation, then by fewest sessions, fewest questions."""
        num = len(self._engines)

        def place(index: int) -> tuple[bool, int, int, int]:
            asking = len(self._asking.get(index, ()))
            return index != first, self._loads.get(index, 0), asking, (index - self._first) % num

        return sorted(range(num), key=place)

    async def _try(self, index: int, prompt: Prompt, params: Params) -> Answered | None:
        asked = asyncio.ensure_future(self._engines[index].ask(prompt, params))
        asking = self._asking.setdefault(index, set())
        asking.add(asked)
        try:
            return await asked
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            return None
        except EngineLost as lost:
            logger.warning("Requests to %s %d are asked again: %s", self.name, index, lost)
            return None
        finally:
            asking.discard(asked)
