"""Scores rollouts in a pool of child processes that can be killed. A fault of a reward function costs one verdict, never the run."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from types import TracebackType
from typing import Literal

from mrl.envs.worker import Worker, WorkerDied
from mrl.types import Verdict

logger = logging.getLogger(__name__)

Item = tuple[str, str]
"""(text of the rollout, expected answer)"""

# Parsing with sympy stays under 300 MiB; what needs more than this is a bomb.
MEMORY_BYTES = 2 << 30
START_TIMEOUT_S = 60.0
MAX_FAILED_STARTS = 3
MAX_CACHED_VERDICTS = 20_000
# Longer rollouts hardly repeat, and would fill the memory.
MAX_CACHED_CHARACTERS = 1_000


def never() -> bool:
    """The patience of a caller who waits for every verdict."""
    return False


class RewardPool:
    """`num_workers` children that run one reward function, `MODULE:FUNCTION` of `(text, expected) -> (reward, extracted)`.

    `counts` holds how many verdicts had each status, and `cached`: those that another equal item had already got.
    """

    def __init__(
        self,
        entry_point: str,
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
        self.entry_point = entry_point
        self.timeout_s = timeout_s
        self.memory_bytes = memory_bytes
        self.start_timeout_s = start_timeout_s
        self.counts: Counter[str] = Counter()
        self._cache: OrderedDict[Item, Verdict] = OrderedDict()
        self._num_failed_starts = 0
        self._workers = [self._start() for _ in range(num_workers)]
        while not all(worker.is_ready for worker in self._workers):
            self._wait({})

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Kills the children. The kernel does the same when the thread that made the pool ends."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def score(self, items: Sequence[Item], *, gives_up: Callable[[], bool] = never) -> list[Verdict]:
        """One verdict per item, in order. Equal items are scored once; good verdicts of short texts are remembered.

        An item that takes longer than the pool's `timeout_s`, or is not begun when `gives_up` says so, gets
        status `timeout`; one that kills its child `crash`; one whose reward function raises, or returns something other than a finite
        number and a string, `error`. All of these are not valid.

        Raises:
            RuntimeError: children do not start any more, or the pool is closed.
        """
        self._replace_dead()
        verdicts: dict[Item, Verdict] = {item: self._cache[item] for item in items if item in self._cache}
        queue = deque(item for item in dict.fromkeys(items) if item not in verdicts)
        self.counts["cached"] += len(items) - len(queue)
        while queue or any(worker.item for worker in self._workers):
            if queue and gives_up():
                verdicts.update((item, _failed("timeout", item)) for item in queue)
                queue.clear()
            for index, worker in enumerate(self._workers):
                if queue and worker.is_idle:
                    self._ask(index, queue.popleft(), verdicts)
            self._wait(verdicts)
        for item in dict.fromkeys(items):
            self._remember(item, verdicts[item])
        self.counts.update(verdicts[item].status for item in items)
        return [verdicts[item] for item in items]

    def _start(self) -> Worker:
        return Worker(self.entry_point, memory_bytes=self.memory_bytes, start_timeout_s=self.start_timeout_s)

    def _replace_dead(self) -> None:
        """Restarts children that ended while idle, before an item is lost on one."""
        if not self._workers:
            raise RuntimeError(f"the reward pool of {self.entry_point} is closed")
        for index, worker in enumerate(self._workers):
            if worker.is_idle and wait([worker.fileno()], timeout=0):
                self._replace(index, "crash", "it ended while idle", {})

    def _ask(self, index: int, item: Item, verdicts: dict[Item, Verdict]) -> None:
        try:
            self._workers[index].ask(item, self.timeout_s)
        except WorkerDied as error:
            self._replace(index, "crash", str(error), verdicts)

    def _wait(self, verdicts: dict[Item, Verdict]) -> None:
        """Waits for the next answer, death or deadline of a child that works or starts, and files what comes of it."""
        waiting = [(index, worker) for index, worker in enumerate(self._workers) if not worker.is_idle]
        if not waiting:
            return
        remaining_s = min(worker.deadline for _, worker in waiting) - time.monotonic()
        readable = wait([worker.fileno() for _, worker in waiting], timeout=max(0.0, remaining_s))
        for index, worker in waiting:
            if worker.fileno() in readable:
                self._read(index, verdicts)
            elif time.monotonic() >= worker.deadline:
                self._replace(index, "timeout", "deadline", verdicts)

    def _read(self, index: int, verdicts: dict[Item, Verdict]) -> None:
        worker = self._workers[index]
        try:
            message = worker.read()
        except WorkerDied as error:
            self._replace(index, "crash", str(error), verdicts)
            return
        if message is None:
            return
        if worker.item is None:
            worker.is_ready = True
            self._num_failed_starts = 0
            return
        verdicts[worker.item] = _verdict(worker.item, message)
        worker.item = None

    def _replace(self, index: int, status: Literal["timeout", "crash"], reason: str, verdicts: dict[Item, Verdict]) -> None:
        """Kills a child, files a verdict for its item, and starts another in its place."""
        worker = self._workers[index]
        exit_code = worker.kill()
        if worker.item is not None:
            logger.warning("rollout not scored, %s of %s after exit code %s: %s", status, self.entry_point, exit_code, reason)
            verdicts[worker.item] = _failed(status, worker.item)
        elif not worker.is_ready:
            self._num_failed_starts += 1
            if self._num_failed_starts >= MAX_FAILED_STARTS:
                self.close()
                raise RuntimeError(
                    f"the reward child of {self.entry_point} does not start: {status}, exit code {exit_code}, "
                    f"{self._num_failed_starts} times in a row; its own words stand on stderr"
                )
        self._workers[index] = self._start()

    def _remember(self, item: Item, verdict: Verdict) -> None:
        """Keeps good verdicts of short texts: a timeout or a crash may be the machine's fault."""
        if verdict.status == "ok" and len(verdict.text) <= MAX_CACHED_CHARACTERS:
            self._cache[item] = verdict
            self._cache.move_to_end(item)
            if len(self._cache) > MAX_CACHED_VERDICTS:
                self._cache.popitem(last=False)


def _verdict(item: Item, message: dict[str, object]) -> Verdict:
    """The verdict that a child's answer amounts to."""
    reward, extracted = message.get("reward"), message.get("extracted")
    if "error" in message:
        logger.warning("rollout not scored: %s", message["error"])
    elif isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        logger.warning("rollout not scored: the reward is %.100r, not a finite number", reward)
    elif not isinstance(extracted, str):
        logger.warning("rollout not scored: the extracted answer is %.100r, not a string", extracted)
    else:
        return Verdict(reward=float(reward), is_valid=True, status="ok", extracted=extracted, text=item[0])
    return _failed("error", item)


def _failed(status: Literal["timeout", "crash", "error"], item: Item) -> Verdict:
    return Verdict(reward=0.0, is_valid=False, status=status, extracted="", text=item[0])
