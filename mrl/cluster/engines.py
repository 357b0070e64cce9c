# SPDX-License-Identifier: Apache-2.0
"""Engines as Ray actors, driven step by step: the driver's handles on those of rollouts, and gateways' lines.

An engine that dies is restarted here; it serves again only after a refit, and then the driver asks its unfinished
requests again, or others meanwhile.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import ray
from ray.exceptions import RayError

from conversion.texts import listed
from mrl import numa, spans
from mrl.cluster import scheduling
from mrl.cluster.calls import answered, ask, put, start_actor, wait_all
from mrl.cluster.engine_parts import EnginePart, EngineParts, engine_settings
from mrl.cluster.environment import engine_variables, importing, own_temporary_folder, start_actor_process
from mrl.cluster.errors import ActorLost, ActorName
from mrl.cluster.payload import Packed, pack, with_transcripts
from mrl.cluster.runtime import Placement
from mrl.cluster.scheduling import EngineSlots, device_ids
from mrl.cluster.service import ENGINES, LOOK_S, Service
from mrl.cluster.tasks import MAX_FRUITLESS_RESTARTS, BackgroundTasks, Silence, in_worker
from mrl.cluster.verbs import EngineVerbs
from mrl.config.rules.tokens import num_choices
from mrl.config.schema.run import RunConfig
from mrl.config.secrets import split_secrets
from mrl.config.texts import rounded
from mrl.metrics import EngineWork
from mrl.phases import Phase
from mrl.plan.deadlines import start_deadline
from mrl.plan.hardware import local_gpu
from mrl.plan.memory import with_limits
from mrl.rollout.callers import Answered, Client, EngineLost, EngineThread, Params, Prompt, RemoteCallers, Sent
from mrl.types import PayloadRef, Rollout, RolloutInfo, RolloutRequest

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)
T = TypeVar("T")

# A poll ends after this long, for new requests, or as soon as a rollout has finished, if it is not too short: calls
# cost the driver time.
POLL_BUDGET_S, MIN_POLL_S = 0.25, 0.1
CALLERS = "callers"
"""Group of calls under way beside those of the driver: of gateways, and to look at it."""
# Of each gateway one call waits for answers, and one, of the process before it that has died, may do so, too.
CALLERS_PER_GATEWAY, OTHER_CALLERS = 2, 3
# The engine answers so often, as a sign of life.
LISTEN_S = 1.0


Polled = tuple[list[RolloutInfo], EngineWork]
"""Result of one poll of an engine: the rollouts that it finished, and its work since the last poll."""


class EngineActor:
    def __init__(self, log_file: Path, secrets: Mapping[str, str]) -> None:
        start_actor_process(log_file, secrets)
        self._secrets = secrets
        self._thread = EngineThread()
        self._told = EngineWork()
        """Work of the engine that polls have told of."""

    def build(
        self, config: RunConfig, device_ids: Sequence[int], parts: Sequence[EnginePart], version: int | None
    ) -> None:
        """Starts the engine on these GPUs of its first node, parts on others; vLLM loads the model folder's weights.

        With a `version`, it serves them as these at once; else it waits for a refit.
        """
        self._thread.do(lambda: self._build(config, device_ids, parts))
        if version is not None:
            self.call("enter", "refit")
            self.call("serve", version)

    def _build(self, config: RunConfig, device_ids: Sequence[int], parts: Sequence[EnginePart]) -> None:
        config = with_limits(config, local_gpu() if config.cluster.gpus_per_node else None)
        if config.cluster.num_nodes > 1:
            self._temporary = own_temporary_folder()
        self._parts = EngineParts(config, parts, self._secrets) if parts else None
        if device_ids and config.cluster.bind_to_numa:
            logger.info("%s", numa.bind(numa.gpu_nodes(device_ids)))
        # Imported here: the driver holds this class too, and must not import vllm.
        with importing():
            from mrl.rollout.engine import Engine

        start = time.monotonic()
        spans.begin("build")
        self.engine = Engine(
            **engine_settings(config),
            worker_timeout_s=config.deadlines.refit_s,
            device_ids=device_ids,
            keeps_kv_cache=config.rollouts.async_grpo.keeps_kv_cache,
            num_tokens=num_choices(config),
            nodes=self._parts.nodes if self._parts else None,
        )
        if len(device_ids) > 1 and config.cluster.bind_to_numa:
            self.engine.bind_workers(device_ids)
        self.verbs: EngineVerbs = self.engine
        self.fetch_timeout_s = config.deadlines.reward_s
        self.engine.die_with_workers()
        self.engine.enter("load")
        spans.add("build", start)
        self._thread.serve(self.engine)
        self._callers = RemoteCallers(self.engine.callers, self._thread.wake)

    @ray.method(concurrency_group=CALLERS)
    def look(self) -> bool:
        """Tells, after a while, whether it has answered callers meanwhile. A thread that hangs never does."""
        num_answered = self._callers.num_answered
        time.sleep(LOOK_S)
        self._thread.do(lambda: None)
        return self._callers.num_answered > num_answered

    @ray.method(concurrency_group=CALLERS)
    def ask(self, client: Client, questions: Sequence[Sent], withdrawn: Sequence[str]) -> None:
        """See `RemoteCallers`."""
        self._callers.ask(client, questions, withdrawn)

    @ray.method(concurrency_group=CALLERS)
    def take_answers(self, client: Client, limit_s: float) -> list[tuple[str, Answered | ValueError]]:
        return self._callers.take(client, limit_s)

    @ray.method(concurrency_group=CALLERS)
    def health(self) -> tuple[bool, int | None]:
        """Tells whether the engine can sample now, and its weight version."""
        return self.engine.can_sample, self.engine.weight_version

    def poll(self, requests: list[RolloutRequest], budget_s: float) -> tuple[Polled, Packed]:
        """Queues requests, steps the engine up to `budget_s`; finished metadata and packed payloads, in one order."""
        return self._thread.do(lambda: self._poll(requests, budget_s))

    def _poll(self, requests: list[RolloutRequest], budget_s: float) -> tuple[Polled, Packed]:
        self.engine.add(with_transcripts(requests, timeout_s=self.fetch_timeout_s))
        start = time.monotonic()
        finished, self._thread.finished = self._thread.finished, []
        if self.engine.num_unfinished:
            spans.begin("generate", "generate")
            while self.engine.num_unfinished and time.monotonic() < start + (
                min(budget_s, MIN_POLL_S) if finished else budget_s
            ):
                finished += self.engine.step()
            if self.engine.num_unfinished:
                spans.stretch("generate", start)
            else:
                spans.stretch("generate", start, **self._memory(start))
                spans.end_stretch()
        now = EngineWork(0.0, self.engine.num_drawn, self.engine.num_recomputed)
        told, self._told = now.since(self._told), now
        work = told._replace(seconds=time.monotonic() - start)
        return ([RolloutInfo.of(rollout) for rollout in finished], work), pack(finished)

    def unfinished(self) -> list[Rollout]:
        """Rollouts that no poll has handed out, as far as they are sampled; see `Engine.unfinished`."""
        return self._thread.do(lambda: [*self._thread.finished, *self.engine.unfinished()])

    def call(self, verb: str, *arguments: object) -> object:
        return self._thread.do(lambda: self._call(verb, *arguments))

    def _call(self, verb: str, *arguments: object) -> object:
        start = time.monotonic()
        spans.begin(spans.name_of(verb, *arguments), self.engine.phase or "")
        answer = getattr(self.verbs, verb)(*arguments)
        spans.add(spans.name_of(verb, *arguments), start, **self._memory(start))
        return answer

    def _memory(self, since: float) -> dict[str, spans.Fact]:
        if time.monotonic() - since < spans.MIN_MEASURED_S:
            return {}
        # A dedicated engine knows no phases: it generates in all of them.
        return {"phase": self.engine.phase or "generate", **self.engine.memory_facts()}

    def apply(self, function: Callable[..., T], *arguments: object) -> T:
        """`function(engine, *arguments)`: tests and diagnostics reach into an engine with it."""
        return self._thread.do(lambda: function(self.engine, *arguments))


class EngineGroup(Service[EngineVerbs, RolloutRequest, RolloutInfo, None]):
    """All engines. `book` carries requests to them and rollouts back; a dead engine gets none until it is up again."""

    def __init__(self, config: RunConfig, placement: Placement, *, log_folder: Path, tasks: BackgroundTasks) -> None:
        self.config, self.placement = config, placement
        self.are_colocated = config.policy.generation.colocated.enabled
        self.work = EngineWork()
        """Work of all engines for the rollouts of `book`, and tokens for callers beside these."""
        at_least = config.policy.generation.min_num_engines
        self.is_elastic = at_least is not None
        """True when engines may leave and join, as long as `min_num_engines` serve."""
        self.min_num_engines = at_least or len(placement.engines)
        # Longer than a refit, in which an engine does not answer looks.
        look_s = LOOK_S + max(config.deadlines.generate_s, config.deadlines.refit_s) if self.is_elastic else None
        self.silence_s = 2 * look_s if look_s is not None else 0.0
        """Time after which an engine that hangs has left."""
        ahead = config.rollouts.async_grpo
        max_restarts = ahead.max_generation_failures + 1 if ahead.max_lag_steps > 0 else MAX_FRUITLESS_RESTARTS
        if self.is_elastic:  # with its node an engine loses the next one, too, until Ray knows
            max_restarts = max(max_restarts, MAX_FRUITLESS_RESTARTS)
        super().__init__(
            ENGINES,
            len(placement.engines),
            tasks=tasks,
            log_folder=log_folder,
            deadline_s=config.deadlines.refit_s,
            start_s=start_deadline(config).seconds,
            look_s=look_s,
            max_restarts=max_restarts,
            on_death=self.leave if self.is_elastic else None,
        )

        self.book.absent |= placement.absent_engines
        if placement.absent_engines:
            absent = listed([str(self.name(index)) for index in sorted(placement.absent_engines)])
            logger.warning("No node has room for %s now: a refit takes it in once it is up", absent)

    @property
    def num_engines(self) -> int:
        return len(self.handles)

    @property
    def serving(self) -> list[int]:
        """Engines that have not left."""
        return [index for index in range(self.num_engines) if index not in self.book.absent]

    @property
    def joining(self) -> list[int]:
        """Engines that have left, and are up again."""
        return [index for index in sorted(self.book.absent) if index in self._starts and is_over(self._starts[index])]

    def leave(self, index: int, lost: ActorLost) -> None:
        """Gives a dead engine's requests to others; another one starts as soon as Ray has its place, and may join."""
        num_serving = len(self.serving)
        num_requests, tries_again = self.book.leave(index)
        told = f"{len(self.serving)} of {self.num_engines} engines go on"
        told += f", also with its requests ({num_requests})" if len(self.serving) < num_serving else ""
        ray.kill(self._newest[index])
        if tries_again:
            logger.warning("%s; %s. It joins at a refit once it is up again", lost, told)
            self._start(index)
            self._watch_soon(index)
        else:
            del self._starts[index]
            logger.error(
                "%s, again without a rollout before: it stays away; %s; see %s", lost, told, self.log_file(index)
            )
        if len(self.serving) < self.min_num_engines:
            self.book.lost.add(index)
        self.tasks.tell(self.service.wait)

    def take_in(self) -> list[int]:
        """Lets calls reach the engines that are up again; their indices. They get requests once they `join`."""
        joining = self.joining
        for index in joining:
            self.handles[index] = self._newest[index]
        return joining

    def has_left(self, index: int) -> bool:
        """True if calls still go to an engine for which another one has been started."""
        return self.handles[index] is not self._newest[index]

    async def wait_for_enough(self) -> None:
        """Waits until `min_num_engines` serve, or are up again. RuntimeError: not within the deadline of a start."""

        def number() -> int:
            return len(self.serving) + len(self.joining)

        if number() >= self.min_num_engines:
            return
        rule = f"fewer engines serve than policy.generation.min_num_engines={self.min_num_engines}"
        limit = f"{rounded(self.start_s)} s (deadlines.start_s)"
        absent = listed([str(self.name(index)) for index in sorted(self.book.absent)])
        logger.warning("%s: the run waits up to %s for %s", rule, limit, absent)
        try:
            await self.tasks.wait(
                lambda: number() >= self.min_num_engines, what="engines", who=lambda: [], limit_s=self.start_s
            )
        except Silence:
            raise RuntimeError(
                f"{rule}, and none of {absent} has come up within {limit}: bring nodes for them, or lower the minimum"
            ) from None

    def join(self, index: int) -> None:
        """Gives requests to an engine that has been refitted, unless it has died again."""
        if self.has_left(index):
            return
        self.book.join(index)
        logger.info("%s has joined: %d of %d engines serve", self.name(index), len(self.serving), self.num_engines)

    async def _carry(self, index: int, requests: list[RolloutRequest]) -> dict[str, RolloutInfo]:
        polled: Polled
        polled, payload = await self._answer(self.handles[index].poll, index, requests, POLL_BUDGET_S)
        finished, work = polled
        if finished and self.is_elastic:
            # Its node, where Ray keeps this, may be lost before a step trains on it.
            payload = put(await self._kept(index, payload))
        self.work = self.work.plus(work)
        return {
            info.request_id: dataclasses.replace(info, payload=PayloadRef(payload, place))
            for place, info in enumerate(finished)
        }

    async def _kept(self, index: int, payload: ray.ObjectRef[Packed]) -> Packed:
        try:
            return await answered(payload, actor=self.name(index), what=self.service.wait)
        except ActorLost:
            raise
        except RuntimeError as error:
            raise ActorLost(self.name(index), self.service.wait, str(error)) from error

    async def unfinished(self) -> list[Rollout]:
        """Rollouts under way in engines that live, as far as they are sampled; see `Engine.unfinished`."""

        async def of(index: int) -> list[Rollout]:
            try:
                answer = ask(self.handles[index], EngineActor.unfinished)
                return await answered(answer, actor=self.name(index), what="unfinished rollouts")
            except ActorLost:  # whoever waits for its rollouts notices, too
                return []

        indices = (index for index in self.serving if index not in self.book.lost)
        return [rollout for found in await asyncio.gather(*map(of, indices)) for rollout in found]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Pauses polling in the `with` block: engines that are being refitted must not step."""
        self.book.hold(True)
        try:
            yield
        finally:
            self.book.hold(False)

    async def restart(self, index: int) -> None:
        """Restarts a dead engine; it refuses work until refitted. RuntimeError: it dies too often without a rollout."""
        self.start_again(index, f"{self.name(index)} died")
        await in_worker(self.wait_until_up)

    def enter(self, phase: Phase, *, deadline_s: float) -> None:
        """Brings all engines, which are held, into `phase` at once. Leaves one that died to its watch, and a refit."""
        pending = self.start(EngineVerbs.enter, dict.fromkeys(range(self.num_engines), (phase,)))
        wait_all(pending, deadline_s=deadline_s, what="enter", ignores_deaths=True)

    def _launch(self, index: int) -> tuple[ActorHandle[EngineActor], ray.ObjectRef[None]]:
        num_gateways, slots = scheduling.num_gateways(self.config), self.placement.engines[index]
        return start_engine(self.config, self.placement, slots, self.log_file(index), num_gateways=num_gateways)


def is_over(call: ray.ObjectRef) -> bool:
    """True if a call has ended well."""
    if not ray.wait([call], timeout=0)[0]:
        return False
    try:
        ray.get(call, timeout=LISTEN_S)
    except RayError:
        return False
    return True


def start_engine(
    config: RunConfig,
    placement: Placement,
    slots: EngineSlots,
    log_file: Path,
    *,
    num_gateways: int,
    version: int | None = None,
) -> tuple[ActorHandle[EngineActor], ray.ObjectRef[None]]:
    """Starts an engine of the config's policy on these slots; its actor, and the call of `EngineActor.build`."""
    given, hidden = split_secrets(config.policy.generation.vllm_cfg.env_vars or {}, config.facts.secrets)
    first, *further = (
        EnginePart(
            placement.options(part[0], engine_variables(config, given)),
            log_file.with_stem(f"{log_file.stem}-node-{node}") if node else log_file,
            device_ids(part, config.cluster.gpus_per_node),
        )
        for node, part in enumerate(slots.parts(placement.node_of))
    )
    options = {**first.options, "concurrency_groups": {CALLERS: CALLERS_PER_GATEWAY * num_gateways + OTHER_CALLERS}}
    actor = start_actor(EngineActor, options, first.log_file, hidden)
    return actor, ask(actor, EngineActor.build, config, first.device_ids, further, version)


