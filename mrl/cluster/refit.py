# SPDX-License-Identifier: Apache-2.0
"""Refit, as the driver runs it. Builds the schedule once; every step repeats it.

However many rounds a refit has, the driver calls each policy rank once and each engine twice, to refit and to serve:
ranks and engine workers wait for each other (`mrl.refit.pace`).
Where engines hold adapters beside the weights, these move alone, by a schedule of their own. The weights below move
once, and again to an engine that was restarted.
A refit is idempotent until its version is set: if an engine dies in it, the driver has all others leave the attempt,
starts the engine again and begins the refit anew.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import ray

from conversion.boxes import Slot
from conversion.families.common import EngineDtypes
from conversion.families.registry import family
from conversion.files.hf_folder import DTYPES, stored_tensors
from conversion.files.reading import read_file
from conversion.reshard import ScheduleError
from conversion.schedule import NUM_BUFFERS, Schedule
from conversion.texts import listed
from mrl.cluster.calls import wait_all
from mrl.cluster.engines import EngineGroup
from mrl.cluster.errors import ActorLost, ActorName, DeadlineExceeded
from mrl.cluster.policies import PolicyGroup
from mrl.cluster.runtime import Placement
from mrl.cluster.scheduling import ENGINE, until_no_engine_dies
from mrl.cluster.tasks import in_worker
from mrl.cluster.verbs import EngineVerbs, PolicyVerbs
from mrl.config.held_adapters import held_adapters
from mrl.config.schema.run import RunConfig
from mrl.env import kill_point
from mrl.plan.deadlines import start_deadline
from mrl.refit.checksum import check_unchanged
from mrl.refit.exchange import GpuHandles, handles_for
from mrl.refit.group import GroupAddress
from mrl.refit.inputs import ExchangeMember, Part, RefitInputs, WorkerRefit
from mrl.refit.pull import VerifyReport

logger = logging.getLogger(__name__)

# Ranks and workers leave an attempt after this part of the limit: an actor silent after that is treated as hung. They
# leave within `LEAVE_S` of an attempt that the driver gives up.
OWN_SHARE = 0.9
LEAVE_S = 10.0

Digests = dict[int, list[dict[Slot, int]]]
"""Checksums of every live tensor of every worker, by engine index."""


@dataclass(frozen=True)
class RefitReport:
    """One refit, summed over the engines that took part."""

    weight_version: int
    seconds: float
    verified_bytes: int
    padding_bytes: int

    def metrics(self) -> dict[str, float]:
        return {f"refit/{name}": float(value) for name, value in vars(self).items()}


@dataclass
class _Move:
    """Schedule of one part, the memory of the ranks, and the exchange group, which is None until it is made."""

    schedule: Schedule
    inputs: RefitInputs
    handles: dict[int, GpuHandles] = field(default_factory=dict)
    address: GroupAddress | None = None


class Refitter:
    """Moves the policy's settled weights into the engines."""

    def __init__(self, config: RunConfig, placement: Placement, policies: PolicyGroup, engines: EngineGroup) -> None:
        """Builds the schedule from the ranks' and the engines' layouts, proves it complete, and prepares both sides.

        Raises:
            ScheduleError: the layouts do not fit together.
            RuntimeError: the live model of an engine differs from its layout.
        """
        self.deadline_s = config.deadlines.refit_s
        self.policies = policies
        self.engines = engines
        self.slots = {engine.engine_index: engine.slots for engine in placement.engines}
        self.weight_version = 0
        self.attempt = 0
        inputs = refit_inputs(config, placement, policies, engines)
        self.schedule = build_schedule(config, inputs)
        self.inputs = inputs.signed(self.schedule)
        self.moves: dict[Part, _Move] = {"weights": _Move(self.schedule, self.inputs)}
        self._held = set[int]()
        """Engines that hold the weights below the adapters; empty where the weights themselves move."""
        self.has_experts = bool(family(inputs.hf_config).expert_layers(inputs.hf_config))
        self.model = Path(config.policy.model_name)
        logger.info("Refit schedule: %s", _summary(config, self.schedule))
        for line in self.schedule.casts():
            logger.info("%s", line)
        num_ranks = len(self.schedule.source_class)
        self.dedicated = [index for index, slots in self.slots.items() if slots[0] >= num_ranks]
        if held_adapters(config.policy) is not None:
            inputs = refit_inputs(config, placement, policies, engines, "adapters")
            schedule = build_schedule(config, inputs)
            logger.info("Refit schedule of the adapters alone: %s", _summary(config, schedule))
            self.moves["adapters"] = _Move(schedule, inputs.signed(schedule))
        self._num_groups = 0
        self._present = engines.serving
        """Engines of the last attempt."""
        for move in self.moves.values():
            self._meet(move)
        self._point_at_sources([index for index in self.slots if index not in self.dedicated])

    async def zero(self) -> RefitReport:
        """The witness: refits unchanged weights, and proves that every byte stays as vLLM's own loader wrote it.

        If one changes, no engine gets a weight version, so none can sample: RuntimeError names the tensors on which the
        tables are wrong.
        """
        self.weight_version += 1
        report = await self._refit(self.engines.serving, witness={})
        # A checkpoint's weights may come next.
        self._held.clear()
        logger.info(
            "Refit zero: %s bytes of the engines stayed as vLLM's own loader wrote them", f"{report.verified_bytes:,}"
        )
        return report

    async def run(self) -> RefitReport:
        """Refits all engines to the new weights. RuntimeError: names the first wrong bytes by slot, box and ranks."""
        self.weight_version += 1
        return await self._refit(self.engines.serving)

    async def restart_engine(self, index: int) -> None:
        """Restarts a dead engine, gives it the current weights and version, and asks its unfinished requests again.

        Where engines come and go, those that are up again get them.
        """
        await self._refit([], died=None if self.engines.is_elastic else index)

    def prepare_again(self, index: int) -> None:
        """Prepares a restarted engine. A dedicated one was part of the exchange group, which fails without it."""
        if index in self.dedicated:
            for move in self.moves.values():
                move.address = None
        else:
            self._point_at_sources([index])

    def worker_refits(self, engine: int, part: Part = "weights") -> list[WorkerRefit]:
        """Inputs of each worker of a colocated engine: schedule inputs, and the trainer ranks' memory that it reads."""
        move = self.moves[part]
        return [
            WorkerRefit(move.inputs, slot, handles_for(move.schedule, slot, move.handles))
            for slot in self.slots[engine]
        ]

    async def _refit(
        self, engines: Sequence[int], *, witness: Digests | None = None, died: int | None = None
    ) -> RefitReport:
        """Refits `engines`, and those that die meanwhile: dedicated ones take part in exchanges of others' refits."""

        joining = list[int]()

        async def attempt(restarted: set[int]) -> RefitReport:
            nonlocal joining
            await self.engines.wait_for_enough()
            joining = self.engines.take_in()
            present = sorted({*self.engines.serving, *joining})
            if present != self._present or joining:
                self._present = present
                self._held &= {*present} - {*joining}
                for move in self.moves.values():
                    move.address = None
            with self.engines.held(), self._without_silent():
                readers = {*engines, *restarted, *joining} & {*present}
                return await in_worker(self._attempt, sorted(readers), witness)

        async def restart(index: int) -> None:
            self._held.discard(index)
            if witness is not None:
                witness.pop(index, None)
            if self.engines.is_elastic:
                if not self.engines.has_left(index):  # its watch may have noticed first
                    self.engines.leave(index, ActorLost(self.engines.name(index), "refit", "its process has ended"))
                return
            # vLLM starts only where gpu_memory_utilization of a GPU is free. The policy holds weights alone there by
            # now: the driver misses an engine while it collects rollouts, or in an attempt, behind the policy's entry
            # into the refit.
            await self.engines.restart(index)
            await in_worker(self.prepare_again, index)

        report, restarted = await until_no_engine_dies(attempt, restart, died=died)
        for index in joining:
            self.engines.join(index)
        for index in restarted if not self.engines.is_elastic else ():
            self.engines.book.begin(index)
        return report

    @contextmanager
    def _without_silent(self) -> Iterator[None]:
        """Takes engines that may leave, and alone give no answer in time in the `with` block, for lost."""
        try:
            yield
        except DeadlineExceeded as late:
            names = [name for name in late.silent if isinstance(name, ActorName) and name.kind == ENGINE]
            if not self.engines.is_elastic or not names or len(names) < len(late.silent):
                raise
            for name in (name for name in names if not self.engines.has_left(name.index)):
                self.engines.leave(name.index, ActorLost(name, "refit", "it gives no answer"))
            raise ActorLost(names[0], "refit", str(late)) from late

    def _attempt(self, engines: Sequence[int], witness: Digests | None) -> RefitReport:
        start = time.monotonic()
        for move in self.moves.values():
            if move.address is None:
                self._meet(move)
        if witness is not None:
            unknown = [index for index in self._present if index not in witness]
            witness |= self.engines.call(EngineVerbs.live_digest, only=unknown)
        lacking = [index for index in engines if index not in self._held]
        reports, changed = self._run_rounds(lacking, "weights") if lacking else [], set[Slot]()
        kill_point("refit")
        if witness is not None:
            tensors = stored_tensors(self.model)  # also those that are left out, in any dtype
            stored = {name: DTYPES.get(tensor.dtype, tensor.dtype) for name, (_, tensor) in tensors.items()}
            for index, workers in self.engines.call(EngineVerbs.live_digest, only=self._present).items():
                for before, after in zip(witness[index], workers, strict=True):
                    if before != after:
                        changed |= set(check_unchanged(before, after, self.inputs.rounded(stored)))
            if changed:
                logger.info(
                    "Refit zero: tensors that the files have in a wider dtype, now rounded as in the trainer (%d): %s",
                    len(changed),
                    listed(sorted(set(map(str, changed)))),
                )
        if "adapters" in self.moves:
            self._held |= set(lacking)
            reports += self._run_rounds(engines, "adapters")
        # Only now do all engines hold what was verified; and all ranks have made room for their KV caches.
        self.engines.call(EngineVerbs.serve, self.weight_version, only=engines)
        kill_point("refit")
        return RefitReport(
            weight_version=self.weight_version,
            seconds=time.monotonic() - start,
            verified_bytes=sum(report.num_bytes for report in reports),
            padding_bytes=sum(report.padding_bytes for report in reports),
        )

    def _run_rounds(self, engines: Sequence[int], part: Part) -> list[VerifyReport]:
        """Runs all rounds on all ranks and workers at once; returns workers' reports. Skips ranks without a part."""
        self.attempt += 1
        move = self.moves[part]
        limit_s = OWN_SHARE * self.deadline_s
        readers = frozenset(slot for index in engines for slot in self.slots[index])
        sending = self.policies.start(
            PolicyVerbs.refit, dict.fromkeys(range(self.policies.world_size), (self.attempt, readers, limit_s, part))
        )
        copying = self.engines.start(
            EngineVerbs.refit,
            {
                index: (self.attempt, index in engines, limit_s, part)
                for index in sorted({*engines, *self._dedicated()})
            },
        )
        pending: dict[ActorName, ray.ObjectRef] = {**sending, **copying}
        kill_point("refit")
        try:
            answers = wait_all(
                pending, deadline_s=self.deadline_s, what="refit", on_failure=partial(self._give_up, move)
            )
        except RuntimeError as error:
            # A failed member breaks the group for all.
            move.address = None
            # After a death those that live still have to leave; after another error they had the time.
            is_death = isinstance(error, ActorLost)
            silent = unanswered(pending, within_s=LEAVE_S if is_death else 0.0)
            if is_death or not silent:
                raise
            text = f"{error}; {', '.join(map(str, silent))} gave no answer at all"
            raise DeadlineExceeded(text, silent) from error
        return [report for name in copying for report in answers[name]]

    def _give_up(self, move: _Move) -> None:
        """Makes all ranks and workers leave the attempt. Without rank 0's store they leave at their time limit."""
        assert move.address is not None
        try:
            move.address.give_up(self.attempt)
        except RuntimeError as error:
            logger.warning(
                "Ranks and engines cannot be told that attempt %d at the refit is given up: %s", self.attempt, error
            )

    def _meet(self, move: _Move) -> None:
        """Makes the exchange group of all participants. Ranks keep the memory that they have."""
        num_ranks, dedicated = len(move.schedule.source_class), self._dedicated()
        participants = *range(num_ranks), *(slot for index in dedicated for slot in self.slots[index])
        # The store remembers the addresses of an earlier group under its name.
        self._num_groups += 1
        address = GroupAddress(*self.policies.master, name=f"exchange {self._num_groups}", members=participants)
        member = ExchangeMember(address, self.deadline_s)
        members = {
            index: ([WorkerRefit(move.inputs, slot, member) for slot in self.slots[index]],) for index in dedicated
        }
        meeting = self.policies.start(
            PolicyVerbs.prepare_refit, dict.fromkeys(range(num_ranks), (move.inputs, address))
        )
        pending: dict[ActorName, ray.ObjectRef] = {**meeting, **self.engines.start(EngineVerbs.prepare_refit, members)}
        answers = wait_all(pending, deadline_s=self.deadline_s, what="prepare_refit")
        move.handles = {name.index: answers[name] for name in meeting}
        move.address = address

    def _dedicated(self) -> list[int]:
        return [index for index in self.dedicated if index in self._present]

    def _point_at_sources(self, engines: Sequence[int]) -> None:
        for part in self.moves:
            workers = {index: (self.worker_refits(index, part),) for index in engines}
            self.engines.call_each(EngineVerbs.prepare_refit, workers)


