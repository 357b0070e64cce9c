# SPDX-License-Identifier: Apache-2.0
"""The engines as a gateway sees them: whom a question goes to, and who answers when one dies. Needs no vLLM."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from starlette.exceptions import HTTPException

from mrl.rollout.agent_session import AgentSession
from mrl.rollout.callers import Answered, Ask, EngineLost, Params, Prompt

logger = logging.getLogger(__name__)

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
