"""Refit, driven: settle, exchange, pull, verify, version. The schedule is built once; every step repeats it.

A refit is idempotent until its version is set: if an engine dies in it, the engine is started again and the refit begins anew. One that
dies while it starts is one more such death; `EngineGroup.restart` counts them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from conversion.boxes import Slot
from conversion.families.common import EngineDtypes, VllmParallel
from conversion.reshard import ScheduleError
from conversion.schedule import Schedule
from mrl.capacity.start_deadline import start_deadline
from mrl.cluster.engine_group import EngineGroup, index_of
from mrl.cluster.placement import Placement
from mrl.cluster.policy_group import PolicyGroup
from mrl.cluster.probe import live_digests
from mrl.cluster.waiting import ActorLost, wait_all
from mrl.config.schema.run import RunConfig
from mrl.refit.checksum import check_unchanged
from mrl.refit.exchange import GpuHandles, handles_for
from mrl.refit.group import GroupAddress
from mrl.refit.inputs import ExchangeMember, RankPlace, RefitInputs, WorkerRefit
from mrl.refit.pull import VerifyReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RefitReport:
    """One refit, summed over the engines that took part."""

    weight_version: int
    seconds: float
    verified_bytes: int
    padding_bytes: int
    copied_bytes: int

    def metrics(self) -> dict[str, float]:
        """As `refit/*`."""
        return {
            "refit/seconds": self.seconds,
            "refit/verified_bytes": float(self.verified_bytes),
            "refit/padding_bytes": float(self.padding_bytes),
            "refit/copied_bytes": float(self.copied_bytes),
            "refit/weight_version": float(self.weight_version),
        }


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
        self.units = placement.engines
        self.num_exchanges = 0
        self.weight_version = 0
        inputs = refit_inputs(config, placement, policies, engines)
        self.schedule = build_schedule(config, inputs)
        self.inputs = inputs.signed(self.schedule)
        logger.info("Refit schedule: %s", self.schedule.summary)
        for line in self.schedule.casts():
            logger.info("%s", line)
        num_ranks = len(self.schedule.source_class)
        self.dedicated = [engine.engine_index for engine in self.units if engine.units[0] >= num_ranks]
        self._handles: dict[int, GpuHandles] = {}
        self._prepare()

    def zero(self) -> RefitReport:
        """The witness: refits weights that have not changed since vLLM's own loader read them, and every byte must stay as it was.

        Otherwise no engine gets a weight version, so none can sample.

        Raises:
            RuntimeError: naming the tensors on which the conversion tables and vLLM's loader disagree.
        """
        self.weight_version += 1
        report = self._refit(range(self.engines.num_engines), _Witness(self.engines, deadline_s=self.deadline_s))
        logger.info("Refit zero: %s bytes of the engines stayed as vLLM's own loader wrote them", f"{report.verified_bytes:,}")
        return report

    def run(self) -> RefitReport:
        """One refit of all engines; collective over the policy ranks. The engines sample from the new weights afterwards.

        Raises:
            RuntimeError: naming slot, box and ranks of the first bytes that differ; no engine has sampled from them.
        """
        self.weight_version += 1
        return self._refit(range(self.engines.num_engines))

    def restart_engine(self, index: int) -> None:
        """Starts a dead engine again, gives it the current weights under the current version, and asks its unfinished requests again.

        Raises:
            RuntimeError: it keeps dying.
        """
        self._refit([], died=index)

    def _refit(self, engines: Sequence[int], witness: _Witness | None = None, died: int | None = None) -> RefitReport:
        # All that are started again: dedicated engines take part in the exchange of a refit that is not theirs, and may die in it.
        restarted: set[int] = set()
        while True:
            try:
                if died is not None:
                    # vLLM starts only where gpu_memory_utilization of a GPU is free. The policy holds weights alone there by now: an engine
                    # is missed while rollouts are collected, or below, behind the policy's entry into the refit.
                    restarted.add(died)
                    self.engines.restart(died)
                    self._prepare_again(died)
                    died = None
                with self.engines.held():
                    report = self._attempt(sorted({*engines, *restarted}), witness)
            except ActorLost as lost:
                died = index_of(lost)
                if witness is not None:
                    witness.forget(died)
            else:
                for index in restarted:
                    self.engines.resubmit(index)
                return report

    def _attempt(self, engines: Sequence[int], witness: _Witness | None) -> RefitReport:
        start = time.monotonic()
        copied_bytes = 0
        if witness is not None:
            witness.look()
        self.policies.call("enter", "refit", deadline_s=self.deadline_s)
        self.engines.call("enter", "refit", deadline_s=self.deadline_s, only=engines)
        self.policies.call("settle", deadline_s=self.deadline_s)
        for round_index in range(self.schedule.num_rounds):
            self._exchange(round_index)
            copied = self.engines.call("pull", round_index, deadline_s=self.deadline_s, only=engines)
            self.engines.call("verify", round_index, deadline_s=self.deadline_s, only=engines)
            copied_bytes += sum(cast(dict[int, int], copied).values())
        if witness is not None:
            witness.check_unchanged()
        finished = self.engines.call("set_weight_version", self.weight_version, deadline_s=self.deadline_s, only=engines)
        # The policy makes room before the engines take their KV caches.
        self.policies.call("enter", "generate", deadline_s=self.deadline_s)
        self.engines.call("enter", "generate", deadline_s=self.deadline_s, only=engines)
        reports = [report for workers in cast(dict[int, list[VerifyReport]], finished).values() for report in workers]
        return RefitReport(
            weight_version=self.weight_version,
            seconds=time.monotonic() - start,
            verified_bytes=sum(report.num_bytes for report in reports),
            padding_bytes=sum(report.padding_bytes for report in reports),
            copied_bytes=copied_bytes,
        )

    def _exchange(self, round_index: int) -> None:
        """One round, by all participants at once: trainer ranks, and the workers of dedicated engines, whether they are refitted or not."""
        if not self.dedicated:
            self.policies.call("exchange", round_index, deadline_s=self.deadline_s)
            return
        pending = self.policies.start_each("exchange", [(round_index,)] * self.policies.world_size)
        pending |= self.engines.start_each("exchange", {index: (round_index,) for index in self.dedicated})
        wait_all(pending, deadline_s=self.deadline_s, what="exchange")

    def _prepare(self) -> None:
        """Makes the exchange group of all participants, and tells every engine where its sources are."""
        num_ranks = len(self.schedule.source_class)
        num_seats = sum(len(self.units[index].units) for index in self.dedicated)
        address = None
        if num_ranks + num_seats > 1:
            # The store remembers the addresses of an earlier group under its name.
            self.num_exchanges += 1
            address = GroupAddress(*self.policies.master, name=f"exchange {self.num_exchanges}", size=num_ranks + num_seats)
        parts = [(self.inputs, address)] * num_ranks
        if self.dedicated:
            assert address is not None
            pending = self.policies.start_each("prepare_refit", parts)
            pending |= self.engines.start_each("prepare_refit", {index: (self._members(index, address),) for index in self.dedicated})
            results = wait_all(pending, deadline_s=self.deadline_s, what="prepare_refit")
            self._handles = {rank: cast(GpuHandles, results[f"policy rank {rank}"]) for rank in range(num_ranks)}
        else:
            handles = self.policies.call_each("prepare_refit", parts, deadline_s=self.deadline_s)
            self._handles = dict(enumerate(cast(list[GpuHandles], handles)))
        self._prepare_colocated([index for index in range(self.engines.num_engines) if index not in self.dedicated])

    def _prepare_again(self, index: int) -> None:
        """After the restart of an engine. A dedicated one was part of the exchange group, which no longer works without it."""
        if index in self.dedicated:
            self._prepare()
        else:
            self._prepare_colocated([index])

    def _prepare_colocated(self, engines: Sequence[int]) -> None:
        self.engines.call_each("prepare_refit", {i: (self._workers(i),) for i in engines}, deadline_s=self.deadline_s)

    def _workers(self, engine: int) -> list[WorkerRefit]:
        workers = self.units[engine].units
        return [WorkerRefit(self.inputs, worker, handles_for(self.schedule, worker, self._handles)) for worker in workers]

    def _members(self, engine: int, address: GroupAddress) -> list[WorkerRefit]:
        return [WorkerRefit(self.inputs, worker, ExchangeMember(address, self.deadline_s)) for worker in self.units[engine].units]


class _Witness:
    """Knows what vLLM's own loader wrote into each engine."""

    def __init__(self, engines: EngineGroup, *, deadline_s: float) -> None:
        self._engines = engines
        self._deadline_s = deadline_s
        self._before: dict[int, list[dict[Slot, int]]] = {}

    def look(self) -> None:
        """Takes the digests of the engines that it does not know: none of them has been refitted since it was started."""
        unknown = [index for index in range(self._engines.num_engines) if index not in self._before]
        self._before |= live_digests(self._engines, deadline_s=self._deadline_s, only=unknown)

    def forget(self, index: int) -> None:
        """The engine died; the one that takes its place is looked at anew."""
        self._before.pop(index, None)

    def check_unchanged(self) -> None:
        """Returns if all engines hold what they held when they were looked at; see `mrl.refit.checksum.check_unchanged`."""
        for index, after in live_digests(self._engines, deadline_s=self._deadline_s).items():
            for worker_before, worker_after in zip(self._before[index], after, strict=True):
                check_unchanged(worker_before, worker_after)


