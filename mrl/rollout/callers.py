"""Requests that reach an engine from other threads of its process; the thread that steps the engine takes them in and answers them."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.inputs import EngineInput


@dataclass(frozen=True)
class Answered:
    """What vLLM sampled for a question."""

    output: RequestOutput
    weight_version: int
    """Of the engine when it took the question in: no token is older."""
    num_weight_versions: int
    """How many versions the engine has had meanwhile: 1 unless a refit came in between."""


@dataclass(frozen=True)
class Question:
    """One request, in vLLM's own terms."""

    question_id: str
    """Unlike that of any other."""
    prompt: EngineInput
    params: SamplingParams
    answer: Callable[[Answered | Exception], None]
    """Gets what was sampled, or why the question was refused; called once, by the thread that steps the engine, unless it is withdrawn."""


class Callers:
    """The questions on their way into an engine. `ask` and `withdraw` are for any thread, all else for the one that steps the engine."""

    def __init__(self) -> None:
        self._coming: queue.SimpleQueue[Question | str] = queue.SimpleQueue()
        self._asked: dict[str, tuple[Question, int, int]] = {}

    def ask(self, question: Question) -> None:
        """Hands a question over."""
        self._coming.put(question)

    def withdraw(self, question_id: str) -> None:
        """Nobody waits for the answer any more."""
        self._coming.put(question_id)

    @property
    def are_waiting(self) -> bool:
        """Whether there is a question that has no answer yet."""
        return bool(self._asked) or not self._coming.empty()

    @property
    def has_asked(self) -> bool:
        """Whether the engine has a question that it took in and did not answer yet."""
        return bool(self._asked)

    def take(self) -> list[Question | str]:
        """Questions that have come since the last call, and ids of those that were withdrawn, in order."""
        return [self._coming.get_nowait() for _ in range(self._coming.qsize())]

    def note(self, question: Question, *, weight_version: int, num_refits: int) -> None:
        """The engine has taken a question in, at this version and after so many refits."""
        self._asked[question.question_id] = (question, weight_version, num_refits)

    def forget(self, question_id: str) -> bool:
        """Whether the engine had taken in the question, which gets no answer."""
        return self._asked.pop(question_id, None) is not None

    def answer(self, output: RequestOutput, *, num_refits: int) -> bool:
        """Whether an output of vLLM is the answer to a question; then whoever asked it gets it. `num_refits` as in `note`, now."""
        found = self._asked.pop(output.request_id, None)
        if found is not None:
            question, weight_version, earlier = found
            question.answer(Answered(output, weight_version, 1 + num_refits - earlier))
        return found is not None
