# SPDX-License-Identifier: Apache-2.0
"""The one thread that touches an engine: runs its owner's calls, and steps for callers in between. Needs no vLLM."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, TypeVar

from mrl import spans

if TYPE_CHECKING:
    from mrl.rollout.engine import Engine
    from mrl.types import Rollout

logger = logging.getLogger(__name__)
T = TypeVar("T")

LOOK_S = 60.0
"""A call takes as long as it takes: a wait for it begins anew after this long."""


class EngineThread:
    """A thread that lives as long as the process. The engine is built in it, too: a GPU is a thread's choice."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._engine: Engine | None = None
        self.finished: list[Rollout] = []
        """Rollouts that steps for callers have finished; only tasks of `do` may take them."""
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def do(self, function: Callable[[], T]) -> T:
        """Runs `function` in the thread, after earlier calls; returns its result, or raises its error."""
        outcome = Future[T]()

        def task() -> None:
            try:
                outcome.set_result(function())
            except BaseException as error:  # whoever asked raises it
                outcome.set_exception(error)

        self._tasks.put(task)
        while not wait([outcome], timeout=LOOK_S).done:
            pass
        return outcome.result(timeout=0)

    def serve(self, engine: Engine) -> None:
        """Steps this engine from now on, between two tasks, while it has callers and can sample."""
        self._engine = engine

    def wake(self) -> None:
        """Makes the thread look for questions of callers. Any thread may call it."""
        self._tasks.put(lambda: None)

    def _run(self) -> None:
        while True:
            engine = self._engine
            is_asked = engine is not None and engine.can_sample and engine.callers.are_waiting
            try:
                task = self._tasks.get(timeout=0 if is_asked else LOOK_S)
            except queue.Empty:
                if engine is not None and is_asked:
                    self._step(engine)
            else:
                task()

    def _step(self, engine: Engine) -> None:
        start = time.monotonic()
        try:
            self.finished += engine.step()
        except Exception:
            # Nobody waits for this step. The driver starts an engine that is gone again.
            logger.exception("A step for requests over HTTP failed; ending the engine")
            os._exit(1)
        spans.stretch("serve HTTP", start)
        if not engine.callers.are_waiting:
            spans.end_stretch()
