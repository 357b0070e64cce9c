# SPDX-License-Identifier: Apache-2.0
"""Refit, as the driver runs it: settle, exchange, pull, verify, version. Builds the schedule once; every step repeats it.

A refit is idempotent until its version is set: if an engine dies in it, the driver starts the engine again and begins the refit anew.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from conversion.boxes import Slot
from conversion.families.common import EngineDtypes, VllmParallel
from conversion.reshard import ScheduleError
from conversion.schedule import Schedule
from mrl.cluster.calls import wait_all
from mrl.cluster.engines import EngineGroup
from mrl.cluster.policies import PolicyGroup
from mrl.cluster.runtime import Placement
from mrl.cluster.scheduling import start_deadline, until_no_engine_dies
from mrl.cluster.verbs import EngineVerbs, PolicyVerbs
from mrl.config.schema.run import RunConfig
from mrl.refit.checksum import check_unchanged
from mrl.refit.exchange import GpuHandles, handles_for
from mrl.refit.group import GroupAddress
from mrl.refit.inputs import ExchangeMember, RefitInputs, WorkerRefit

if TYPE_CHECKING:
    import ray

    from mrl.cluster.errors import ActorName

logger = logging.getLogger(__name__)

Digests = dict[int, list[dict[Slot, int]]]
"""Checksums of every live tensor of every worker, by engine index."""


@dataclass(frozen=True)
class RefitReport:
    """One refit, summed over the engines that took part."""

    weight_version: int
    seconds: float
    verified_bytes: int
    padding_bytes: int
    copied_bytes: int

    def metrics(self) -> dict[str, float]:
        return {f"refit/{name}": float(value) for name, value in vars(self).items()}


class Refit:
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
        self.num_groups = 0
        self.weight_version = 0
        inputs = refit_inputs(config, placement, policies, engines)
        self.schedule = build_schedule(config, inputs)
        self.inputs = inputs.signed(self.schedule)
        logger.info("Refit schedule: %s", self.schedule.summary)
        for line in self.schedule.casts():
            logger.info("%s", line)
        num_ranks = len(self.schedule.source_class)
        self.dedicated = [index for index, slots in self.slots.items() if slots[0] >= num_ranks]
        self._handles: dict[int, GpuHandles] = {}
        self._prepare()

    def zero(self) -> RefitReport:
        """The witness: refits unchanged weights, and proves that every byte stays as vLLM's own loader wrote it.

        If one changes, no engine gets a weight version, so none can sample: RuntimeError names the tensors on which the tables are wrong.
        """
        self.weight_version += 1
        report = self._refit(range(self.engines.num_engines), witness={})
        logger.info("Refit zero: %s bytes of the engines stayed as vLLM's own loader wrote them", f"{report.verified_bytes:,}")
        return report

    def run(self) -> RefitReport:
        """Refits all engines, which then sample from the new weights. RuntimeError: names the first wrong bytes by slot, box and ranks."""
        self.weight_version += 1
        return self._refit(range(self.engines.num_engines))

    def restart_engine(self, index: int) -> None:
        """Starts a dead engine again, gives it the current weights and version, and asks its unfinished requests again."""
        self._refit([], died=index)

    def prepare_again(self, index: int) -> None:
        """Prepares an engine that was started again. A dedicated one was part of the exchange group, which no longer works without it."""
        if index in self.dedicated:
            self._prepare()
        else:
            self._point_at_sources([index])

    def worker_refits(self, engine: int) -> list[WorkerRefit]:
        """What each worker of a colocated engine needs: the schedule's inputs, and the memory of the trainer ranks that it reads."""
        return [WorkerRefit(self.inputs, slot, handles_for(self.schedule, slot, self._handles)) for slot in self.slots[engine]]

    def _refit(self, engines: Sequence[int], *, witness: Digests | None = None, died: int | None = None) -> RefitReport:
        """Refits `engines`, and those that die meanwhile: dedicated ones take part in the exchange of a refit that is not theirs."""

        def attempt(restarted: set[int]) -> RefitReport:
            with self.engines.held():
                return self._attempt(sorted({*engines, *restarted}), witness)

        def restart(index: int) -> None:
            # vLLM starts only where gpu_memory_utilization of a GPU is free. The policy holds weights alone there by now: the driver misses
            # an engine while it collects rollouts, or in an attempt, behind the policy's entry into the refit.
            if witness is not None:
                witness.pop(index, None)
            self.engines.restart(index)
            self.prepare_again(index)

        report, restarted = until_no_engine_dies(attempt, restart, died=died)
        for index in restarted:
            self.engines.book.resubmit(index)
        return report

    def _attempt(self, engines: Sequence[int], witness: Digests | None) -> RefitReport:
        start = time.monotonic()
        copied_bytes = 0
        if witness is not None:
            unknown = [index for index in range(self.engines.num_engines) if index not in witness]
            witness |= self.engines.call(EngineVerbs.live_digest, only=unknown)
        self.policies.call(PolicyVerbs.enter, "refit", deadline_s=self.deadline_s)
        self.engines.call(EngineVerbs.enter, "refit", only=engines)
        self.policies.call(PolicyVerbs.settle, deadline_s=self.deadline_s)
        for round_index in range(self.schedule.num_rounds):
            if self.dedicated:
                # All at once, engines that are not refitted too.
                pending = self.policies.start(PolicyVerbs.exchange, dict.fromkeys(range(self.policies.world_size), (round_index,)))
                pending |= self.engines.start(EngineVerbs.exchange, dict.fromkeys(self.dedicated, (round_index,)))
                wait_all(pending, deadline_s=self.deadline_s, what="exchange")
            else:
                self.policies.call(PolicyVerbs.exchange, round_index, deadline_s=self.deadline_s)
            copied_bytes += sum(self.engines.call(EngineVerbs.pull, round_index, only=engines).values())
            self.engines.call(EngineVerbs.verify, round_index, only=engines)
        if witness is not None:
            for index, workers in self.engines.call(EngineVerbs.live_digest).items():
                for before, after in zip(witness[index], workers, strict=True):
                    check_unchanged(before, after)
        finished = self.engines.call(EngineVerbs.set_weight_version, self.weight_version, only=engines)
        # The policy makes room before the engines take their KV caches.
        self.policies.call(PolicyVerbs.enter, "generate", deadline_s=self.deadline_s)
        self.engines.call(EngineVerbs.enter, "generate", only=engines)
        reports = [report for workers in finished.values() for report in workers]
        return RefitReport(
            weight_version=self.weight_version,
            seconds=time.monotonic() - start,
            verified_bytes=sum(report.num_bytes for report in reports),
            padding_bytes=sum(report.padding_bytes for report in reports),
            copied_bytes=copied_bytes,
        )

    def _prepare(self) -> None:
        """Makes the exchange group of all participants, and tells every engine where its sources are."""
        num_ranks = len(self.schedule.source_class)
        num_members = sum(len(self.slots[index]) for index in self.dedicated)
        address = None
        if num_ranks + num_members > 1:
            # The store remembers the addresses of an earlier group under its name.
            self.num_groups += 1
            address = GroupAddress(*self.policies.master, name=f"exchange {self.num_groups}", size=num_ranks + num_members)
        parts = dict.fromkeys(range(num_ranks), (self.inputs, address))
        if self.dedicated:
            assert address is not None, "ranks and the workers of dedicated engines exchange"
            member = ExchangeMember(address, self.deadline_s)
            members = {index: ([WorkerRefit(self.inputs, slot, member) for slot in self.slots[index]],) for index in self.dedicated}
            pending: dict[ActorName, ray.ObjectRef] = {**self.policies.start(PolicyVerbs.prepare_refit, parts)}
            pending |= self.engines.start(EngineVerbs.prepare_refit, members)
            answers = wait_all(pending, deadline_s=self.deadline_s, what="prepare_refit")
            self._handles = {name.index: handles for name, handles in answers.items() if handles is not None}
        else:
            self._handles = self.policies.call_each(PolicyVerbs.prepare_refit, parts, deadline_s=self.deadline_s)
        self._point_at_sources([index for index in self.slots if index not in self.dedicated])

    def _point_at_sources(self, engines: Sequence[int]) -> None:
        self.engines.call_each(EngineVerbs.prepare_refit, {index: (self.worker_refits(index),) for index in engines})


