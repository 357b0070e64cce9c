# SPDX-License-Identifier: Apache-2.0
"""Starts environments by name, and scores rollouts while others are still generated, with a thread per environment."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mrl.envs import code, instruction_following, mcqa, own, structured_outputs, workplace_assistant
from mrl.envs import math as mathematics
from mrl.envs.confine import landlock_abi
from mrl.envs.pool import RewardPool
from mrl.envs.scratch import remove_abandoned
from mrl.envs.task import MASK_SAMPLE, Environment, Task
from mrl.types import Verdict

if TYPE_CHECKING:
    from mrl.config.schema.env import EnvConfig

logger = logging.getLogger(__name__)

ENVIRONMENTS: Mapping[str, Callable[[EnvConfig], Environment]] = {
    "math": mathematics.environment,
    "mcqa": mcqa.environment,
    "code": code.environment,
    "instruction_following": instruction_following.environment,
    "structured_outputs": structured_outputs.environment,
    "workplace_assistant": workplace_assistant.environment,
}
"""The built-in environments; each module declares its own."""


def build_environment(name: str, config: EnvConfig, *, endpoints: Path | None = None) -> RewardPool:
    """The environment of this name, started: a built-in one, one of `env.own.functions`, or one of an installed package.

    `endpoints` is the file with the addresses of the engines, if they have any, for the user's own functions. A RuntimeError says that the
    children do not start, for example because the user's function cannot be imported, or that this host cannot confine programs.
    """
    remove_abandoned()
    if landlock_abi() == 0:
        logger.warning("The reward children of %s may write files: this kernel has no Landlock; see python -m mrl.doctor", name)
    declare = ENVIRONMENTS.get(name)
    return RewardPool(declare(config) if declare else own.environment(name, config, endpoints))


class Judge(Protocol):
    """Judges rollouts; see `RewardPool.score`."""

    def score(self, tasks: Sequence[Task], *, gives_up: Callable[[], bool]) -> list[Verdict]: ...


@dataclass(frozen=True)
class Answer:
    """A rollout to judge."""

    request_id: str
    env_name: str
    task: Task


class Scorer:
    """Judges answers in the order in which they arrive: each round of an environment takes all that wait for it."""

    def __init__(
        self,
        build: Callable[[str], Judge],
        names: Sequence[str],
        *,
        timeout_s: float,
        masks_flagged: bool = True,
        keeps_fresh: bool = False,
    ) -> None:
        """`build` starts an environment: those of `names` now, within `timeout_s`, others when a rollout first needs them.

        With `masks_flagged`, rollouts that their environment flags with `mask_sample` are not valid. Set `keeps_fresh` if somebody calls
        `take_fresh`.
        """
        self.environments: dict[str, Judge] = {}
        self.keeps_fresh = keeps_fresh
        self._build = build
        self._masks_flagged = masks_flagged
        # The children of an environment end with the thread that started them.
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._changed = threading.Condition()
        self._waiting: defaultdict[str, deque[Answer]] = defaultdict(deque)
        self._rounds: list[Future[None]] = []
        self._verdicts: dict[str, Verdict] = {}
        self._fresh: dict[str, Verdict] = {}
        self._give_up_at = math.inf
        self._num_busy = 0
        self._busy_since = 0.0
        self._seconds = 0.0
        started = time.monotonic()
        for start in [self._thread(name).submit(self._environment, name) for name in names]:
            start.result(timeout=max(0.0, started + timeout_s - time.monotonic()))

    def submit(self, answers: Sequence[Answer]) -> None:
        """Hands in answers; does not wait."""
        with self._changed:
            for answer in answers:
                self._waiting[answer.env_name].append(answer)
        for name in dict.fromkeys(answer.env_name for answer in answers):
            self._rounds.append(self._thread(name).submit(self._score_waiting, name))

    def take_fresh(self, timeout_s: float) -> dict[str, Verdict]:
        """New verdicts since the last call, by request id; waits up to `timeout_s` for the first. `collect` returns them too.

        A RuntimeError says that an environment failed; see `RewardPool.score`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._fresh or any(map(_has_failed, self._rounds)), timeout_s)
            fresh, self._fresh = self._fresh, {}
        for scored in filter(_has_failed, self._rounds):
            scored.result(timeout=0.0)
        return fresh

    def collect(self, *, patience_s: float, timeout_s: float) -> tuple[Mapping[str, Verdict], float]:
        """Verdicts of all answers since the last call, by request id, and the seconds that they took, waited for or not.

        Answers that have not begun `patience_s` after this call get status `timeout`. Raises TimeoutError if an answer has no verdict after
        `timeout_s`, and RuntimeError if an environment failed.
        """
        started = time.monotonic()
        self._give_up_at = started + patience_s
        rounds, self._rounds = self._rounds, []
        for scored in rounds:
            scored.result(timeout=max(0.0, started + timeout_s - time.monotonic()))
        with self._changed:
            verdicts, self._verdicts = self._verdicts, {}
            seconds, self._seconds = self._seconds, 0.0
        self._give_up_at = math.inf
        return verdicts, seconds

    def close(self) -> None:
        """Drops what waits, and ends the threads, and with them the environments, once the rounds that have begun end."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)

    def _thread(self, name: str) -> ThreadPoolExecutor:
        if name not in self._threads:
            self._threads[name] = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"rewards-{name}")
        return self._threads[name]

    def _environment(self, name: str) -> Judge:
        if name not in self.environments:
            self.environments[name] = self._build(name)
        return self.environments[name]

    def _score_waiting(self, name: str) -> None:
        with self._changed:
            answers = list(self._waiting[name])
            self._waiting[name].clear()
            if not answers:
                return  # an earlier round took them along
            if self._num_busy == 0:
                self._busy_since = time.monotonic()
            self._num_busy += 1
        verdicts: dict[str, Verdict] = {}
        try:
            tasks = [answer.task for answer in answers]
            scored = self._environment(name).score(tasks, gives_up=lambda: time.monotonic() > self._give_up_at)
            for answer, verdict in zip(answers, scored, strict=True):
                if self._masks_flagged and verdict.is_valid and MASK_SAMPLE in verdict.flags:
                    reason = "its environment flags it with mask_sample"
                    verdict = dataclasses.replace(verdict, is_valid=False, status="flagged", reason=reason)
                verdicts[answer.request_id] = verdict
        finally:
            with self._changed:
                self._num_busy -= 1
                if self._num_busy == 0:
                    self._seconds += time.monotonic() - self._busy_since
                self._verdicts.update(verdicts)
                if self.keeps_fresh:
                    self._fresh.update(verdicts)
                self._changed.notify_all()
        for request_id, verdict in verdicts.items():
            if not verdict.is_valid:
                logger.warning("Rollout %s (%s) is not scored: %s", request_id, name, verdict.reason)


def _has_failed(scored: Future[None]) -> bool:
    return scored.done() and scored.exception(timeout=0.0) is not None
