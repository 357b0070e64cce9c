# SPDX-License-Identifier: Apache-2.0
"""Reward pools for tests that wait for their verdicts, and environments without children."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TypeVar

from mrl.config.schema.env import EnvConfig
from mrl.envs.child_process import MEMORY_BYTES
from mrl.envs.scorer import Job, RewardPool, goes_last, start_environment
from mrl.envs.task import Environment, Task
from mrl.types import Verdict

T = TypeVar("T")


class Pool:
    """A pool in an event loop of its own, which runs while the test waits for verdicts."""

    def __init__(
        self, starting: Environment | Coroutine[None, None, RewardPool], *, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        self._runner = asyncio.Runner()
        if isinstance(starting, Environment):
            starting = RewardPool(starting, memory_bytes=memory_bytes).start()
        try:
            self.pool = self.run(starting)
        except BaseException:
            self._runner.close()
            raise
        self.environment = self.pool.environment
        self.counts: Counter[str] = Counter()
        """Verdicts by status, and `cached`: those for which no child began a task."""
        self.told: list[tuple[str, bool]] = []
        """The row's answer of what a child begins (False), and of what gets its verdict (True)."""
        judge = self.pool._judge

        async def judge_and_tell(place: int, task: Task, *, is_last_try: bool) -> Verdict | None:
            self.told.append((task.expected, False))
            self.counts["cached"] -= not is_last_try
            verdict = await judge(place, task, is_last_try=is_last_try)
            self.told.append((task.expected, True))
            return verdict

        setattr(self.pool, "_judge", judge_and_tell)  # noqa: B010  a plain assignment is a type error

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, work: Coroutine[None, None, T]) -> T:
        return self._runner.run(work)

    def score(self, tasks: Sequence[Task]) -> list[Verdict]:
        return self.run(self.judge(tasks))

    async def judge(self, tasks: Sequence[Task]) -> list[Verdict]:
        jobs = {task: self.pool.submit(task) for task in sorted(tasks, key=goes_last)}
        verdicts = [await jobs[task].verdict for task in tasks]
        self.counts.update([verdict.status for verdict in verdicts])
        self.counts["cached"] += len(verdicts)
        return verdicts

    def close(self) -> None:
        self.pool.close()
        self._runner.close()


def build_environment(name: str, config: EnvConfig, *, endpoints: Path | None = None) -> Pool:
    """The pool of an environment, by its name."""
    return Pool(start_environment(name, config, endpoints=endpoints))


class Childless:
    """An environment that judges in the scorer's own loop; tests say how."""

    num_begun = num_waiting = 0

    def submit(self, task: Task) -> Job:
        return Job(task, asyncio.ensure_future(self.judge(task)))

    async def judge(self, task: Task) -> Verdict:
        raise NotImplementedError
