"""The rollout engines as Ray actors, driven step by step, and the driver's handle on them.

An engine that dies is restarted here; it serves again only after a refit, and its unfinished requests are asked again.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import ray

from mrl.capacity.phases import Phase
from mrl.capacity.start_deadline import start_deadline
from mrl.cluster.environment import engine_variables
from mrl.cluster.lifetime import start_actor_process
from mrl.cluster.payload import PayloadRef, with_transcripts
from mrl.cluster.placement import Placement
from mrl.cluster.units import EngineUnits
from mrl.cluster.waiting import ActorLost, DeadlineExceeded, fetch, wait_all
from mrl.config.schema.run import RunConfig
from mrl.config.secrets import split_secrets
from mrl.envs.endpoints import FILE_NAME, Endpoints, write_endpoints
from mrl.types import Rollout, RolloutInfo, RolloutRequest

logger = logging.getLogger(__name__)

# A poll hands back what has finished after this long: short enough that rewards overlap generation, long enough that calls cost nothing.
POLL_BUDGET_S = 0.25
# An engine that dies this often without finishing a single rollout in between will not get better.
MAX_FRUITLESS_RESTARTS = 3


@dataclass(frozen=True)
class Polled:
    """What an engine did in one poll."""

    finished: list[RolloutInfo]
    busy_s: float
    """Seconds in which it had a rollout to work on."""


class EngineActor:
    """One engine in its own process."""

    def __init__(self, log_file: Path, secrets: Mapping[str, str]) -> None:
        start_actor_process(log_file, secrets)

    def build(self, config: RunConfig, device_ids: Sequence[int], api_key: str) -> str | None:
        """Starts the engine on these GPUs of its node; vLLM's own loader reads the model folder's weights.

        The base URL of its HTTP server, which asks for `api_key`, if the config wants one.
        """
        # Imported here: the driver holds this class too, and must not import vllm.
        from mrl.rollout.engine import Engine

        has_server = config.policy.generation.vllm_cfg.expose_http_server
        self.engine = Engine(
            config.policy.model_name,
            config.policy.generation,
            seed=config.grpo.seed,
            worker_timeout_s=config.deadlines.refit_s,
            device_ids=device_ids,
            keeps_routes=config.policy.router_replay.enabled,
            keeps_kv_cache=config.grpo.async_grpo.keeps_kv_cache,
            tokenizer=config.policy.tokenizer.name if config.policy.generation.stop_strings or has_server else None,
        )
        self.fetch_timeout_s = config.deadlines.reward_s
        self.engine.die_with_workers()
        self.engine.enter("load")
        self._finished_between: list[Rollout] = []
        self._is_woken = False
        if not has_server:
            return None
        from mrl.rollout.http_server import start_server

        self._self = ray.get_runtime_context().current_actor
        return start_server(self.engine, config.policy, host=ray.util.get_node_ip_address(), api_key=api_key, wake=self._wake)

    def poll(self, requests: list[RolloutRequest], budget_s: float) -> tuple[Polled, list[Rollout]]:
        """Queues requests and steps the engine for `budget_s`; what has finished, metadata first, payload second (same order)."""
        self.engine.add(with_transcripts(requests, timeout_s=self.fetch_timeout_s))
        start = time.monotonic()
        finished, self._finished_between = self._finished_between, []
        while self.engine.num_unfinished and time.monotonic() < start + budget_s:
            finished += self.engine.step()
        self._wake_for_callers()
        return Polled([describe(rollout) for rollout in finished], time.monotonic() - start), finished

    def serve(self) -> None:
        """Steps the engine for requests over HTTP between two polls; what else it finishes is kept for the next one.

        The actor calls this itself, behind the calls of the driver that have come before: all that touches the engine is one thread.
        """
        # Before the engine looks for questions: whoever asks from here on calls again.
        self._is_woken = False
        end = time.monotonic() + POLL_BUDGET_S
        try:
            while self.engine.can_sample and self.engine.callers.are_waiting and time.monotonic() < end:
                self._finished_between += self.engine.step()
        except Exception:
            # Nobody waits for this call. An engine that is gone is one that the driver starts again.
            logger.exception("A step for requests over HTTP failed; ending the engine")
            os._exit(1)
        self._wake_for_callers()

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self._self.serve.remote()

    def _wake_for_callers(self) -> None:
        if self.engine.can_sample and self.engine.callers.are_waiting:
            self._wake()

    def call(self, method: str, *arguments: object) -> object:
        """Calls a method of the engine by name."""
        result = getattr(self.engine, method)(*arguments)
        self._wake_for_callers()
        return result

    def apply(self, function: Callable[..., object], *arguments: object) -> object:
        """`function(engine, *arguments)`: tests and diagnostics reach into an engine with it."""
        return function(self.engine, *arguments)


def describe(rollout: Rollout) -> RolloutInfo:
    """What the driver learns of a rollout; the reference to the payload is filled in by the receiver."""
    request = rollout.request
    return RolloutInfo(
        request_id=request.request_id,
        epoch=request.epoch,
        prompt_id=request.prompt_id,
        rollout_index=request.rollout_index,
        weight_version=min(turn.weight_version for turn in rollout.turns),
        prompt_length=len(request.token_ids),
        length=len(rollout.token_ids),
        finish_reason=rollout.finish_reason,
        payload=None,
        num_observed=len(rollout.token_ids) - sum(turn.stop - turn.start for turn in rollout.turns),
        num_turns=len(rollout.turns),
        num_weight_versions=rollout.num_weight_versions,
    )


class EngineGroup:
    """All engines. Requests go to the engine with the fewest unfinished ones; finished rollouts stream back.

    `busy_s` adds up the seconds in which each engine had work. `lost` are those whose death was noted beside other work; they stand still
    until `restart`.
    """

    def __init__(self, config: RunConfig, placement: Placement, *, log_folder: Path) -> None:
        self.config = config
        self.start_s = start_deadline(config).seconds
        self.placement = placement
        self.log_folder = log_folder
        self.num_restarts = 0
        self.are_colocated = config.policy.generation.colocated.enabled
        self.busy_s = 0.0
        self.lost: set[int] = set()
        self._is_held = False
        self._api_key = secrets.token_urlsafe(32)
        self._base_urls = [""] * len(placement.engines)
        ahead = config.grpo.async_grpo
        self._max_fruitless_restarts = ahead.max_generation_failures + 1 if ahead.max_lag_steps > 0 else MAX_FRUITLESS_RESTARTS
        self._fruitless = [0] * len(placement.engines)
        self._unfinished: list[dict[str, RolloutRequest]] = [{} for _ in placement.engines]
        # The next poll takes them along, so that a refusal is seen by whoever waits for the rollouts.
        self._unsent: list[list[RolloutRequest]] = [[] for _ in placement.engines]
        self._polls: dict[ray.ObjectRef, tuple[int, ray.ObjectRef]] = {}
        self._building: dict[str, ray.ObjectRef] = {}
        self.actors: list = [self._start(units) for units in placement.engines]

    @property
    def num_engines(self) -> int:
        return len(self.actors)

    @property
    def num_unfinished(self) -> int:
        return sum(len(requests) for requests in self._unfinished)

    def wait_until_built(self) -> None:
        """Waits for the engines that were started and have not been waited for."""
        building, self._building = self._building, {}
        base_urls = wait_all(building, deadline_s=self.start_s, what="start")
        if not building or not self.config.policy.generation.vllm_cfg.expose_http_server:
            return
        for index in range(self.num_engines):
            self._base_urls[index] = str(base_urls.get(name(index), self._base_urls[index]))
        write_endpoints(self.log_folder, Endpoints(self._base_urls, self._api_key, self.config.policy.model_name))
        logger.info("HTTP servers of the engines: %s; the key stands in %s", ", ".join(self._base_urls), self.log_folder / FILE_NAME)

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Queues requests on the engines. A request stays on record until its rollout has arrived."""
        for request in requests:
            index = min(range(self.num_engines), key=lambda index: len(self._unfinished[index]))
            self._unfinished[index][request.request_id] = request
            self._unsent[index].append(request)

    @property
    def num_expected(self) -> int:
        """Unfinished requests of the engines that are not lost."""
        return sum(len(requests) for index, requests in enumerate(self._unfinished) if index not in self.lost)

    def collect(self, timeout_s: float) -> list[RolloutInfo]:
        """Rollouts that have finished since the last call; waits until there is one.

        Raises:
            ActorLost: an engine died (its `key` names it); call `restart`, refit it, then `resubmit`.
            DeadlineExceeded: nothing finished within `timeout_s`.
            ValueError: an engine refuses a request; see `Engine.add`.
        """
        end = time.monotonic() + timeout_s
        while references := self.references():
            ready, _ = ray.wait(references, num_returns=1, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                raise DeadlineExceeded(
                    f"generation: {self._missing()} unfinished and none arrived within {timeout_s:g} s (deadlines.generate_s)"
                )
            if infos := self._take(ready[0]):
                return infos
        return []

    def references(self) -> list[ray.ObjectRef]:
        """The polls under way; engines with work are polled first, unless they are held or lost."""
        self._poll_idle_engines()
        return [] if self._is_held else list(self._polls)

    def take_ready(self) -> list[RolloutInfo]:
        """Rollouts that have finished since the last call. Does not wait, and puts engines that died into `lost`."""
        references = self.references()
        if not references:
            return []
        ready, _ = ray.wait(references, num_returns=len(references), timeout=0.0)
        infos: list[RolloutInfo] = []
        for reference in ready:
            try:
                infos += self._take(reference)
            except ActorLost as lost:
                logger.warning("%s; it is started again at the next refit, or when its rollouts are waited for", lost)
                self.lost.add(index_of(lost))
        self._poll_idle_engines()
        return infos

    @contextmanager
    def held(self) -> Iterator[None]:
        """No poll is begun or taken inside the `with` block: engines are being refitted, and step between two refits only."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def _take(self, reference: ray.ObjectRef) -> list[RolloutInfo]:
        index, payload = self._polls.pop(reference)
        polled = cast(Polled, fetch(reference, key=name(index), what="generation"))
        self.busy_s += polled.busy_s
        for info in polled.finished:
            del self._unfinished[index][info.request_id]
            self._fruitless[index] = 0
        return [dataclasses.replace(info, payload=PayloadRef(payload, i)) for i, info in enumerate(polled.finished)]

    def _missing(self) -> str:
        """`12 rollouts (0/train:7/3 of engine 0 and others)`."""
        first = next(f"{next(iter(requests))} of {name(index)}" for index, requests in enumerate(self._unfinished) if requests)
        return f"{self.num_unfinished} rollouts ({first} and others)"

    def restart(self, index: int) -> None:
        """Starts a dead engine again. It refuses to generate until it has been refitted.

        Raises:
            ActorLost: it died while it started.
            RuntimeError: it has died too often without producing a rollout.
        """
        self._fruitless[index] += 1
        if self._fruitless[index] > self._max_fruitless_restarts:
            raise RuntimeError(
                f"{name(index)} died {self._fruitless[index]} times in a row without finishing a rollout; see {self._log_file(index)}"
            )
        self.num_restarts += 1
        logger.warning("%s died; starting it again (%d requests will be asked again)", name(index), len(self._unfinished[index]))
        self._polls = {reference: poll for reference, poll in self._polls.items() if poll[0] != index}
        self.lost.discard(index)
        ray.kill(self.actors[index])
        self.actors[index] = self._start(self.placement.engines[index])
        self.wait_until_built()

    def resubmit(self, index: int) -> None:
        """Asks an engine's unfinished requests again, after a restart and a refit."""
        self._unsent[index] = list(self._unfinished[index].values())

    def call(self, method: str, *arguments: object, deadline_s: float, only: Sequence[int] | None = None) -> dict[int, object]:
        """`Engine.<method>(*arguments)` on every engine, or on those of `only`; results by engine index."""
        return self.call_each(method, {i: arguments for i in (range(self.num_engines) if only is None else only)}, deadline_s=deadline_s)

    def enter(self, phase: Phase, *, deadline_s: float) -> None:
        """Brings all engines into `phase` at once. One that has died meanwhile is left for the next refit, which starts it again."""
        lost: list[ActorLost] = []
        pending = self.start_each("enter", {index: (phase,) for index in range(self.num_engines)})
        wait_all(pending, deadline_s=deadline_s, what="enter", lost=lost)
        for loss in lost:
            logger.warning("%s; it is started again at the next refit", loss)

    def call_each(self, method: str, arguments: dict[int, tuple[object, ...]], *, deadline_s: float) -> dict[int, object]:
        """`Engine.<method>` with arguments of its own for each engine; results by engine index."""
        results = wait_all(self.start_each(method, arguments), deadline_s=deadline_s, what=method)
        return {i: results[name(i)] for i in arguments}

    def start_each(self, method: str, arguments: dict[int, tuple[object, ...]]) -> dict[str, ray.ObjectRef]:
        """Starts `Engine.<method>` with arguments of its own for each engine; what to wait for, by name."""
        return {name(i): self.actors[i].call.remote(method, *mine) for i, mine in arguments.items()}

    def apply(self, function: Callable[..., object], *arguments: object, deadline_s: float) -> list[object]:
        """`function(engine, *arguments)` on every engine."""
        pending = {name(i): actor.apply.remote(function, *arguments) for i, actor in enumerate(self.actors)}
        return list(wait_all(pending, deadline_s=deadline_s, what="apply").values())

    def _log_file(self, index: int) -> Path:
        return self.log_folder / f"engine-{index}.log"

    def _start(self, units: EngineUnits):  # the handle type is private to Ray
        given, hidden = split_secrets(self.config.policy.generation.vllm_cfg.env_vars or {})
        options = self.placement.options(units.units[0], engine_variables(self.config, given))
        actor = ray.remote(EngineActor).options(**options).remote(self._log_file(units.engine_index), hidden)
        devices = units.device_ids(self.config.cluster.gpus_per_node)
        self._building[name(units.engine_index)] = actor.build.remote(self.config, devices, self._api_key)
        return actor

    def _poll_idle_engines(self) -> None:
        standing = self.lost | {index for index, _ in self._polls.values()}
        for index, actor in enumerate(self.actors):
            if self._unfinished[index] and index not in standing and not self._is_held:
                poll = actor.poll.options(num_returns=2).remote(self._unsent[index], POLL_BUDGET_S)
                self._unsent[index] = []
                infos, payload = cast(tuple[ray.ObjectRef, ray.ObjectRef], poll)
                self._polls[infos] = (index, payload)


def name(index: int) -> str:
    """How messages call an engine."""
    return f"engine {index}"


def index_of(lost: ActorLost) -> int:
    """The engine that an `ActorLost` names; re-raises it when it names another actor."""
    kind, _, index = str(lost.key).partition(" ")
    if kind != "engine":
        raise lost
    return int(index)
