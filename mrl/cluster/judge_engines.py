# SPDX-License-Identifier: Apache-2.0
"""Judges as Ray actors: engines that no refit changes. One that dies is started again at once, and asked again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from mrl.cluster import scheduling
from mrl.cluster.book import MAX_FRUITLESS_RESTARTS
from mrl.cluster.calls import Actors, answered
from mrl.cluster.engines import CALLERS, EngineActor, start_engine
from mrl.cluster.errors import ActorLost
from mrl.cluster.event_loop import News, in_loop
from mrl.cluster.runtime import Placement
from mrl.cluster.scheduling import JUDGE
from mrl.cluster.verbs import EngineVerbs
from mrl.config.judge_runs import judge_run
from mrl.config.schema.run import RunConfig
from mrl.plan.deadlines import start_deadline

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks at an engine, whose death nobody else would notice."""
VERSION = 0
"""Weight version of a judge: that of its folder."""


def judge_engine(name: str) -> str:
    """The kind of a judge's engines, for messages: `judge fair engine`."""
    return f"{JUDGE} {name} engine"


class JudgeGroup(Actors[EngineVerbs]):
    """The engines of one judge, which gateways ask."""

    def __init__(self, name: str, config: RunConfig, placement: Placement, *, log_folder: Path, news: News) -> None:
        self.config = judge_run(config, name)
        super().__init__(judge_engine(name), deadline_s=config.deadlines.refit_s)
        self._judge, self._placement, self._log_folder, self._news = name, placement, log_folder, news
        self._num_gateways = scheduling.num_gateways(config)
        self.on_change: Callable[[], None] = lambda: None
        """Called in the event loop when an engine has been started again."""
        self._building = dict[int, ray.ObjectRef[None]]()
        self._watching = dict[int, asyncio.Task[None]]()
        self.handles = [self._start(index) for index in range(len(placement.judges[name]))]

    def wait_until_built(self) -> None:
        """Waits until the engines answer, and looks after them from then on."""
        building = {self.name(index): reference for index, reference in self._building.items()}
        self.wait(building, deadline_s=start_deadline(self.config).seconds, what="start")
        self.call(EngineVerbs.enter, "refit")
        self.call(EngineVerbs.serve, VERSION)
        for index in range(len(self.handles)):
            in_loop(self._watch_soon, index)

    def _watch_soon(self, index: int) -> None:
        self._watching[index] = asyncio.ensure_future(self._watch(index))

    async def _watch(self, index: int) -> None:
        """Starts an engine again whenever it dies. Ends the run if it dies too often without an answer."""
        num_answers, num_fruitless, is_up = 0, 0, True
        try:
            while True:
                try:
                    if not is_up:
                        await self._restart(index)
                        is_up = True
                    num_answers = await self._look(index)
                except ActorLost as lost:
                    num_fruitless = 0 if num_answers else num_fruitless + 1
                    num_answers, is_up = 0, False
                    if num_fruitless > MAX_FRUITLESS_RESTARTS:
                        raise
                    logger.warning("%s; it is started again", lost)
        except Exception as error:  # whoever waits raises it
            self._news.fail(error)

    async def _look(self, index: int) -> int:
        """Number of an engine's answers since it started, when the next look is due."""
        asked = self.handles[index].num_answered.options(concurrency_group=CALLERS).remote()
        num_answers = await answered(asked, actor=self.name(index), what="sign of life")
        await asyncio.sleep(LOOK_S)
        return num_answers

    async def _restart(self, index: int) -> None:
        name = self.name(index)
        ray.kill(self.handles[index])
        self.handles[index] = handle = self._start(index)
        await answered(self._building[index], actor=name, what="start")
        await answered(handle.call.remote("enter", "refit"), actor=name, what="enter")
        await answered(handle.call.remote("serve", VERSION), actor=name, what="serve")
        self.on_change()

    def _start(self, index: int) -> ActorHandle[EngineActor]:
        log_file = self._log_folder / f"{JUDGE}-{self._judge}-{index}.log"
        slots = self._placement.judges[self._judge][index]
        handle, self._building[index] = start_engine(
            self.config, self._placement, slots, log_file, num_gateways=self._num_gateways
        )
        return handle


def start_judges(config: RunConfig, placement: Placement, *, log_folder: Path, news: News) -> Mapping[str, JudgeGroup]:
    """Starts the engines of all judges; does not wait for them."""
    return {name: JudgeGroup(name, config, placement, log_folder=log_folder, news=news) for name in config.judges}
