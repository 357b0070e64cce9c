# SPDX-License-Identifier: Apache-2.0
"""Scores rollouts in child processes with deadlines, in a pool per environment. A fault costs one verdict, not the run.

A rollout has a deadline from when a child begins it. What waits for a child waits as long as it takes: to mask it would
leave out the rollouts of a step that are slow to judge or late, and so bias the batch.

Our own, not Pebble, loky or multiprocessing: their children answer in pickles, with which a child that a text has taken
over runs code in the parent; they inherit the parent's environment with its secrets; and a deadline kills the child,
but not the processes that it started.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeGuard, TypeVar

from mrl import rooms, spans
from mrl.config.schema.env import BUILT_IN
from mrl.config.texts import rollout_name, rounded, safe_text
from mrl.envs import code, math, own
from mrl.envs.child_process import MEMORY_BYTES, START_TIMEOUT_S, Child, ChildDied
from mrl.envs.confine import landlock_abi
from mrl.envs.scratch import remove_abandoned
from mrl.envs.task import DEFAULT_TOOL_PARSER, MASK_SAMPLE, Environment, Task, encode
from mrl.envs.workers import MIN_WORKERS
from mrl.types import LARGEST_REWARD, Verdict

if TYPE_CHECKING:
    from mrl.config.schema.env import EnvConfig
    from mrl.config.schema.run import RunConfig

logger = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
# What has arrived by the deadline is read within this time; a loop may look at its clock before its sockets.
LATE_READ_S = 0.05
MAX_REMEMBERED = 20_000
# Longer rollouts hardly repeat, and would fill the memory.
MAX_REMEMBERED_CHARACTERS = 1_000
LONG_CHARACTERS = 20_000
# A child that computed for this share of its deadline was not held up by the machine.
GUILTY_CPU_SHARE = 0.5
MAX_EXTRACTED_CHARACTERS = 1_000
MAX_COLUMNS = 32

TEXT_FAULT = "text_fault"
"""Flag of a rollout whose text made its grader fail: its reward is 0."""
ENVIRONMENTS: Mapping[str, Callable[[EnvConfig], Environment]] = {
    "math": math.environment,
    "code": code.environment,
    **{name: rooms.grader(name) for name in BUILT_IN if name not in ("math", "code")},
}
"""The built-in environments; each module declares its own."""

T = TypeVar("T")


@dataclass(frozen=True)
class RewardLoad:
    """Load of the children of environments over some time."""

    longest_queue: int = 0
    """Most tasks that waited for a child."""
    num_begun: int = 0
    """Number of tasks that children have begun."""
    seconds: float = 0.0
    """In which a rollout waited for its verdict."""
    num_judged: int = 0
    """Rollouts with a verdict that a child began for them."""
    wait_s: float = 0.0
    """Seconds that those had waited before, added up."""
    longest_wait_s: float = 0.0

    def __add__(self, other: RewardLoad) -> RewardLoad:
        """The load of one actor at two times, or of two actors at once."""
        queue, wait_s = max(self.longest_queue, other.longest_queue), max(self.longest_wait_s, other.longest_wait_s)
        num_begun, num_judged = self.num_begun + other.num_begun, self.num_judged + other.num_judged
        return RewardLoad(
            queue, num_begun, self.seconds + other.seconds, num_judged, self.wait_s + other.wait_s, wait_s
        )


@dataclass(eq=False)
class Job:
    """A task, and the verdict to come, of repeatable environments for all rollouts that are equal."""

    task: Task
    verdict: asyncio.Future[Verdict]
    begun_at: float = 0.0
    """Time when a child first began it (`time.monotonic`); 0 if none has."""
    seconds: float = 0.0
    """Seconds that a child took for the verdict."""
    is_suspect: bool = False
    """True when it has cost a child its life, or its deadline, and is tried once more."""


class RewardPool:
    """The children of one environment. A task for each judges one job after another, and replaces a child that fails.

    The kernel kills the children when the thread of the event loop ends.
    """

    def __init__(self, environment: Environment, *, memory_bytes: int = MEMORY_BYTES) -> None:
        """Starts the processes; `start` comes next."""
        self.environment = environment
        self.memory_bytes = memory_bytes
        self.num_begun = 0
        self._children = [Child(environment, memory_bytes) for _ in range(environment.num_workers)]
        self._spare: Child | None = None
        self._num_failed_starts = 0
        self._jobs: dict[object, Job] = {}
        """Jobs without a verdict, and those that are remembered; by their tasks, or by themselves."""
        self._remembered = deque[Task]()
        self._queue = deque[Job]()
        self._num_busy, self._is_one_alone = 0, False
        self._idle: list[asyncio.Future[None]] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> RewardPool:
        """Waits until all children are ready; a RuntimeError says that they do not start."""
        places = range(len(self._children))
        results = await asyncio.gather(*map(self._ready_child, places), return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                self.close()
                raise error
        self._tasks = [asyncio.ensure_future(self._work(place)) for place in places]
        return self

    def close(self) -> None:
        """Kills the children."""
        for task in self._tasks:
            task.cancel()
        for child in (*self._children, self._spare):
            if child is not None:
                child.kill()
        self._children, self._spare, self._tasks = [], None, []

    @property
    def num_waiting(self) -> int:
        """Tasks that wait for a child."""
        return len(self._queue)

    def submit(self, task: Task) -> Job:
        """Queues a task; returns its job.

        Where verdicts are repeatable, equal tasks are one job, and good verdicts of short texts are remembered.

        A task whose scoring takes longer than the environment's `timeout_s` gets status `timeout`, however long it
        waited for a child; one that kills its child `crash`; one whose reward function raises, or gives no finite
        number, `error`. None of these is valid, and each says why. But if the environment `blames_text`, a fault of the
        text is valid: reward 0, flag `text_fault`. A missed deadline is the text's fault if the child computed all the
        while; any other one, and a crash, if it happens again when the task is tried once more, after all that wait and
        alone. RuntimeError: children do not start any more, or the pool is closed.
        """
        if not self._children:
            raise RuntimeError(f"the reward pool of {self.environment} is closed")
        if (job := self._jobs.get(task)) is None:
            job = Job(task, asyncio.get_running_loop().create_future())
            self._jobs[self._key(job)] = job
            self._queue.append(job)
            self._wake()
        return job

    def _key(self, job: Job) -> object:
        return job.task if self.environment.is_repeatable else job

    async def _work(self, place: int) -> None:
        """Judges one job after another with one child. If children no longer start, every job gets the error."""
        lane = f"{self.environment.name} worker {place}"
        try:
            while True:
                job = await self._next_job(lane)
                start = time.monotonic()
                job.begun_at = job.begun_at or start
                self.num_begun += 1
                verdict = await self._judge(place, job.task, is_last_try=job.is_suspect)
                job.seconds = time.monotonic() - start
                spans.stretch("score", start, lane)
                self._num_busy, self._is_one_alone = self._num_busy - 1, False
                if verdict is None:
                    job.is_suspect = True
                    self._queue.append(job)
                else:
                    self._give(job, verdict)
                self._wake()
        except Exception as error:
            self.close()
            for job in self._jobs.values():
                if not job.verdict.done():
                    job.verdict.set_exception(error)

    async def _next_job(self, lane: str) -> Job:
        """The job that has waited longest. A suspect waits until no child is busy, and all others wait for it."""
        while self._is_one_alone or not self._queue or (self._queue[0].is_suspect and self._num_busy):
            spans.end_stretch(lane)
            self._idle.append(woken := asyncio.get_running_loop().create_future())
            await woken
        self._num_busy += 1
        job = self._queue.popleft()
        self._is_one_alone = job.is_suspect
        return job

    def _wake(self) -> None:
        woken, self._idle = self._idle[: len(self._queue)], self._idle[len(self._queue) :]
        for idle in woken:
            if not idle.done():
                idle.set_result(None)

    def _give(self, job: Job, verdict: Verdict) -> None:
        job.verdict.set_result(verdict)
        # Only good verdicts: a mask may not have been the text's fault.
        is_repeatable = self.environment.is_repeatable
        if not is_repeatable or verdict.status != "ok" or len(verdict.text) > MAX_REMEMBERED_CHARACTERS:
            del self._jobs[self._key(job)]
            return
        self._remembered.append(job.task)
        if len(self._remembered) > MAX_REMEMBERED:
            del self._jobs[self._remembered.popleft()]

    async def _judge(self, place: int, task: Task, *, is_last_try: bool) -> Verdict | None:
        """The verdict that a child gives; None if it died or missed its deadline, and the task may not be at fault."""
        try:
            message = encode(astuple(task))
        except ValueError as error:
            # Texts are bounded where they enter, so it is the row that is too long.
            return _failed("error", task, f"the row is too long: {error}")
        child, timeout_s = await self._ready_child(place), self.environment.timeout_s
        cpu_s_before, is_guilty = child.cpu_s(), is_last_try
        status: Literal["timeout", "crash"]
        try:
            return _verdict(self.environment, task, await _within(timeout_s, child.ask(message)))
        except TimeoutError:
            status, reason = "timeout", f"no verdict within {rounded(timeout_s)} s (its timeout_s)"
            is_guilty |= child.cpu_s() - cpu_s_before >= GUILTY_CPU_SHARE * timeout_s
        except ChildDied as error:
            status, reason = "crash", str(error)
        reason = f"{status} of {self.environment}, {reason}, exit code {self._replace(place)}"
        if not self.environment.blames_text:
            return _failed(status, task, reason)
        return _zero(task, reason) if is_guilty else None

    async def _ready_child(self, place: int) -> Child:
        """The child at this place, once it is ready. One that died or sent something while idle is replaced."""
        while not (child := self._children[place]).is_ready or not child.is_silent():
            if child.is_ready:
                self._replace(place)
                continue
            try:
                await _within(START_TIMEOUT_S, child.read())
                child.is_ready, self._num_failed_starts = True, 0
            except (TimeoutError, ChildDied) as error:
                self._num_failed_starts += 1
                status, exit_code = "timeout" if isinstance(error, TimeoutError) else "crash", self._replace(place)
                if self._num_failed_starts >= MAX_FAILED_STARTS:
                    raise RuntimeError(
                        f"the reward child of {self.environment} does not start: {status}, exit code {exit_code}, "
                        f"{self._num_failed_starts} times in a row; its own message is on stderr"
                    ) from error
        return child

    def _replace(self, place: int) -> int | None:
        """Kills a child and puts another one in its place; returns the exit code as `kill` does.

        In a built-in environment, whose texts may kill one child after another, a spare child then starts, for the next
        time.
        """
        exit_code = self._children[place].kill()
        self._children[place] = self._spare or Child(self.environment, self.memory_bytes)
        self._spare = Child(self.environment, self.memory_bytes) if self.environment.blames_text else None
        return exit_code


async def _within(seconds: float, work: Coroutine[None, None, T]) -> T:
    """Waits for `work` up to a limit; a result that came in time counts even if this process reads it late.

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


