# SPDX-License-Identifier: Apache-2.0
"""Queue of questions from other threads of an engine's process. The engine's stepping thread takes and answers them."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from vllm import RequestOutput, SamplingParams
    from vllm.inputs import EngineInput


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


TakeRoutes = Callable[[Sequence[str], "RequestOutput"], "Sequence[np.ndarray | None] | None"]
"""Takes the routes of each answer in an output, by vLLM's ids of the answers."""


class Callers:
    """Questions to an engine. Any thread may `ask` and `withdraw`; the rest is for the thread that steps the engine."""

    def __init__(self, num_slots: int) -> None:
        """`num_slots` answers may be in the engine at the same time; further questions wait here, in order."""
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
        """Returns the questions that have slots now, in order, and the ids of questions inside that were withdrawn."""
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
