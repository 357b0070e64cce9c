# SPDX-License-Identifier: Apache-2.0
"""Starts environments by name, and judges rollouts in all of them at once, in an event loop, while others are still generated.

A rollout has a deadline from when a child begins it. What waits for a child waits as long as it takes: to mask it would leave out the
rollouts of a step that are slow to judge or late, and so bias the batch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from mrl.config.schema.env import BUILT_IN
from mrl.envs import own
from mrl.envs.confine import landlock_abi
from mrl.envs.pool import Job, RewardPool
from mrl.envs.scratch import remove_abandoned
from mrl.envs.task import MASK_SAMPLE, Environment, Task
from mrl.envs.workers import MIN_WORKERS
from mrl.types import Verdict

if TYPE_CHECKING:
    from mrl.config.schema.env import EnvConfig

logger = logging.getLogger(__name__)

# The loop answers at once, unless the kernel keeps it from starting or from killing a child.
ANSWER_S = 60.0

ENVIRONMENTS: Mapping[str, Callable[[EnvConfig], Environment]] = {name: import_module(f"mrl.envs.{name}").environment for name in BUILT_IN}
"""The built-in environments; each module declares its own."""


async def start_environment(name: str, config: EnvConfig, *, num_workers: int = MIN_WORKERS, endpoints: Path | None = None) -> RewardPool:
    """The environment of this name, with as many children: a built-in one, one of `env.own.functions`, or one of an installed package.

    `endpoints` is the file with the addresses of the engines, if they have any, for the user's own functions. A RuntimeError says that the
    children do not start, for example because the user's function cannot be imported, or that this host cannot confine programs.
    """
    remove_abandoned()
    if landlock_abi() == 0:
        logger.warning("The reward children of %s may write files: this kernel has no Landlock; see python -m mrl.doctor", name)
    declare = ENVIRONMENTS.get(name)
    declared = declare(config) if declare else own.environment(name, config, endpoints)
    return await RewardPool(dataclasses.replace(declared, name=name, num_workers=num_workers)).start()


@dataclass(frozen=True)
class Answer:
    """A rollout to judge."""

    request_id: str
    env_name: str
    task: Task


@dataclass(frozen=True)
class Load:
    """Load of the children over some time."""

    longest_queue: int = 0
    """Most rollouts that waited for a child."""
    num_begun: int = 0
    """Number of rollouts that children have begun."""
    seconds: float = 0.0
    """In which a rollout waited for its verdict."""
    num_judged: int = 0
    """Rollouts with a verdict that a child began for them."""
    wait_s: float = 0.0
    """Seconds that those had waited before, added up."""
    longest_wait_s: float = 0.0

    def __add__(self, other: Load) -> Load:
        """The load of one actor at two times, or of two actors at once."""
        return Load(
            max(self.longest_queue, other.longest_queue),
            self.num_begun + other.num_begun,
            self.seconds + other.seconds,
            self.num_judged + other.num_judged,
            self.wait_s + other.wait_s,
            max(self.longest_wait_s, other.longest_wait_s),
        )


class Scorer:
    """Judges answers in the order in which they arrive. Other threads hand them in and take verdicts; all else is in an event loop."""

    def __init__(self, build: Callable[[str], Awaitable[RewardPool]], *, masks_flagged: bool = True) -> None:
        """`build` starts an environment. With `masks_flagged`, rollouts that theirs flags with `mask_sample` are not valid."""
        self.environments: dict[str, RewardPool] = {}
        self._build = build
        self._masks_flagged = masks_flagged
        self._starting: dict[str, asyncio.Future[RewardPool]] = {}
        self._verdicts: dict[str, Verdict] = {}
        self._error: Exception | None = None
        self._load = Load()
        self._num_unjudged, self._noted_at = 0, 0.0
        self._num_calls, self._num_begun = 0, 0
        self._loop = asyncio.new_event_loop()
        self._news = self._loop.create_future()
        # The kernel kills the children when this thread ends.
        threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True).start()

    def start(self, names: Sequence[str], *, timeout_s: float) -> None:
        """Starts environments now; others start when a rollout first needs them."""

        async def start() -> None:
            await asyncio.gather(*map(self._environment, names))

        asyncio.run_coroutine_threadsafe(start(), self._loop).result(timeout_s)

    def submit(self, answers: Sequence[Answer]) -> None:
        """Hands in answers; does not wait."""
        asyncio.run_coroutine_threadsafe(self._score(answers), self._loop)

    def take(self, timeout_s: float, *, gather_s: float = 0.0) -> tuple[Mapping[str, Verdict], Load]:
        """Waits up to `timeout_s` for the first verdict, then `gather_s` for others; all verdicts by request id, and the load.

        It returns at once when nothing is left to judge, and when another call comes. A RuntimeError says that an environment failed.
        """
        taking = asyncio.run_coroutine_threadsafe(self._take(timeout_s, gather_s), self._loop)
        return taking.result(timeout_s + gather_s + ANSWER_S)

    def close(self) -> None:
        """Ends the thread, and with it the children of all environments."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _environment(self, name: str) -> RewardPool:
        if name not in self.environments:
            if name not in self._starting:
                self._starting[name] = asyncio.ensure_future(self._build(name))
            self.environments[name] = await self._starting[name]
        return self.environments[name]

    async def _score(self, answers: Sequence[Answer]) -> None:
        self._note_unjudged(len(answers))
        by_name: dict[str, list[Answer]] = {}
        for answer in answers:
            by_name.setdefault(answer.env_name, []).append(answer)
        await asyncio.gather(*(self._score_in(name, mine, time.monotonic()) for name, mine in by_name.items()))

    async def _score_in(self, name: str, answers: Sequence[Answer], queued_at: float) -> None:
        try:
            environment = await self._environment(name)
            jobs = environment.submit([answer.task for answer in answers])
            self._load += Load(longest_queue=sum(one.num_waiting for one in self.environments.values()))
            await asyncio.gather(*(self._give(answer, job, queued_at) for answer, job in zip(answers, jobs, strict=True)))
        except Exception as error:  # whoever takes verdicts raises it
            self._error = error
            self._tell()

    async def _give(self, answer: Answer, job: Job, queued_at: float) -> None:
        verdict = await job.verdict
        if job.begun_at >= queued_at:  # an equal rollout may have been begun before, or judged
            wait_s = job.begun_at - queued_at
            self._load += Load(num_judged=1, wait_s=wait_s, longest_wait_s=wait_s)
        if self._masks_flagged and verdict.is_valid and MASK_SAMPLE in verdict.flags:
            reason = "its environment flags it with mask_sample"
            verdict = dataclasses.replace(verdict, is_valid=False, status="flagged", reason=reason)
        if not verdict.is_valid:
            logger.warning("Rollout %s (%s) is not scored: %s", answer.request_id, answer.env_name, verdict.reason)
        self._note_unjudged(-1)
        self._verdicts[answer.request_id] = verdict
        self._tell()

    async def _take(self, timeout_s: float, gather_s: float) -> tuple[Mapping[str, Verdict], Load]:
        self._num_calls += 1
        self._tell()
        await self._wait_until(lambda: bool(self._verdicts), timeout_s)
        await self._wait_until(lambda: self._num_unjudged == 0, gather_s)
        if self._error is not None:
            raise self._error
        self._note_unjudged(0)
        before, self._num_begun = self._num_begun, sum(one.num_begun for one in self.environments.values())
        scored = self._verdicts, self._load + Load(num_begun=self._num_begun - before)
        self._verdicts, self._load = {}, Load()
        return scored

    async def _wait_until(self, is_enough: Callable[[], bool], timeout_s: float) -> None:
        end, call = time.monotonic() + timeout_s, self._num_calls
        while not (is_enough() or self._error is not None or call < self._num_calls or time.monotonic() >= end):
            if self._news.done():
                self._news = self._loop.create_future()
            await asyncio.wait([self._news], timeout=end - time.monotonic())

    def _tell(self) -> None:
        if not self._news.done():
            self._news.set_result(None)

    def _note_unjudged(self, num_more: int) -> None:
        now = time.monotonic()
        if self._num_unjudged:
            self._load += Load(seconds=now - self._noted_at)
        self._num_unjudged, self._noted_at = self._num_unjudged + num_more, now
