# SPDX-License-Identifier: Apache-2.0
"""Scores rollouts in child processes with deadlines. A fault of a reward function costs one verdict, never the run.

Our own, not Pebble, loky or multiprocessing: their children answer in pickles, with which a child that a text has taken over runs code in
the parent; they inherit the parent's environment with its secrets; and a deadline kills the child, but not the processes that it started.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Coroutine, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Literal, TypeGuard, TypeVar

import mrl
from mrl import spans
from mrl.config.texts import safe_text
from mrl.envs import spawn
from mrl.envs.scratch import Scratch
from mrl.envs.task import LENGTH_BYTES, MAX_MESSAGE_BYTES, Environment, Task, encode
from mrl.types import Verdict

logger = logging.getLogger(__name__)

# Parsing with sympy stays under 300 MiB; what needs more than this is a bomb.
MEMORY_BYTES = 2 << 30
START_TIMEOUT_S = 60.0
MAX_FAILED_STARTS = 3
# A killed process is gone at once, unless the kernel holds it (a dead network file system).
KILL_TIMEOUT_S = 10.0
# What has arrived by the deadline is read within this time; a loop may look at its clock before its sockets.
LATE_READ_S = 0.05
MAX_CACHED_VERDICTS = 20_000
# Longer rollouts hardly repeat, and would fill the memory.
MAX_CACHED_CHARACTERS = 1_000
# Longer texts go last: what makes a grader slow is long, or odd, and odd ones are refused before they are parsed.
LONG_CHARACTERS = 20_000
# The machine did not keep a child from its work if the child computed for this share of its deadline.
GUILTY_CPU_SHARE = 0.5
MAX_EXTRACTED_CHARACTERS = 1_000

TEXT_FAULT = "text_fault"
"""Flag of a rollout whose text made its grader fail: its reward is 0."""

T = TypeVar("T")


class WorkerDied(Exception):
    """The child closed its end or sends no valid message; it can only be replaced."""


class Worker:
    """One child process at a time, and the parent's end of the socket to it."""

    def __init__(self, environment: Environment, memory_bytes: int, index: int, spares: list[Worker]) -> None:
        self.environment, self.memory_bytes, self.spares = environment, memory_bytes, spares
        self.lane = f"{environment.name} worker {index}"
        self.start()

    def start(self) -> None:
        """Starts the child and returns at once; its first message says that it is ready."""
        environment = self.environment
        self.is_ready = False
        self._scratch = Scratch()
        self._socket, child_socket = socket.socketpair()
        self._socket.setblocking(False)
        # A new interpreter, never a fork: the parent holds torch, Ray and threads. -P: no module of the working directory is picked up.
        # An environment of our own: no secret of the parent reaches code that judges model output.
        with child_socket:
            numbers = [str(child_socket.fileno()), str(os.getpid()), str(self.memory_bytes)]
            arguments = [environment.factory, json.dumps(dict(environment.options)), *numbers, ",".join(environment.allowances)]
            variables = {
                "PYTHONPATH": os.pathsep.join([str(Path(mrl.__file__).parents[1]), *environment.search_path]),
                "PYTHONHASHSEED": "0",
                "PYTHONUTF8": "1",
                "TMPDIR": str(self._scratch.path),
                **environment.variables,
            }
            self._process = spawn.start(
                lambda: subprocess.Popen(
                    [sys.executable, "-P", "-m", "mrl.envs.child", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[child_socket.fileno()],
                    start_new_session=True,
                    cwd="/",
                    env=variables,
                )
            )

    def is_silent(self) -> bool:
        """True when the child lives and has sent nothing since its last answer."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        return False

    async def ask(self, message: bytes) -> dict[str, object]:
        """The child's answer; WorkerDied if it ended, or answers with something else than a message."""
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, message)
        except OSError as error:
            raise WorkerDied(f"it does not read: {error}") from error
        return await self.read()

    async def read(self) -> dict[str, object]:
        """The child's next message; WorkerDied if it ended, or what it sent is no message."""
        try:
            length = int.from_bytes(await self._receive(LENGTH_BYTES))
            if length > MAX_MESSAGE_BYTES:
                raise WorkerDied(f"a message of {length} bytes is longer than {MAX_MESSAGE_BYTES}")
            message = json.loads(await self._receive(length))
        except (OSError, ValueError, RecursionError) as error:
            raise WorkerDied(str(error)) from error
        if not isinstance(message, dict):
            raise WorkerDied(f"its message is a {type(message).__name__}, not an object")
        return message

    async def _receive(self, num_bytes: int) -> bytearray:
        data = bytearray()
        while len(data) < num_bytes:
            part = await asyncio.get_running_loop().sock_recv(self._socket, min(num_bytes - len(data), 1 << 16))
            if not part:
                raise WorkerDied("it ended")
            data += part
        return data

    def cpu_s(self) -> float:
        """CPU seconds of the child itself since its start. Of one that ended the kernel keeps the record until `kill` waits for it."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def restart(self) -> int | None:
        """Puts another child in the place of this one; returns the exit code as `kill` does.

        Of a built-in environment, whose texts may kill one child after another, a spare child then starts, for the next time.
        """
        exit_code = self.kill()
        if self.spares:
            spare = self.spares.pop()
            self.is_ready, self._scratch, self._socket, self._process = spare.is_ready, spare._scratch, spare._socket, spare._process
        else:
            self.start()
        if self.environment.blames_text:
            self.spares.append(Worker(self.environment, self.memory_bytes, len(self.spares), self.spares))
        return exit_code

    def kill(self) -> int | None:
        """Kills the child and what it started in its session, and returns the exit code (negative: a signal)."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            logger.debug("reward child %d was gone already", self._process.pid)
        self._socket.close()
        try:
            return self._process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("reward child %d does not die within %.0f s; it is left behind", self._process.pid, KILL_TIMEOUT_S)
            return None
        finally:
            self._scratch.remove()


