# SPDX-License-Identifier: Apache-2.0
"""Judges from readings of a run's processes which of them hangs."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from conversion.texts import listed

# A process that uses less of a core, and reads and writes less, waits. Garbage collection, heartbeats and polling stay
# below.
MIN_CORE_SHARE, MIN_IO_BYTES_PER_S = 0.05, 20_000
PATIENCE = 2.0
DRIVER = "driver"
RAY_PROCESSES = ("raylet", "gcs_server")
STOPPED, UNINTERRUPTIBLE, SILENT = "Tt", "D", "?"
COLLECTIVE_TIMEOUT = re.compile(r"timed?[ -]?out|timeout", re.IGNORECASE)


@dataclass(frozen=True)
class ProcessReading:
    """One process as the kernel and its sign of life show it."""

    name: str
    pid: int
    node: str
    state: str
    """One letter; see proc(5)."""
    cpu_s: float
    """CPU time of the process and of its children without signs."""
    io_bytes: int
    num_done: int = 0
    doing: str = ""
    since: float = 0.0
    phase: str = ""

    @property
    def key(self) -> tuple[str, int]:
        """Unique identity of a process on its host."""
        return self.node, self.pid

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid} on {self.node})" if self.pid else self.name


@dataclass
class Wait:
    """A wait of the driver for other processes."""

    what: str
    who: Callable[[], Collection[str]]
    """Names of those that have not answered."""
    since: float
    may_idle: bool = False
    """They wait for each other in ways that no sign shows, as daemons that start: only one that is stuck hangs."""


@dataclass(frozen=True)
class Hang:
    """A process that hangs, or that works for long."""

    suspects: tuple[tuple[ProcessReading, str], ...]
    """Each with the reason; none if nobody does anything, and nobody is known to be waited for."""
    wait: str
    """Description of the driver's wait; "" if it is not known to wait."""
    silent_s: float
    is_hang: bool
    """False: all of them use their processors or the disk, or may idle."""

    @property
    def key(self) -> tuple[bool, frozenset[tuple[str, int]]]:
        """Key that is equal for equal findings."""
        return self.is_hang, frozenset(reading.key for reading, _ in self.suspects)


@dataclass
class _Track:
    """Changes between readings of a process."""

    moved_at: float
    sign: tuple[int, float]
    stuck_at: float | None = None
    """Since when it is in a state in which no process goes on by itself."""
    samples: deque[tuple[float, float, int]] = field(default_factory=deque)


