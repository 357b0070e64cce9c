"""Refit, driven: settle, exchange, pull, verify, version. The schedule is built once; every step repeats it.

A refit is idempotent until its version is set: if an engine dies in it, the engine is started again and the refit begins anew.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from conversion.boxes import Layout, Slot
from conversion.families.common import VllmParallel
from conversion.families.registry import family
from conversion.reshard import reshard
from conversion.schedule import Schedule
from mrl.cluster.engine_group import EngineGroup, index_of
from mrl.cluster.placement import Placement
from mrl.cluster.policy_group import PolicyGroup
from mrl.cluster.waiting import ActorLost
from mrl.config.schema import RunConfig
from mrl.refit.group import GroupAddress
from mrl.refit.pull import VerifyReport
from mrl.refit.unit import UnitHandles
from mrl.refit.zero import check_unchanged
from mrl.rollout.messages import WorkerRefit

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
        self.weight_version = 0
        self.schedule = build_schedule(config, placement, policies)
        logger.info("Refit schedule: %s", self.schedule.summary)
        self._handles = self._prepare_policies()
        self._prepare_engines(range(engines.num_engines))

    def zero(self) -> RefitReport:
        """The witness: refits weights that have not changed since vLLM's own loader read them, and every byte must stay as it was.

        Otherwise no engine gets a weight version, so none can sample.

        Raises:
            RuntimeError: naming the tensors on which the conversion tables and vLLM's loader disagree.
        """
        before = self._digests()

        def check() -> None:
            for worker_before, worker_after in zip(before, self._digests(), strict=True):
                check_unchanged(worker_before, worker_after)

        self.weight_version += 1
        report = self._refit(range(self.engines.num_engines), check)
        logger.info("Refit zero: %s bytes of the engines stayed as vLLM's own loader wrote them", f"{report.verified_bytes:,}")
        return report

    def run(self) -> RefitReport:
        """One refit of all engines; collective over the policy ranks. The engines sample from the new weights afterwards.

        Raises:
            RuntimeError: naming slot, box and ranks of the first bytes that differ; no engine has sampled from them.
        """
        self.weight_version += 1
        return self._refit(range(self.engines.num_engines))

    def run_engine(self, index: int) -> None:
        """Gives one restarted engine the current weights, under the current version."""
        self._prepare_engines([index])
        self._refit([index])

    def _refit(self, engines: Sequence[int], check: Callable[[], None] | None = None) -> RefitReport:
        while True:
            try:
                return self._attempt(engines, check)
            except ActorLost as lost:
                index = index_of(lost)
                self.engines.restart(index)
                self._prepare_engines([index])

    def _attempt(self, engines: Sequence[int], check: Callable[[], None] | None) -> RefitReport:
        start = time.monotonic()
        copied_bytes = 0
        self.policies.call("enter", "refit", deadline_s=self.deadline_s)
        self.engines.call("enter", "refit", deadline_s=self.deadline_s, only=engines)
        self.policies.call("settle", deadline_s=self.deadline_s)
        for round_index in range(self.schedule.num_rounds):
            self.policies.call("exchange", round_index, deadline_s=self.deadline_s)
            copied = self.engines.call("pull", round_index, deadline_s=self.deadline_s, only=engines)
            self.engines.call("verify", round_index, deadline_s=self.deadline_s, only=engines)
            copied_bytes += sum(cast(dict[int, int], copied).values())
        if check is not None:
            check()
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

    def _digests(self) -> list[dict[Slot, int]]:
        """Checksums of every live tensor of every engine worker, in order."""
        digests = cast(dict[int, list[dict[Slot, int]]], self.engines.call("live_digest", deadline_s=self.deadline_s))
        return [digest for workers in digests.values() for digest in workers]

    def _prepare_policies(self) -> list[UnitHandles]:
        num_ranks = len(self.schedule.source_class)
        address = GroupAddress(*self.policies.master, name="exchange", size=num_ranks) if num_ranks > 1 else None
        parts = [(self.schedule.rank_part(rank), address) for rank in range(num_ranks)]
        return cast(list[UnitHandles], self.policies.call_each("prepare_refit", parts, deadline_s=self.deadline_s))

    def _prepare_engines(self, engines: Sequence[int]) -> None:
        self.engines.call_each("prepare_refit", {i: (self._workers(i),) for i in engines}, deadline_s=self.deadline_s)

    def _workers(self, engine: int) -> list[WorkerRefit]:
        units = self.units[engine].units
        return [WorkerRefit(part=self.schedule.worker_part(target), handles=self._handles[target]) for target in units]


def build_schedule(config: RunConfig, placement: Placement, policies: PolicyGroup) -> Schedule:
    """The schedule from all policy ranks to all engine workers. A worker is named by the unit that it shares with a rank."""
    hf_config = json.loads((Path(config.policy.model_name) / "config.json").read_text(encoding="utf-8"))
    sources = cast(list[Layout], policies.call("layout", deadline_s=config.deadlines.start_s))
    vllm_cfg = config.policy.generation.vllm_cfg
    parallel = VllmParallel(tp=vllm_cfg.tensor_parallel_size, ep=vllm_cfg.expert_parallel_size)
    targets = {
        unit: family(hf_config).vllm_layout(hf_config, parallel, worker, vllm_cfg.precision)
        for engine in placement.engines
        for worker, unit in enumerate(engine.units)
    }
    return reshard(
        dict(enumerate(sources)),
        targets,
        unit_of={unit: unit for unit in targets},
        buffer_bytes=int(config.policy.refit_buffer_size_gb * 1e9),
    )