def goes_last(task: Task) -> bool:
    """True if the text is long: long texts make graders slow, and odd ones are refused before parsing."""
    return len(task.text) > LONG_CHARACTERS


def _verdict(environment: Environment, task: Task, answer: dict[str, object]) -> Verdict:
    """Reads a verdict from a child's answer, which may be anything if a text has taken the child over."""
    if "error" in answer:
        reason, culprit = str(answer["error"]), answer.get("culprit")
        if culprit == "text" and environment.blames_text:
            return _zero(task, reason)
        if culprit == "row":
            reason += f"; {environment} reads {', '.join(environment.row_fields)} of a row"
        failed = _failed("error", task, reason)
        return failed if environment.blames_text else dataclasses.replace(failed, trace=str(answer.get("trace", "")))
    reward, components, metrics = answer.get("reward"), answer.get("components"), answer.get("metrics")
    if not _is_number(reward):
        return _failed("error", task, f"the reward is {reward!r:.100}, not a finite number")
    for numbers, what in ((components, "components of the reward"), (metrics, "metrics")):
        if not isinstance(numbers, dict) or not all(map(_is_number, numbers.values())):
            return _failed("error", task, f"the {what} are {numbers!r:.100}, not finite numbers")
    assert isinstance(components, dict) and isinstance(metrics, dict)
    extracted, flags, observation, columns = (
        answer.get(name) for name in ("extracted", "flags", "observation", "columns")
    )
    if (
        not isinstance(extracted, str)
        or not isinstance(flags, list)
        or not _are_messages(observation)
        or not isinstance(columns, dict)
    ):
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
        metrics={safe_text(name): float(value) for name, value in metrics.items()},
        columns={
            safe_text(name): safe_text(str(text), MAX_EXTRACTED_CHARACTERS)
            for name, text in [*columns.items()][:MAX_COLUMNS]
        },
    )