class HangJudge:
    """Says who hangs, reading by reading."""

    def __init__(self, notice_s: float) -> None:
        self._notice_s = notice_s
        self._tracks: dict[tuple[str, int], _Track] = {}
        self._longest: dict[str, float] = {}
        self._waited: dict[int, Wait] = {}
        self._last: list[ProcessReading] = []
        self.moved_at: float | None = None

    def see(self, now: float, readings: Sequence[ProcessReading], waits: Sequence[Wait]) -> Hang | None:
        """Adds readings; returns the process that has hung for `notice_s`, if any."""
        for reading in readings:
            self._note(now, reading)
        self._tracks = {reading.key: self._tracks[reading.key] for reading in readings}
        self._last = list(readings)
        self.moved_at = max(
            [now if self.moved_at is None else self.moved_at, *(track.moved_at for track in self._tracks.values())]
        )
        self._learn(now, waits)
        text = "; ".join(f"{wait.what}, since {now - wait.since:.0f} s, for {listed(wait.who())}" for wait in waits)
        if stuck := tuple((reading, reason) for reading in readings if (reason := self._stuck(now, reading))):
            return Hang(stuck, text, now - self.moved_at, is_hang=True)
        silent = [
            reading
            for wait in waits
            if now - wait.since >= max(self._notice_s, PATIENCE * self._longest.get(wait.what, 0.0))
            for reading in self._silent(now, wait.who())
        ]
        if not waits and now - self.moved_at >= self._notice_s:
            silent = self._silent(now, [DRIVER])
        if not silent:
            return None
        silent_s = min(now - self._tracks[reading.key].moved_at for reading in silent)
        if stuck := tuple(self.blame([reading.name for reading in silent])):
            return Hang(stuck, text, silent_s, is_hang=True)
        idle = [reading for reading in silent if not self._is_busy(reading)]
        is_hang = bool(idle) and not any(wait.may_idle for wait in waits)
        told = tuple((reading, "waits and uses no processor" if idle else "is at work") for reading in idle or silent)
        return Hang(told, text, silent_s, is_hang=is_hang)

    def blame(self, names: Collection[str]) -> list[tuple[ProcessReading, str]]:
        """Processes of `names` and Ray that could not answer at the last reading: stopped, or stuck in the kernel."""
        found = [
            reading for reading in self._last if reading.name in (*names, *RAY_PROCESSES) or reading.state == SILENT
        ]
        return [(reading, reason) for reading in found if (reason := self._stuck(None, reading))]

    def _note(self, now: float, reading: ProcessReading) -> None:
        sign = reading.num_done, reading.since
        track = self._tracks.setdefault(reading.key, _Track(now, sign))
        if sign != track.sign:
            track.sign, track.moved_at = sign, now
        has_run = bool(track.samples) and (reading.cpu_s, reading.io_bytes) != track.samples[-1][1:]
        is_stuck = reading.state in (*STOPPED, SILENT) or (reading.state == UNINTERRUPTIBLE and not has_run)
        track.stuck_at = (track.stuck_at if track.stuck_at is not None else now) if is_stuck else None
        track.samples.append((now, reading.cpu_s, reading.io_bytes))
        while track.samples[0][0] < now - self._notice_s:
            track.samples.popleft()

    def _learn(self, now: float, waits: Sequence[Wait]) -> None:
        current = {id(wait): wait for wait in waits}
        for key, wait in self._waited.items():
            if key not in current:
                self._longest[wait.what] = max(self._longest.get(wait.what, 0.0), now - wait.since)
        self._waited = current

    def _silent(self, now: float, names: Collection[str]) -> list[ProcessReading]:
        asked = set(names)
        found = [reading for reading in self._last if reading.name in asked]
        return [reading for reading in found if now - self._tracks[reading.key].moved_at >= self._notice_s]

    def _stuck(self, now: float | None, reading: ProcessReading) -> str:
        """Reason why a process is stuck; "" if it is not, or for less than `notice_s`, or for one reading only."""
        track = self._tracks[reading.key]
        if track.stuck_at is None or (
            track.samples[-1][0] == track.stuck_at if now is None else now - track.stuck_at < self._notice_s
        ):
            return ""
        if reading.state in STOPPED:
            return f"is stopped (state {reading.state}: SIGSTOP, or a debugger)"
        if reading.state == SILENT:
            return "gives no sign of life (the host or its network is down, or its raylet hangs)"
        return "is stuck in the kernel (state D: a file system or device does not answer)"

    def _is_busy(self, reading: ProcessReading) -> bool:
        (first, cpu_s, io_bytes), (last, last_cpu_s, last_io_bytes) = (
            self._tracks[reading.key].samples[place] for place in (0, -1)
        )
        enough = MIN_CORE_SHARE * (last - first), MIN_IO_BYTES_PER_S * (last - first)
        return reading.state == "R" or last_cpu_s - cpu_s > enough[0] or last_io_bytes - io_bytes > enough[1]


waits: list[Wait] = []
"""The waits under way in this process: those of the driver's main thread, and of another one that it waits for."""
_judge: HangJudge | None = None


@contextmanager
def waiting(what: str, who: Callable[[], Collection[str]], since: float, *, may_idle: bool = False) -> Iterator[None]:
    """Declares a driver's wait in the `with` block; the watchdog's thread calls `who` to name the processes."""
    wait = Wait(what, who, since, may_idle)
    waits.append(wait)
    try:
        yield
    finally:
        waits.remove(wait)


def ask(judge: HangJudge | None) -> None:
    """Registers this judge with `explained`."""
    global _judge
    _judge = judge


def explained(names: Collection[str]) -> str:
    """Names processes of `names` that cannot answer, with reasons, for a message; "" if all can, or nobody watches."""
    return ", ".join(f"{reading} {reason}" for reading, reason in (_judge.blame(names) if _judge is not None else []))


def who_is_to_blame(error: Exception, silent: Collection[str], *, what: str) -> str | None:
    """Replaces `error`, if it only complains of silent processes, by a message that names those."""
    reason = explained(silent)
    if silent and (reason or COLLECTIVE_TIMEOUT.search(str(error))):
        told = f" ({reason})" if reason else ""
        return f"{what}: no answer at all from {listed(silent)}{told}; {error}"
    return None