@dataclass(eq=False)
class Job:
    """A task, and the verdict to come for all rollouts that are equal."""

    task: Task
    verdict: asyncio.Future[Verdict]
    num_rollouts: int = 0
    begun_at: float = 0.0
    """Time when a child first began it (`time.monotonic`); 0 if none has."""


class RewardPool:
    """The children of one environment, in an event loop: each judges one task after another, and is replaced when it fails.

    The kernel kills the children when the thread of the loop ends. `counts` holds how many verdicts had each status, and `cached`: those
    that another equal task had already got.
    """

    def __init__(self, environment: Environment, *, memory_bytes: int = MEMORY_BYTES) -> None:
        """Starts the processes; `start` comes next."""
        self.environment = environment
        self.memory_bytes = memory_bytes
        self.counts: Counter[str] = Counter()
        self._cache: OrderedDict[Task, Verdict] = OrderedDict()
        self._num_failed_starts = 0
        self._spares: list[Worker] = []
        self._workers = [Worker(environment, memory_bytes, index, self._spares) for index in range(environment.num_workers)]
        self._jobs: dict[Task, Job] = {}
        self._queue = deque[Job]()
        self._suspects, self._later = deque[Job](), deque[Job]()
        self.num_begun = 0
        self._num_busy, self._is_last_try = 0, False
        self._idle: list[asyncio.Future[None]] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> RewardPool:
        """Waits until all children are ready; a RuntimeError says that they do not start."""
        results = await asyncio.gather(*map(self._make_ready, self._workers), return_exceptions=True)
        for error in results:
            if error is not None:
                self.close()
                raise error
        self._tasks = [asyncio.ensure_future(self._work(worker)) for worker in self._workers]
        return self

    def close(self) -> None:
        """Kills the children."""
        for task in self._tasks:
            task.cancel()
        for worker in (*self._workers, *self._spares):
            worker.kill()
        self._workers, self._spares, self._tasks = [], [], []

    @property
    def num_waiting(self) -> int:
        """Rollouts that no child has begun."""
        return sum(job.num_rollouts for job in (*self._queue, *self._later))

    def submit(self, tasks: Sequence[Task]) -> list[Job]:
        """Queues tasks; returns the job of each. Equal tasks are one job; good verdicts of short texts are remembered.

        A task whose scoring takes longer than the environment's `timeout_s` gets status `timeout`, however long it waited for a child
        before; one that kills its child `crash`; one whose reward function raises, or gives a reward that is no finite number, `error`.
        None of these is valid, and each says why. But if the environment `blames_text`, a fault of the text is valid: reward 0, flag
        `text_fault`. A missed deadline is the text's fault if the child computed all the while; any other one, and a crash, if it happens
        again when the pool tries the task once more, after all others and alone.

        A RuntimeError says that children do not start any more, or that the pool is closed.
        """
        if not self._workers:
            raise RuntimeError(f"the reward pool of {self.environment} is closed")
        jobs, fresh = list[Job](), list[Job]()
        for task in tasks:
            job = self._jobs.get(task)
            if job is None:
                job = self._jobs[task] = Job(task, asyncio.get_running_loop().create_future())
                if task not in self._cache:
                    fresh.append(job)
            job.num_rollouts += 1
            jobs.append(job)
            if task in self._cache:
                self._cache.move_to_end(task)
                self._give(job, self._cache[task])
        self.counts["cached"] += len(tasks) - len(fresh)
        # A suspect waits for all others, and so for no new ones.
        queue = self._later if self._suspects or self._is_last_try else self._queue
        queue.extend(sorted(fresh, key=lambda job: len(job.task.text) > LONG_CHARACTERS))
        self._wake()
        return jobs

    async def _work(self, worker: Worker) -> None:
        """Judges one task after another with one child. When children do not start any more, nobody gets a verdict."""
        try:
            while True:
                job = await self._next_job(worker)
                start = time.monotonic()
                job.begun_at = job.begun_at or start
                self.num_begun += 1
                verdict = await self._judge(worker, job.task, is_last_try=self._is_last_try)
                spans.stretch("score", start, worker.lane)
                self._num_busy, self._is_last_try = self._num_busy - 1, False
                if verdict is None:
                    self._suspects.append(job)
                else:
                    self._give(job, verdict)
                if not self._suspects:
                    self._queue.extend(self._later)
                    self._later.clear()
                self._wake()
        except Exception as error:
            self.close()
            for job in self._jobs.values():
                job.verdict.set_exception(error)

    async def _next_job(self, worker: Worker) -> Job:
        while self._is_last_try or not (self._queue or (self._suspects and not self._num_busy)):
            spans.end_stretch(worker.lane)
            self._idle.append(woken := asyncio.get_running_loop().create_future())
            await woken
        self._num_busy += 1
        if self._queue:
            return self._queue.popleft()
        self._is_last_try = True
        return self._suspects.popleft()

    def _wake(self) -> None:
        """Has idle children look for work, as many as there is work for."""
        num_woken = len(self._queue) or (1 if self._suspects and not self._num_busy else 0)
        woken, self._idle = self._idle[:num_woken], self._idle[num_woken:]
        for idle in woken:
            if not idle.done():
                idle.set_result(None)

    def _give(self, job: Job, verdict: Verdict) -> None:
        del self._jobs[job.task]
        self.counts[verdict.status] += job.num_rollouts
        # Only good verdicts: a mask may not have been the text's fault.
        if verdict.status == "ok" and len(verdict.text) <= MAX_CACHED_CHARACTERS:
            self._cache[job.task] = verdict
            if len(self._cache) > MAX_CACHED_VERDICTS:
                self._cache.popitem(last=False)
        job.verdict.set_result(verdict)

    async def _judge(self, worker: Worker, task: Task, *, is_last_try: bool) -> Verdict | None:
        """The verdict that one child gives; None if the child died or missed its deadline, and the task may not be at fault."""
        try:
            message = encode(astuple(task))
        except ValueError as error:
            # Texts are bounded where they enter, so it is the row that is too long.
            return _failed("error", task, f"the row is too long: {error}")
        await self._make_ready(worker)
        timeout_s = self.environment.timeout_s
        cpu_s_before, is_guilty = worker.cpu_s(), is_last_try
        status: Literal["timeout", "crash"]
        try:
            return self._verdict(task, await _within(timeout_s, worker.ask(message)))
        except TimeoutError:
            status, reason = "timeout", "deadline"
            is_guilty |= worker.cpu_s() - cpu_s_before >= GUILTY_CPU_SHARE * timeout_s
        except WorkerDied as error:
            status, reason = "crash", str(error)
        reason = f"{status} of {self.environment}, {reason}, exit code {worker.restart()}"
        if not self.environment.blames_text:
            return _failed(status, task, reason)
        return _zero(task, reason) if is_guilty else None

    def _verdict(self, task: Task, answer: dict[str, object]) -> Verdict:
        if "error" in answer:
            reason, culprit = str(answer["error"]), answer.get("culprit")
            if culprit == "text" and self.environment.blames_text:
                return _zero(task, reason)
            if culprit == "row":
                reason += f"; {self.environment} reads {', '.join(self.environment.row_fields)} of a row"
            return _failed("error", task, reason)
        reward, components = answer.get("reward"), answer.get("components")
        if not _is_number(reward):
            return _failed("error", task, f"the reward is {reward!r:.100}, not a finite number")
        if not isinstance(components, dict) or not all(map(_is_number, components.values())):
            return _failed("error", task, f"the components of the reward are {components!r:.100}, not finite numbers")
        extracted, flags, observation = (answer.get(name) for name in ("extracted", "flags", "observation"))
        if not isinstance(extracted, str) or not isinstance(flags, list) or not _are_messages(observation):
            return _failed("error", task, f"the answer {str(answer):.100} is no outcome")
        return Verdict(
            reward=float(reward),
            is_valid=True,
            status="ok",
            extracted=safe_text(extracted, MAX_EXTRACTED_CHARACTERS),
            text="\n".join(task.turns),
            components={safe_text(name): float(value) for name, value in components.items()},
            flags=tuple(safe_text(str(flag)) for flag in flags),
            observation=tuple({key: safe_text(value) for key, value in message.items()} for message in observation),
        )

    async def _make_ready(self, worker: Worker) -> None:
        # A child that died, or sent something, while idle cannot be asked.
        while not worker.is_ready or not worker.is_silent():
            if worker.is_ready:
                worker.restart()
                continue
            try:
                await _within(START_TIMEOUT_S, worker.read())
                worker.is_ready, self._num_failed_starts = True, 0
            except (TimeoutError, WorkerDied) as error:
                self._num_failed_starts += 1
                status, exit_code = "timeout" if isinstance(error, TimeoutError) else "crash", worker.restart()
                if self._num_failed_starts >= MAX_FAILED_STARTS:
                    raise RuntimeError(
                        f"the reward child of {self.environment} does not start: {status}, exit code {exit_code}, "
                        f"{self._num_failed_starts} times in a row; its own message is on stderr"
                    ) from error