def _zero(task: Task, reason: str) -> Verdict:
    return Verdict(
        reward=0.0,
        is_valid=True,
        status="ok",
        extracted="",
        text="\n".join(task.turns),
        flags=(TEXT_FAULT,),
        reason=reason,
    )


def _failed(status: Literal["timeout", "crash", "error"], task: Task, reason: str) -> Verdict:
    return Verdict(reward=0.0, is_valid=False, status=status, extracted="", text="\n".join(task.turns), reason=reason)


def _is_number(value: object) -> TypeGuard[int | float]:
    # By comparison, which also takes integers that are no float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_REWARD


def _are_messages(value: object) -> TypeGuard[list[dict[str, str]]]:
    return isinstance(value, list) and all(
        isinstance(message, dict) and all(isinstance(text, str) for text in message.values()) for message in value
    )


async def start_environment(
    name: str, config: EnvConfig, *, num_workers: int = MIN_WORKERS, endpoints: Path | None = None
) -> RewardPool:
    """The environment of this name with as many children: built-in, of `env.own.functions`, or of an installed package.

    `endpoints` is the file with the addresses of the engines, if any, for the user's own functions. RuntimeError: the
    children do not start, as the user's function cannot be imported, or this host cannot confine programs.
    """
    remove_abandoned()
    if landlock_abi() == 0:
        logger.warning(
            "The reward children of %s may write files: this kernel has no Landlock; see python -m mrl.doctor", name
        )
    declare = ENVIRONMENTS.get(name)
    declared = declare(config) if declare else own.environment(name, config, endpoints)
    return await RewardPool(dataclasses.replace(declared, name=name, num_workers=num_workers)).start()


