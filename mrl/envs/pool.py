"""Scores rollouts in a pool of child processes that can be killed. A fault of a reward function costs one verdict, never the run."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from types import TracebackType
from typing import Literal, TypeGuard

from mrl.config.texts import safe_text
from mrl.envs.task import Task
from mrl.envs.worker import RewardFunction, Worker, WorkerDied
from mrl.types import Verdict

logger = logging.getLogger(__name__)

# Parsing with sympy stays under 300 MiB; what needs more than this is a bomb.
MEMORY_BYTES = 2 << 30
START_TIMEOUT_S = 60.0
MAX_FAILED_STARTS = 3
MAX_CACHED_VERDICTS = 20_000
# Longer rollouts hardly repeat, and would fill the memory.
MAX_CACHED_CHARACTERS = 1_000
# Longer texts go last: what makes a grader slow is long, or odd, and odd ones are refused before they are parsed.
LONG_CHARACTERS = 20_000
# A child that computed for so much of its deadline was not kept from its work by the machine.
GUILTY_CPU_SHARE = 0.5
MAX_EXTRACTED_CHARACTERS = 1_000

TEXT_FAULT = "text_fault"
"""Flag of a rollout whose text made its grader fail: its reward is 0."""


def never() -> bool:
    """The patience of a caller who waits for every verdict."""
    return False


@dataclass
class _Round:
    """What is known while tasks are scored."""

    verdicts: dict[Task, Verdict] = field(default_factory=dict)
    suspects: deque[Task] = field(default_factory=deque)
    """Their child crashed, or sat out their deadline; each is tried once more, last and alone."""
    tried_alone: set[Task] = field(default_factory=set)


class RewardPool:
    """`num_workers` children that run one reward function.

    `counts` holds how many verdicts had each status, and `cached`: those that another equal task had already got.
    """

    def __init__(
        self,
        function: RewardFunction,
        *,
        num_workers: int,
        timeout_s: float,
        memory_bytes: int = MEMORY_BYTES,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Starts the children and waits until they are ready.

        Raises:
            RuntimeError: a child does not start.
        """
        self.function = function
        self.timeout_s = timeout_s
        self.memory_bytes = memory_bytes
        self.start_timeout_s = start_timeout_s
        self.counts: Counter[str] = Counter()
        self._cache: OrderedDict[Task, Verdict] = OrderedDict()
        self._num_failed_starts = 0
        self._workers = [self._start() for _ in range(num_workers)]
        while not all(worker.is_ready for worker in self._workers):
            self._wait(_Round())

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kills the children. The kernel does the same when the thread that made the pool ends."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def score(self, tasks: Sequence[Task], *, gives_up: Callable[[], bool] = never) -> list[Verdict]:
        """One verdict per task, in order. Equal tasks are scored once; good verdicts of short texts are remembered.

        A task that takes longer than the pool's `timeout_s`, or is not begun when `gives_up` says so, gets
        status `timeout`; one that kills its child `crash`; one whose reward function raises, or gives a reward that is no finite number,
        `error`. All of these are not valid, and say why. But what a text does to a function that `blames_text` is valid: reward 0, flag
        `text_fault`. A deadline is the text's doing if its child computed all the while; any other one, and a crash, if it happens again
        when the task is tried once more, after all others and alone.

        Raises:
            RuntimeError: children do not start any more, or the pool is closed.
        """
        self._replace_dead()
        now = _Round({task: self._cache[task] for task in tasks if task in self._cache})
        fresh = [task for task in dict.fromkeys(tasks) if task not in now.verdicts]
        queue = deque(sorted(fresh, key=lambda task: len(task.text) > LONG_CHARACTERS))
        self.counts["cached"] += len(tasks) - len(queue)
        while queue or now.suspects or any(worker.task for worker in self._workers):
            if (queue or now.suspects) and gives_up():
                now.verdicts.update((task, _failed("timeout", task, "not begun in time")) for task in queue)
                now.verdicts.update((task, _failed("timeout", task, "no time for a second try")) for task in now.suspects)
                queue.clear()
                now.suspects.clear()
            for index, worker in enumerate(self._workers):
                if not queue and now.suspects and not any(worker.task for worker in self._workers) and worker.is_idle:
                    now.tried_alone.add(now.suspects[0])
                    self._ask(index, now.suspects.popleft(), now)
                elif queue and worker.is_idle:
                    self._ask(index, queue.popleft(), now)
            self._wait(now)
        for task in dict.fromkeys(tasks):
            self._remember(task, now.verdicts[task])
        self.counts.update(now.verdicts[task].status for task in tasks)
        return [now.verdicts[task] for task in tasks]

    def _start(self) -> Worker:
        return Worker(self.function, memory_bytes=self.memory_bytes, start_timeout_s=self.start_timeout_s)

    def _replace_dead(self) -> None:
        """Restarts children that ended while idle, before a task is lost on one."""
        if not self._workers:
            raise RuntimeError(f"the reward pool of {self.function} is closed")
        for index, worker in enumerate(self._workers):
            if worker.is_idle and wait([worker.fileno()], timeout=0):
                self._replace(index, "crash", "it ended while idle", _Round())

    def _ask(self, index: int, task: Task, now: _Round) -> None:
        try:
            self._workers[index].ask(task, self.timeout_s)
        except WorkerDied as error:
            self._replace(index, "crash", str(error), now)
        except ValueError as error:
            # Texts are bounded where they enter, so it is the row that is too long.
            now.verdicts[task] = _failed("error", task, f"the row is too long: {error}")

    def _wait(self, now: _Round) -> None:
        """Waits for the next answer, death or deadline of a child that works or starts, and files what comes of it."""
        waiting = [(index, worker) for index, worker in enumerate(self._workers) if not worker.is_idle]
        if not waiting:
            return
        remaining_s = min(worker.deadline for _, worker in waiting) - time.monotonic()
        readable = wait([worker.fileno() for _, worker in waiting], timeout=max(0.0, remaining_s))
        for index, worker in waiting:
            if worker.fileno() in readable:
                self._read(index, now)
            elif time.monotonic() >= worker.deadline:
                self._replace(index, "timeout", "deadline", now)

    def _read(self, index: int, now: _Round) -> None:
        worker = self._workers[index]
        try:
            message = worker.read()
        except WorkerDied as error:
            self._replace(index, "crash", str(error), now)
            return
        if message is None:
            return
        if worker.task is None:
            worker.is_ready = True
            self._num_failed_starts = 0
            return
        if message.get("culprit") == "text" and self.function.blames_text:
            now.verdicts[worker.task] = _zero(worker.task, str(message["error"]))
        else:
            now.verdicts[worker.task] = _verdict(worker.task, message)
        worker.task = None

    def _replace(self, index: int, status: Literal["timeout", "crash"], reason: str, now: _Round) -> None:
        """Kills a child, files a verdict for its task or lists it with the suspects, and starts another child in its place."""
        worker = self._workers[index]
        has_computed = status == "timeout" and worker.cpu_s() >= GUILTY_CPU_SHARE * self.timeout_s
        exit_code = worker.kill()
        if worker.task is not None:
            reason = f"{status} of {self.function}, {reason}, exit code {exit_code}"
            if not self.function.blames_text:
                now.verdicts[worker.task] = _failed(status, worker.task, reason)
            elif has_computed or worker.task in now.tried_alone:
                now.verdicts[worker.task] = _zero(worker.task, reason)
            else:
                now.suspects.append(worker.task)
        elif not worker.is_ready:
            self._num_failed_starts += 1
            if self._num_failed_starts >= MAX_FAILED_STARTS:
                self.close()
                raise RuntimeError(
                    f"the reward child of {self.function} does not start: {status}, exit code {exit_code}, "
                    f"{self._num_failed_starts} times in a row; its own words stand on stderr"
                )
        self._workers[index] = self._start()

    def _remember(self, task: Task, verdict: Verdict) -> None:
        """Keeps good verdicts of short texts: what is masked may not have been the text's fault."""
        if verdict.status == "ok" and len(verdict.text) <= MAX_CACHED_CHARACTERS:
            self._cache[task] = verdict
            self._cache.move_to_end(task)
            if len(self._cache) > MAX_CACHED_VERDICTS:
                self._cache.popitem(last=False)


