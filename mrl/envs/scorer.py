# SPDX-License-Identifier: Apache-2.0
"""Starts environments by name, and scores rollouts while others are still generated, with a thread per environment.

A rollout has a deadline from when a child begins it. What waits for a child waits as long as it takes: to mask it would leave out the
rollouts of a step that are slow to judge or late, and so bias the batch.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mrl.config.schema.env import BUILT_IN
from mrl.envs import own
from mrl.envs.confine import landlock_abi
from mrl.envs.pool import Feed, RewardPool
from mrl.envs.scratch import remove_abandoned
from mrl.envs.task import MASK_SAMPLE, Environment, Task
from mrl.envs.workers import MIN_WORKERS
from mrl.types import Verdict

if TYPE_CHECKING:
    from mrl.config.schema.env import EnvConfig

logger = logging.getLogger(__name__)

ENVIRONMENTS: Mapping[str, Callable[[EnvConfig], Environment]] = {name: import_module(f"mrl.envs.{name}").environment for name in BUILT_IN}
"""The built-in environments; each module declares its own."""


def build_environment(name: str, config: EnvConfig, *, num_workers: int = MIN_WORKERS, endpoints: Path | None = None) -> RewardPool:
    """The environment of this name, with as many children: a built-in one, one of `env.own.functions`, or one of an installed package.

    `endpoints` is the file with the addresses of the engines, if they have any, for the user's own functions. A RuntimeError says that the
    children do not start, for example because the user's function cannot be imported, or that this host cannot confine programs.
    """
    remove_abandoned()
    if landlock_abi() == 0:
        logger.warning("The reward children of %s may write files: this kernel has no Landlock; see python -m mrl.doctor", name)
    declare = ENVIRONMENTS.get(name)
    declared = declare(config) if declare else own.environment(name, config, endpoints)
    return RewardPool(dataclasses.replace(declared, name=name, num_workers=num_workers))


class Judge(Protocol):
    """Judges rollouts; see `RewardPool.score`."""

    def score(self, tasks: Sequence[Task], feed: Feed) -> list[Verdict]: ...


@dataclass(frozen=True)
class Answer:
    """A rollout to judge."""

    request_id: str
    env_name: str
    task: Task


@dataclass(frozen=True)
class Load:
    """How children kept up with the rollouts, over some time."""

    longest_queue: int = 0
    """Most rollouts that waited for a child."""
    num_begun: int = 0
    """Rollouts that children began."""
    wait_s: float = 0.0
    """Seconds that those had waited, added up."""
    longest_wait_s: float = 0.0

    def __add__(self, other: Load) -> Load:
        """Of one actor at two times, or of two actors at once."""
        return Load(
            max(self.longest_queue, other.longest_queue),
            self.num_begun + other.num_begun,
            self.wait_s + other.wait_s,
            max(self.longest_wait_s, other.longest_wait_s),
        )


@dataclass(frozen=True)
class Scored:
    """What a scorer has done since the last look."""

    verdicts: Mapping[str, Verdict]
    """By request id."""
    seconds: float
    """In which a rollout was being scored."""
    load: Load


class Scorer:
    """Judges answers in the order in which they arrive: a round of an environment takes all that wait for it, and those that come."""

    def __init__(self, build: Callable[[str], Judge], names: Sequence[str], *, timeout_s: float, masks_flagged: bool = True) -> None:
        """`build` starts an environment: those of `names` now, within `timeout_s`, others when a rollout first needs them.

        With `masks_flagged`, rollouts that their environment flags with `mask_sample` are not valid.
        """
        self.environments: dict[str, Judge] = {}
        self._build = build
        self._masks_flagged = masks_flagged
        # The children of an environment end with the thread that started them.
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._changed = threading.Condition()
        self._waiting: defaultdict[str, deque[Answer]] = defaultdict(deque)
        self._rounds: list[Future[None]] = []
        self._queued_at: dict[str, float] = {}
        """When a rollout without a child yet came, by request id."""
        self._num_unjudged = 0
        self._verdicts: dict[str, Verdict] = {}
        self._load = Load()
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
                self._queued_at[answer.request_id] = time.monotonic()
            self._num_unjudged += len(answers)
            self._load += Load(longest_queue=len(self._queued_at))
        for name in dict.fromkeys(answer.env_name for answer in answers):
            self._rounds.append(self._thread(name).submit(self._score_waiting, name))

    def take(self, timeout_s: float, *, waits_for_all: bool) -> Scored:
        """What has been done since the last call; waits up to `timeout_s` for the first new verdict, or for all that is missing.

        A RuntimeError says that an environment failed; see `RewardPool.score`.
        """

        def is_enough() -> bool:
            return bool(self._num_unjudged == 0 if waits_for_all else self._verdicts) or any(map(_has_failed, self._rounds))

        with self._changed:
            self._changed.wait_for(is_enough, timeout_s)
            verdicts, self._verdicts = self._verdicts, {}
            load, self._load = self._load, Load(longest_queue=len(self._queued_at))
            self._note_seconds()
            seconds, self._seconds = self._seconds, 0.0
        for scored in filter(_has_failed, self._rounds):
            scored.result(timeout=0.0)
        self._rounds = [scored for scored in self._rounds if not scored.done()]
        return Scored(verdicts, seconds, load)

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

    def _note_seconds(self) -> None:
        now = time.monotonic()
        if self._num_busy:
            self._seconds += now - self._busy_since
        self._busy_since = now

    def _score_waiting(self, name: str) -> None:
        with self._changed:
            answers = self._take_waiting(name)
            if not answers:
                return  # an earlier round took them along
            self._note_seconds()
            self._num_busy += 1
        unjudged: defaultdict[Task, list[Answer]] = defaultdict(list)

        def note(answers: Sequence[Answer]) -> list[Task]:
            for answer in answers:
                unjudged[answer.task].append(answer)
            return [answer.task for answer in answers]

        def more() -> list[Task]:
            with self._changed:
                return note(self._take_waiting(name))

        def tell(task: Task, verdict: Verdict | None) -> None:
            with self._changed:
                if verdict is None:
                    self._begin(unjudged[task])
                else:
                    self._give(unjudged.pop(task, []), verdict)

        try:
            tasks = note(answers)
            for task, verdict in zip(tasks, self._environment(name).score(tasks, Feed(tell, more)), strict=True):
                tell(task, verdict)
        finally:
            with self._changed:
                self._note_seconds()
                self._num_busy -= 1
                self._changed.notify_all()

    def _take_waiting(self, name: str) -> list[Answer]:
        answers = list(self._waiting[name])
        self._waiting[name].clear()
        return answers

    def _begin(self, answers: Sequence[Answer]) -> None:
        # A second try of a task has waited for nobody.
        waits_s = [time.monotonic() - self._queued_at.pop(answer.request_id) for answer in answers if answer.request_id in self._queued_at]
        self._load += Load(num_begun=len(answers), wait_s=sum(waits_s), longest_wait_s=max(waits_s, default=0.0))

    def _give(self, answers: Sequence[Answer], verdict: Verdict) -> None:
        if self._masks_flagged and verdict.is_valid and MASK_SAMPLE in verdict.flags:
            reason = "its environment flags it with mask_sample"
            verdict = dataclasses.replace(verdict, is_valid=False, status="flagged", reason=reason)
        for answer in answers:
            self._queued_at.pop(answer.request_id, None)
            self._verdicts[answer.request_id] = verdict
            self._num_unjudged -= 1
            if not verdict.is_valid:
                logger.warning("Rollout %s (%s) is not scored: %s", answer.request_id, answer.env_name, verdict.reason)
        self._changed.notify_all()


def _has_failed(scored: Future[None]) -> bool:
    return scored.done() and scored.exception(timeout=0.0) is not None
