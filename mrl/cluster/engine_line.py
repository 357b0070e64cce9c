# SPDX-License-Identifier: Apache-2.0
"""A gateway's line to one engine: questions by Ray, many in one call, and their answers."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING

from mrl.cluster.calls import answered
from mrl.cluster.engines import EngineActor
from mrl.cluster.errors import ActorName
from mrl.rollout.callers import Answered, Client, Params, Prompt, Sent
from mrl.rollout.engine_lines import EngineLost

if TYPE_CHECKING:
    from ray.actor import ActorHandle

# The engine answers so often, as a sign of life.
LISTEN_S = 1.0


class EngineLine:
    """For a gateway's event loop. `client` names its process: engines drop the questions of a dead one."""

    def __init__(self, name: ActorName, handle: ActorHandle[EngineActor], client: Client) -> None:
        self.handle = handle
        self._name, self._client = name, client
        self._owed: dict[str, asyncio.Future[Answered]] = {}
        self._unsent: list[Sent] = []
        self._withdrawn: list[str] = []
        self._sending: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None

    async def ask(self, prompt: Prompt, params: Params) -> Answered:
        """Asks the engine; withdraws the question when the task is cancelled. EngineLost: the engine has died."""
        question_id = uuid.uuid4().hex
        answer = self._owed[question_id] = asyncio.get_running_loop().create_future()
        self._unsent.append((question_id, prompt, params))
        self._send_soon()
        self._listening = self._listening or asyncio.ensure_future(self._listen())
        try:
            return await answer
        finally:
            if self._owed.pop(question_id, None) is not None:
                self._withdrawn.append(question_id)
                self._send_soon()

    async def health(self) -> tuple[bool, int | None]:
        """Tells whether the engine can sample now, and its weight version. EngineLost: it has died."""
        call = self.handle.health.remote()
        try:
            return await answered(call, actor=self._name, what="health")
        except RuntimeError as lost:
            raise EngineLost(str(lost)) from lost

    def _send_soon(self) -> None:
        self._sending = self._sending or asyncio.ensure_future(self._send())

    async def _send(self) -> None:
        """Sends waiting questions and withdrawals, call by call: a question comes before its withdrawal."""
        while self._unsent or self._withdrawn:
            (unsent, self._unsent), (withdrawn, self._withdrawn) = (self._unsent, []), (self._withdrawn, [])
            call = self.handle.ask.remote(self._client, unsent, withdrawn)
            try:
                await answered(call, actor=self._name, what="questions")
            except (RuntimeError, ValueError) as lost:
                self._lose(lost)
        self._sending = None

    async def _listen(self) -> None:
        while self._owed:
            call = self.handle.take_answers.remote(self._client, LISTEN_S)
            try:
                answers = await answered(call, actor=self._name, what="answers")
            except (RuntimeError, ValueError) as lost:
                self._lose(lost)
                break
            for question_id, answer in answers:
                if (asked := self._owed.pop(question_id, None)) is None or asked.done():
                    continue  # withdrawn meanwhile
                if isinstance(answer, Exception):
                    asked.set_exception(answer)
                else:
                    asked.set_result(answer)
        self._listening = None

    def _lose(self, lost: Exception) -> None:
        owed, self._owed = self._owed, {}
        for asked in owed.values():
            if not asked.done():
                asked.set_exception(EngineLost(str(lost)))