def _summary(config: RunConfig, schedule: Schedule) -> str:
    return schedule.summary if config.cluster.gpus_per_node else schedule.summary.replace("own GPUs", "own slots")


def unanswered(pending: Mapping[ActorName, ray.ObjectRef], *, within_s: float) -> list[ActorName]:
    """Actors that do not answer in time."""
    _, silent = ray.wait(list(pending.values()), num_returns=len(pending), timeout=within_s)
    return [name for name, reference in pending.items() if reference in silent]


def refit_inputs(
    config: RunConfig, placement: Placement, policies: PolicyGroup, engines: EngineGroup, part: Part = "weights"
) -> RefitInputs:
    """The inputs of the schedule from all policy ranks to all engine workers. A worker has the number of its slot."""
    start_s = start_deadline(config).seconds
    places = policies.call(PolicyVerbs.layout_arguments, deadline_s=start_s)
    live = engines.call(EngineVerbs.tensor_dtypes, part, deadline_s=start_s, only=engines.serving)
    # Engines that are not there yet will be as the others; each proves it when it prepares.
    live = dict.fromkeys(range(engines.num_engines), next(iter(live.values()))) | live
    # Equal lists of dtypes become one object: they come from every worker, and go to every participant.
    known: dict[EngineDtypes, EngineDtypes] = {}
    workers = {
        slot: (index, known.setdefault(live[engine.engine_index][index], live[engine.engine_index][index]))
        for engine in placement.engines
        for index, slot in enumerate(engine.slots)
    }
    vllm_cfg = config.policy.generation.vllm_cfg
    return RefitInputs(
        hf_config=json.loads(read_file(Path(config.policy.model_name) / "config.json")),
        ranks=tuple(places.values()),
        parallel=config.policy.generation.parallel,
        precision=vllm_cfg.loaded_precision,
        workers=workers,
        gpu_of={slot: slot for slot in workers},
        node_of=placement.node_of,
        buffer_bytes=int(config.policy.refit_buffer_size_gb * 1e9),
        adapters=held_adapters(config.policy) if part == "adapters" else None,
    )


def build_schedule(config: RunConfig, inputs: RefitInputs) -> Schedule:
    """The schedule of these inputs. ScheduleError: unfit layouts; ValueError: the buffer is too small for a message."""
    try:
        return inputs.schedule()
    except ScheduleError:
        raise
    except ValueError as error:
        raise ValueError(
            f"policy.refit_buffer_size_gb={config.policy.refit_buffer_size_gb}, of which a round takes "
            f"1/{NUM_BUFFERS}: {error}"
        ) from error