class EngineLine:
    """A gateway's line to one engine: questions, many in one call, and their answers. For the gateway's event loop.

    `client` names its process: engines drop the questions of a dead one.
    """

    def __init__(self, name: ActorName, handle: ActorHandle[EngineActor], client: Client) -> None:
        self.handle = handle
        self._name, self._client = name, client
        self._owed: dict[str, asyncio.Future[Answered]] = {}
        self._unsent: list[Sent] = []
        self._withdrawn: list[str] = []
        self._sending: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None

    async def ask(self, prompt: Prompt, params: Params) -> Answered:
        """Asks the engine; withdraws the question when the task is cancelled. EngineLost: the engine has died."""
        question_id = uuid.uuid4().hex
        answer = self._owed[question_id] = asyncio.get_running_loop().create_future()
        self._unsent.append((question_id, prompt, params))
        self._send_soon()
        self._listening = self._listening or asyncio.ensure_future(self._listen())
        try:
            return await answer
        finally:
            if self._owed.pop(question_id, None) is not None:
                self._withdrawn.append(question_id)
                self._send_soon()

    async def health(self) -> tuple[bool, int | None]:
        """Tells whether the engine can sample now, and its weight version. EngineLost: it has died."""
        call = self.handle.health.remote()
        try:
            return await answered(call, actor=self._name, what="health")
        except RuntimeError as lost:
            raise EngineLost(str(lost)) from lost

    def _send_soon(self) -> None:
        self._sending = self._sending or asyncio.ensure_future(self._send())

    async def _send(self) -> None:
        """Sends waiting questions and withdrawals, call by call: a question comes before its withdrawal."""
        while self._unsent or self._withdrawn:
            (unsent, self._unsent), (withdrawn, self._withdrawn) = (self._unsent, []), (self._withdrawn, [])
            call = self.handle.ask.remote(self._client, unsent, withdrawn)
            try:
                await answered(call, actor=self._name, what="questions")
            except (RuntimeError, ValueError) as lost:
                self._lose(lost)
        self._sending = None

    async def _listen(self) -> None:
        while self._owed:
            call = self.handle.take_answers.remote(self._client, LISTEN_S)
            try:
                answers = await answered(call, actor=self._name, what="answers")
            except (RuntimeError, ValueError) as lost:
                self._lose(lost)
                break
            for question_id, answer in answers:
                if (asked := self._owed.pop(question_id, None)) is None or asked.done():
                    continue  # withdrawn meanwhile
                if isinstance(answer, Exception):
                    asked.set_exception(answer)
                else:
                    asked.set_result(answer)
        self._listening = None

    def _lose(self, lost: Exception) -> None:
        owed, self._owed = self._owed, {}
        for asked in owed.values():
            if not asked.done():
                asked.set_exception(EngineLost(str(lost)))
