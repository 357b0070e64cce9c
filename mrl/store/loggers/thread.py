# SPDX-License-Identifier: Apache-2.0
"""Feeds one logger from a bounded queue, in a thread of its own, so that no service can hold up or end the run."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NoReturn, cast

from conversion.files.limits import is_waiting, settle_console
from mrl.config.own import find
from mrl.config.schema.logger import LoggerConfig
from mrl.config.secrets import redact_text, run_entry
from mrl.store.loggers.sink import SINKS, LoggedRun, Sink

logger = logging.getLogger(__name__)

MAX_RECORDS = 500
REOPEN_INTERVAL_S = 60.0
MAX_ERROR_LENGTH = 500
THREAD_PREFIX = "logger "

Record = Callable[[Sink], object]
"""Hands one record to a sink."""


class SinkThread:
    """One logger. A failure of its library costs records, which `num_lost` counts, and one warning."""

    def __init__(self, name: str, config: LoggerConfig, run: LoggedRun, *, on_open: Callable[[str], None]) -> None:
        """Starts the thread and returns at once. `on_open(run_id)` is called there when the service took the run."""
        self.name, self.num_lost = name, 0
        self._title, self._class = SINKS.get(name, (name, name))
        self._config, self._run, self._on_open = config, run, on_open
        self._sink: Sink | None = None
        self._next_try = 0.0
        self._records: deque[Record] = deque()
        self._is_closing = self._has_warned = False
        self._changed = threading.Condition()
        # W&B and SwanLab put their own hooks here, which print and upload tracebacks with their secrets.
        self._hooks = sys.excepthook, sys.exit
        self._thread = threading.Thread(target=self._work, name=THREAD_PREFIX + name, daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Queues one record, or counts it as lost if the queue is full. Never waits; any thread may call it."""
        with self._changed:
            if len(self._records) < MAX_RECORDS:
                self._records.append(record)
                self._changed.notify()
                return
            self.num_lost += 1
        self._warn("it does not keep up")

    def hang_up(self) -> None:
        """Announces the end: the thread sends queued records, closes the sink and ends."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    def wait(self, deadline: float) -> None:
        """Waits for the thread until `deadline` (monotonic). Logs how many records were lost."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            with self._changed:
                self.num_lost += len(self._records)
            self._warn("a call of its library takes too long")
        if self.num_lost:
            logger.warning("Records lost by %s, which metrics.jsonl is apart from: %d", self._title, self.num_lost)

    def _work(self) -> None:
        self._open()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._records or self._is_closing)
                if not self._records:
                    break
                record = self._records[0]
            if self._sink is None and time.monotonic() >= self._next_try:
                self._open()
            is_taken = self._sink is not None and self._attempt(record, self._sink)
            with self._changed:
                self.num_lost += not is_taken
                self._records.popleft()
        if self._sink is not None:
            self._attempt(self._sink.close)

    def _open(self) -> None:
        def make_sink() -> None:
            self._sink = cast(Sink, find(self._class)(config=self._config, run=self._run))

        self._next_try = time.monotonic() + REOPEN_INTERVAL_S
        if self._attempt(make_sink) and self._sink is not None:
            logger.info("%s: %s", self._title, redact_text(self._sink.place, self._run.secrets))
            self._on_open(self._sink.run_id)

    def _attempt(self, call: Callable[..., object], *arguments: Sink) -> bool:
        """True if `call` succeeds. Catches everything: libraries raise anything, and no logger may end the run."""
        try:
            call(*arguments)
        except (Exception, SystemExit) as error:
            self._warn(f"{type(error).__name__}: {error}"[:MAX_ERROR_LENGTH])
            return False
        finally:
            sys.excepthook, sys.exit = self._hooks
        return True

    def _warn(self, reason: str) -> None:
        with self._changed:
            has_warned, self._has_warned = self._has_warned, True
        if not has_warned:
            logger.warning(
                "%s fails, and the run goes on without it: %s. logger/lost counts losses",
                self._title,
                redact_text(reason, self._run.secrets),
            )


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Ends this process with `main`'s exit code, even while a logger, disk or console hangs: Python would wait."""
    code = run_entry(main)
    logging.shutdown()
    if (
        not settle_console()
        or is_waiting()
        or any(thread.name.startswith(THREAD_PREFIX) for thread in threading.enumerate())
    ):
        os._exit(code)
    sys.exit(code)
