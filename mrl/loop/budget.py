"""When a run has to end before its last step: a time limit, or a signal."""

from __future__ import annotations

import logging
import signal
import time
from types import FrameType

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
"""What schedulers send before a time limit or a preemption."""


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