def refit_inputs(config: RunConfig, placement: Placement, policies: PolicyGroup, engines: EngineGroup) -> RefitInputs:
    """What the schedule from all policy ranks to all engine workers follows from. A worker has the number of its GPU."""
    start_s = start_deadline(config).seconds
    places = cast(list[RankPlace], policies.call("layout_arguments", deadline_s=start_s))
    live = cast(dict[int, list[EngineDtypes]], engines.call("tensor_dtypes", deadline_s=start_s))
    # Equal lists of dtypes become one object: they come from every worker, and go to every participant.
    known: dict[EngineDtypes, EngineDtypes] = {}
    workers = {
        gpu: (index, known.setdefault(live[engine.engine_index][index], live[engine.engine_index][index]))
        for engine in placement.engines
        for index, gpu in enumerate(engine.units)
    }
    vllm_cfg = config.policy.generation.vllm_cfg
    return RefitInputs(
        hf_config=json.loads((Path(config.policy.model_name) / "config.json").read_text(encoding="utf-8")),
        ranks=tuple(places),
        parallel=VllmParallel(tp=vllm_cfg.tensor_parallel_size, ep=vllm_cfg.expert_parallel_size),
        precision=vllm_cfg.precision,
        workers=workers,
        gpu_of={gpu: gpu for gpu in workers},
        node_of=placement.node_of,
        buffer_bytes=int(config.policy.refit_buffer_size_gb * 1e9),
    )


def build_schedule(config: RunConfig, inputs: RefitInputs) -> Schedule:
    """The schedule of these inputs.

    Raises:
        ScheduleError: the layouts do not fit together.
        ValueError: the buffer is too small for a single message.
    """
    try:
        return inputs.schedule()
    except ScheduleError:
        raise
    except ValueError as error:
        raise ValueError(f"policy.refit_buffer_size_gb={config.policy.refit_buffer_size_gb}: {error}") from error