def _verdict(task: Task, message: dict[str, object]) -> Verdict:
    """The verdict that a child's answer amounts to."""
    if "error" in message:
        return _failed("error", task, str(message["error"]))
    reward, components = message.get("reward"), message.get("components")
    if not _is_number(reward):
        return _failed("error", task, f"the reward is {reward!r:.100}, not a finite number")
    if not isinstance(components, dict) or not all(map(_is_number, components.values())):
        return _failed("error", task, f"the components of the reward are {components!r:.100}, not finite numbers")
    extracted, flags, observation = (message.get(name) for name in ("extracted", "flags", "observation"))
    if not isinstance(extracted, str) or not isinstance(flags, list) or not isinstance(observation, list):
        return _failed("error", task, f"the answer {str(message):.100} is no outcome")
    return Verdict(
        reward=float(reward),
        is_valid=True,
        status="ok",
        extracted=safe_text(extracted, MAX_EXTRACTED_CHARACTERS),
        text=_text(task),
        components={safe_text(name): float(value) for name, value in components.items()},
        flags=tuple(safe_text(str(flag)) for flag in flags),
        observation=tuple(_safe_message(message) for message in observation),
    )


def _safe_message(message: Mapping[str, str]) -> Mapping[str, str]:
    return {key: safe_text(value) for key, value in message.items()}


def _zero(task: Task, reason: str) -> Verdict:
    """The verdict on a text that made its grader fail. The reason is no part of the answer: it is not shown in samples."""
    return Verdict(reward=0.0, is_valid=True, status="ok", extracted="", text=_text(task), flags=(TEXT_FAULT,), reason=reason)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _failed(status: Literal["timeout", "crash", "error"], task: Task, reason: str) -> Verdict:
    return Verdict(reward=0.0, is_valid=False, status=status, extracted="", text=_text(task), reason=reason)


def _text(task: Task) -> str:
    return "\n".join(task.turns)