class Scorer:
    """The environments of a process, by name. Each starts when a rollout first needs it. For one event loop."""

    def __init__(
        self, build: Callable[[str], Coroutine[None, None, RewardPool]], *, masks_flagged: bool = True
    ) -> None:
        """`build` starts an environment. With `masks_flagged`, rollouts flagged with `mask_sample` are not valid."""
        self.environments: dict[str, RewardPool] = {}
        self._build, self._masks_flagged = build, masks_flagged
        self._starting: dict[str, asyncio.Task[RewardPool]] = {}
        self._load = RewardLoad()
        self._num_unjudged, self._noted_at = 0, 0.0

    async def start(self, names: Sequence[str]) -> None:
        """Starts environments now."""
        await asyncio.gather(*map(self._environment, names))

    async def judge(self, request_id: str, env_name: str, task: Task) -> Verdict:
        """Judges a rollout. Raises if its environment cannot be started, or not again."""
        queued_at = time.monotonic()
        self._note_unjudged(1)
        environment = self.environments.get(env_name) or await self._environment(env_name)
        job = environment.submit(task)
        self._load += RewardLoad(longest_queue=sum(one.num_waiting for one in self.environments.values()))
        verdict = await job.verdict
        self._note_unjudged(-1)
        if job.begun_at >= queued_at:  # an equal rollout may have been begun before, or judged
            wait_s = job.begun_at - queued_at
            self._load += RewardLoad(num_judged=1, wait_s=wait_s, longest_wait_s=wait_s)
        if self._masks_flagged and verdict.is_valid and MASK_SAMPLE in verdict.flags:
            verdict = dataclasses.replace(
                verdict, is_valid=False, status="flagged", reason="its environment flags it with mask_sample"
            )
        if not verdict.is_valid:
            logger.warning("%s (%s) is not scored: %s", rollout_name(request_id), env_name, verdict.reason)
        return verdict

    def take_load(self) -> RewardLoad:
        """The load since the last call."""
        self._note_unjudged(0)
        load, self._load = self._load, RewardLoad()
        for environment in self.environments.values():
            load += RewardLoad(num_begun=environment.num_begun)
            environment.num_begun = 0
        return load

    async def _environment(self, name: str) -> RewardPool:
        if name not in self._starting:
            self._starting[name] = asyncio.ensure_future(self._build(name))
        started = await self._starting[name]
        return self.environments.setdefault(name, started)

    def _note_unjudged(self, num_more: int) -> None:
        now = time.monotonic()
        if self._num_unjudged:
            self._load += RewardLoad(seconds=now - self._noted_at)
        self._num_unjudged, self._noted_at = self._num_unjudged + num_more, now


def parsers_of(config: RunConfig, env_name: str, row: str, template_kwargs: str = "") -> tuple[bool, str]:
    """`has_parser` and `tool_parser` of a row's tasks; `template_kwargs` are the row's own.

    Thoughts are graded where NeMo Gym does not grade the row, as in NeMo RL.
    """
    chat = config.policy.generation.vllm_cfg.http_server_serving_chat_kwargs
    is_gyms = env_name in BUILT_IN and (config.env.should_use_nemo_gym or '"agent_ref":' in row)
    # A model that is told not to think writes no mark.
    values = {**(config.policy.tokenizer.chat_template_kwargs or {}), **json.loads(template_kwargs or "{}")}
    thinks = values.get("enable_thinking") is not False
    return is_gyms and thinks and chat.reasoning_parser is not None, chat.tool_parser or DEFAULT_TOOL_PARSER
