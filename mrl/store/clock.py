"""Wall time by phase of a step, and when a run has to end before its last step."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
"""What schedulers send before a time limit or a preemption."""


class Clock:
    """Adds up seconds by phase; `metrics()` gives `time/<phase>` and `time/total` since the clock was made.

    A phase whose work has begun beside earlier ones shows what was left of it; `time/<phase>_hidden` is the rest.
    """

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._work: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time inside the `with` block towards `name`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    def overlap(self, name: str, work_s: float) -> None:
        """Says that the work of phase `name` took `work_s` in all, some of it during other phases."""
        self._work[name] = self._work.get(name, 0.0) + work_s

    def seconds(self, name: str) -> float:
        """Seconds counted towards `name` so far."""
        return self._seconds[name]

    def metrics(self) -> dict[str, float]:
        """Seconds by phase, hidden and in all."""
        hidden = {f"time/{name}_hidden": max(0.0, work_s - self._seconds[name]) for name, work_s in self._work.items()}
        exposed = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        return exposed | hidden | {"time/total": time.monotonic() - self._start}


class Stopped(Exception):
    """A signal asked the run to end while nothing was being trained."""


class Budget:
    """Whether a run may make another step: until its time is over or a signal asks it to save a checkpoint and end."""

    def __init__(self, limit_s: float | None, *, started: float) -> None:
        """`limit_s` counts from `started`, a time of `time.monotonic`; None: there is no limit."""
        self._limit_s = limit_s
        self._started = started
        self._first_step_began = time.monotonic()
        self._num_steps = 0
        self._signal: signal.Signals | None = None
        self._listens = False

    def begin(self) -> None:
        """Says that everything is up and the first step begins."""
        self._first_step_began = time.monotonic()
        if self._listens:
            # Ray takes SIGTERM for itself when it starts.
            self.listen()

    def count_step(self) -> None:
        """Says that one more step, its validation included, is done."""
        self._num_steps += 1

    def check(self) -> None:
        """To be called where a run may be left at once, its weights being those of its last step.

        Raises:
            Stopped: a signal has come.
        """
        if self._signal is not None:
            raise Stopped

    @property
    def is_over(self) -> bool:
        """Whether a signal has come, or the next step, if it took as long as the mean of those counted, would end after the limit."""
        if self._signal is not None:
            return True
        if self._limit_s is None:
            return False
        now = time.monotonic()
        mean_step_s = (now - self._first_step_began) / self._num_steps if self._num_steps else 0.0
        return now - self._started + mean_step_s >= self._limit_s

    def listen(self) -> None:
        """Takes signals from now on; only a process's main thread can."""
        self._listens = True
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._signal = signal.Signals(number)
        logger.info("%s: the run saves a checkpoint and ends", self._signal.name)
