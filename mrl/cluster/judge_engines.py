# SPDX-License-Identifier: Apache-2.0
"""The driver's handles on the engines of judges, which gateways ask. One that dies, which no refit changes, is started
again at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Never

import ray

from mrl.cluster import scheduling
from mrl.cluster.engines import EngineActor, start_engine
from mrl.cluster.runtime import Placement
from mrl.cluster.service import LOOK_S, Service, judges_kind
from mrl.cluster.tasks import BackgroundTasks
from mrl.cluster.verbs import EngineVerbs
from mrl.config.judge_runs import judge_run
from mrl.config.schema.run import RunConfig
from mrl.plan.deadlines import start_deadline

if TYPE_CHECKING:
    from ray.actor import ActorHandle

JUDGE_VERSION = 0
"""Weight version of a judge: that of its folder."""


class JudgeGroup(Service[EngineVerbs, Never, Never, None]):
    """The engines of one judge, which gateways ask."""

    def __init__(
        self, name: str, config: RunConfig, placement: Placement, *, log_folder: Path, tasks: BackgroundTasks
    ) -> None:
        self.config, self._placement, self._slots = judge_run(config, name), placement, placement.judges[name]
        self._num_gateways = scheduling.num_gateways(config)
        super().__init__(
            judges_kind(name),
            len(self._slots),
            tasks=tasks,
            log_folder=log_folder,
            deadline_s=config.deadlines.refit_s,
            start_s=start_deadline(self.config).seconds,
            # An engine answers a look after `LOOK_S`.
            look_s=LOOK_S + config.deadlines.generate_s,
        )

    async def _carry(self, index: int, requests: list[Never]) -> Mapping[str, Never]:
        raise AssertionError("gateways ask judges")

    def _launch(self, index: int) -> tuple[ActorHandle[EngineActor], ray.ObjectRef[None]]:
        place = self._placement, self._slots[index], self.log_file(index)
        return start_engine(self.config, *place, num_gateways=self._num_gateways, version=JUDGE_VERSION)


def start_judges(
    config: RunConfig, placement: Placement, *, log_folder: Path, tasks: BackgroundTasks
) -> Mapping[str, JudgeGroup]:
    """Starts the engines of all judges; does not wait for them."""
    return {name: JudgeGroup(name, config, placement, log_folder=log_folder, tasks=tasks) for name in config.judges}