async def _within(seconds: float, work: Coroutine[None, None, T]) -> T:
    """The result of `work`, even one that came in time while other work kept this process from reading it.

    Else a TimeoutError. `asyncio.timeout` drops such a result, and so would blame a text that was judged in time.
    """
    task = asyncio.ensure_future(work)
    # The work begins before its time does: other coroutines may run first.
    await asyncio.sleep(0)
    await asyncio.wait([task], timeout=seconds)
    if not task.done():
        await asyncio.wait([task], timeout=LATE_READ_S)
    if not task.done():
        task.cancel()
        await asyncio.wait([task])
        raise TimeoutError
    return await task


def _zero(task: Task, reason: str) -> Verdict:
    return Verdict(reward=0.0, is_valid=True, status="ok", extracted="", text="\n".join(task.turns), flags=(TEXT_FAULT,), reason=reason)


def _failed(status: Literal["timeout", "crash", "error"], task: Task, reason: str) -> Verdict:
    return Verdict(reward=0.0, is_valid=False, status=status, extracted="", text="\n".join(task.turns), reason=reason)


def _is_number(value: object) -> TypeGuard[int | float]:
    # By comparison, which also takes integers that are no float: a child that a text has taken over sends whatever it likes.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _are_messages(value: object) -> TypeGuard[list[dict[str, str]]]:
    return isinstance(value, list) and all(
        isinstance(message, dict) and all(isinstance(text, str) for text in message.values()) for message in value
    )
