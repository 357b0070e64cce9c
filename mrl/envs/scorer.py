"""Scores rollouts while others are still being generated: one thread talks to the environments, whoever hands in rollouts never waits."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from mrl.envs.pool import Item
from mrl.types import Verdict


class Environment(Protocol):
    """What judges rollouts; see `RewardPool.score`."""

    def score(self, items: Sequence[Item], *, gives_up: Callable[[], bool]) -> list[Verdict]: ...


@dataclass(frozen=True)
class Answer:
    """A rollout to be judged."""

    request_id: str
    env_name: str
    item: Item


class Scorer:
    """Judges answers in the order in which they arrive, as many at a time as have arrived."""

    def __init__(self, build: Callable[[], Mapping[str, Environment]], *, timeout_s: float) -> None:
        """`build` starts the environments, by name, within `timeout_s`."""
        # All in one thread: the children of an environment end with the thread that started them.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rewards")
        self.environments = dict(self._thread.submit(build).result(timeout=timeout_s))
        self._waiting: deque[Answer] = deque()
        self._rounds: list[Future[None]] = []
        self._verdicts: dict[str, Verdict] = {}
        self._give_up_at = math.inf
        self._seconds = 0.0

    def submit(self, answers: Sequence[Answer]) -> None:
        """Hands in answers; does not wait."""
        self._waiting.extend(answers)
        self._rounds.append(self._thread.submit(self._score_waiting))

    def collect(self, *, patience_s: float, timeout_s: float) -> tuple[Mapping[str, Verdict], float]:
        """Verdicts of everything handed in since the last call, by request id, and the seconds that they took, waited for or not.

        Answers that are not begun `patience_s` after this call get status `timeout`.

        Raises:
            TimeoutError: there is an answer without a verdict after `timeout_s`.
            RuntimeError: an environment failed; see `RewardPool.score`.
        """
        started = time.monotonic()
        self._give_up_at = started + patience_s
        rounds, self._rounds = self._rounds, []
        for scored in rounds:
            scored.result(timeout=max(0.0, started + timeout_s - time.monotonic()))
        verdicts, self._verdicts = self._verdicts, {}
        seconds, self._seconds = self._seconds, 0.0
        self._give_up_at = math.inf
        return verdicts, seconds

    def close(self) -> None:
        """Drops what waits, and ends the thread, and with it the environments, once what has begun is judged."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _score_waiting(self) -> None:
        started = time.monotonic()
        answers = [self._waiting.popleft() for _ in range(len(self._waiting))]
        for name in dict.fromkeys(answer.env_name for answer in answers):
            asked = [answer for answer in answers if answer.env_name == name]
            scored = self.environments[name].score([answer.item for answer in asked], gives_up=self._gives_up)
            self._verdicts.update((answer.request_id, verdict) for answer, verdict in zip(asked, scored, strict=True))
        self._seconds += time.monotonic() - started

    def _gives_up(self) -> bool:
        return time.monotonic() > self._give_up_at