def refit_inputs(config: RunConfig, placement: Placement, policies: PolicyGroup, engines: EngineGroup) -> RefitInputs:
    """The inputs of the schedule from all policy ranks to all engine workers. A worker has the number of its slot."""
    start_s = start_deadline(config).seconds
    places = policies.call(PolicyVerbs.layout_arguments, deadline_s=start_s)
    live = engines.call(EngineVerbs.tensor_dtypes, deadline_s=start_s)
    # Equal lists of dtypes become one object: they come from every worker, and go to every participant.
    known: dict[EngineDtypes, EngineDtypes] = {}
    workers = {
        slot: (index, known.setdefault(live[engine.engine_index][index], live[engine.engine_index][index]))
        for engine in placement.engines
        for index, slot in enumerate(engine.slots)
    }
    vllm_cfg = config.policy.generation.vllm_cfg
    return RefitInputs(
        hf_config=json.loads((Path(config.policy.model_name) / "config.json").read_text(encoding="utf-8")),
        ranks=tuple(places.values()),
        parallel=VllmParallel(tp=vllm_cfg.tensor_parallel_size, ep=vllm_cfg.expert_parallel_size),
        precision=vllm_cfg.precision,
        workers=workers,
        gpu_of={slot: slot for slot in workers},
        node_of=placement.node_of,
        buffer_bytes=int(config.policy.refit_buffer_size_gb * 1e9),
    )


def build_schedule(config: RunConfig, inputs: RefitInputs) -> Schedule:
    """The schedule of these inputs. ScheduleError: the layouts do not fit; ValueError: the buffer is too small for a message."""
    try:
        return inputs.schedule()
    except ScheduleError:
        raise
    except ValueError as error:
        raise ValueError(f"policy.refit_buffer_size_gb={config.policy.refit_buffer_size_gb}: {error}") from error
