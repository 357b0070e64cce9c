# SPDX-License-Identifier: Apache-2.0
"""What each process of a run does when: one file a process, in Chrome's trace event format, which Perfetto opens.

Times are those of the host's clock. Without `record_in`, a process records nothing.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

SUFFIX = ".trace.json"
MAIN = "main"
# Stretches of one name that are closer together than this are one; a longer one is cut, so that a killed process loses little of it.
MAX_GAP_S, MAX_STRETCH_S = 0.05, 10.0
# To ask how much memory is in use takes a tenth of a millisecond on a GPU: shorter spans are not worth it.
MIN_MEASURED_S = 0.002

Fact = str | int | float


@dataclass
class _Stretch:
    name: str
    start: float
    end: float
    facts: dict[str, Fact]


class _Recorder:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()
        # One clock for a span's beginning and end, whatever sets the host's clock in between.
        self._offset_s = time.time() - time.monotonic()
        self._lanes: dict[str, int] = {}
        self._stretches: dict[str, _Stretch] = {}
        if os.fstat(self._file).st_size == 0:
            # A list whose end may be missing: other processes of this name may append to it.
            self._write_bytes(b"[\n")
        self._write({"ph": "M", "name": "process_name", "pid": os.getpid(), "args": {"name": path.name.removesuffix(SUFFIX)}})

    def add(self, name: str, start: float, end: float, lane: str, facts: Mapping[str, Fact]) -> None:
        with self._lock:
            self._end_stretch(lane)
            self._add(name, start, end, lane, facts)

    def stretch(self, name: str, start: float, end: float, lane: str, facts: Mapping[str, Fact]) -> None:
        with self._lock:
            begun = self._stretches.get(lane)
            if begun is not None and (begun.name != name or start - begun.end > MAX_GAP_S):
                self._end_stretch(lane)
            one = self._stretches.setdefault(lane, _Stretch(name, start, end, {}))
            one.end = end
            one.facts.update(facts)
            if end - one.start > MAX_STRETCH_S:
                self._end_stretch(lane)

    def end_stretch(self, lane: str) -> None:
        with self._lock:
            self._end_stretch(lane)

    def close(self) -> None:
        with self._lock:
            for lane in list(self._stretches):
                self._end_stretch(lane)
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _end_stretch(self, lane: str) -> None:
        if (one := self._stretches.pop(lane, None)) is not None:
            self._add(one.name, one.start, one.end, lane, one.facts)

    def _add(self, name: str, start: float, end: float, lane: str, facts: Mapping[str, Fact]) -> None:
        if lane not in self._lanes:
            self._lanes[lane] = len(self._lanes)
            named = {"ph": "M", "name": "thread_name", "pid": os.getpid(), "tid": self._lanes[lane], "args": {"name": lane}}
            self._write(named)
        times = {"ts": round((start + self._offset_s) * 1e6), "dur": round((end - start) * 1e6)}
        self._write(times | {"ph": "X", "name": name, "pid": os.getpid(), "tid": self._lanes[lane], "cat": lane, "args": dict(facts)})

    def _write(self, event: Mapping[str, object]) -> None:
        self._write_bytes(json.dumps(event, separators=(",", ":")).encode("ascii") + b",\n")

    def _write_bytes(self, line: bytes) -> None:
        if self._file is None:
            return
        try:
            os.write(self._file, line)
        except OSError as error:
            logger.warning("%s cannot be written, and this process records no more spans: %s", self._path, error)
            os.close(self._file)
            self._file = None


_recorder: _Recorder | None = None


def record_in(path: Path) -> None:
    """Writes this process's spans to `path` from now on, behind those that are there."""
    global _recorder
    stop()
    _recorder = _Recorder(path)


def stop() -> None:
    """Ends the recording."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.close()


def add(name: str, start: float, lane: str = MAIN, /, **facts: Fact) -> None:
    """Records what began at `start`, a time of `time.monotonic`, and ends now. Spans of one lane lie inside each other or apart."""
    if _recorder is not None:
        _recorder.add(name, start, time.monotonic(), lane, facts)


def stretch(name: str, start: float, lane: str = MAIN, /, **facts: Fact) -> None:
    """As `add`, for work in many short calls: those of a lane that follow closely upon each other are one span, until `end_stretch`."""
    if _recorder is not None:
        _recorder.stretch(name, start, time.monotonic(), lane, facts)


def end_stretch(lane: str = MAIN) -> None:
    """Ends what `stretch` has begun in a lane. Another span of the lane, or a gap, ends it too."""
    if _recorder is not None:
        _recorder.end_stretch(lane)


def memory_facts() -> dict[str, int]:
    """Bytes that this process holds on the host; if it uses a GPU, also its tensors' peak since the last call, and all in use there."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    facts = {"host_bytes": pages * os.sysconf("SC_PAGE_SIZE")}
    # Asking a GPU that this process does not use would cost memory there.
    if "torch" in sys.modules and (cuda := sys.modules["torch"].cuda).is_initialized():
        free, total = cuda.mem_get_info()
        facts |= {"gpu_peak_bytes": cuda.max_memory_allocated(), "gpu_used_bytes": total - free}
        cuda.reset_peak_memory_stats()
    return facts


def name_of(verb: str, *arguments: object) -> str:
    """What a call of an actor's verb is called."""
    return f"enter {arguments[0]}" if verb == "enter" else verb


@contextmanager
def span(name: str, lane: str = MAIN, /, **facts: Fact) -> Iterator[None]:
    """Records the `with` block."""
    start = time.monotonic()
    try:
        yield
    finally:
        add(name, start, lane, **facts)
