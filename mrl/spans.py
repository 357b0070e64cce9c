# SPDX-License-Identifier: Apache-2.0
"""Timeline of each process of a run: one file per process, in Chrome's trace event format, which Perfetto opens.

Times are those of the host's clock. Without `record_in`, a process records nothing. `show_in` keeps the last span
beside that in a small file in memory, a sign of life that other processes of the host read even while this one hangs.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import mmap
import os
import platform
import signal
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

SUFFIX = ".trace.json"
MAIN = "main"
# Stretches of one name that are closer together than this are one; a longer one is cut, so that a killed process loses
# little of it.
MAX_GAP_S, MAX_STRETCH_S = 0.05, 10.0
# To ask how much memory is in use takes a tenth of a millisecond on a GPU: shorter spans are not worth it.
MIN_MEASURED_S = 0.002
# A thread that writes wakes up this often; hours of spans wait in memory while a file system does not answer.
WRITE_INTERVAL_S, MAX_WAITING = 0.2, 50_000
CLOSE_TIMEOUT_S = 10.0
SIGNS, ASKS, STACKS = "signs", "asks", "stacks"
"""Folders of a run's private folder: for each process its sign of life, a pipe to ask it for its stacks, the stacks."""
STACK_SIGNAL = signal.SIGRTMIN + 5
"""A real-time signal that no library of the run uses; see `show_in`."""
SIGN = struct.Struct("<QQd?16s160s")

Fact = str | int | float


@dataclass
class _Stretch:
    name: str
    start: float
    end: float
    facts: dict[str, Fact]


@dataclass(frozen=True)
class Sign:
    """A process's sign of life."""

    name: str
    pid: int
    num_done: int
    since: float
    is_open: bool
    phase: str
    doing: str


class _Sign:
    def __init__(self, folder: Path, name: str) -> None:
        for kind in (SIGNS, ASKS, STACKS):
            (folder / kind).mkdir(mode=0o700, exist_ok=True)
        with (folder / SIGNS / name).open("w+b") as file:
            # Room now: a page that finds none later ends the process.
            os.posix_fallocate(file.fileno(), 0, SIGN.size)
            self._memory = mmap.mmap(file.fileno(), SIGN.size)
        # Kept open: the handler writes to its descriptor, whatever Python is doing.
        self._stacks = (folder / STACKS / name).open("ab")
        faulthandler.register(STACK_SIGNAL, file=self._stacks)
        # A pipe of this process alone: an earlier one of the name may not have ended yet.
        (folder / ASKS / name).unlink(missing_ok=True)
        os.mkfifo(folder / ASKS / name, 0o600)
        # Open for writing too: no reader of a pipe without writers waits.
        self._asks = os.open(folder / ASKS / name, os.O_RDWR)
        threading.Thread(target=self._answer, name="stacks", daemon=True).start()
        self._num_done, self._phase = 0, ""
        self.show("start", is_open=True)

    def _answer(self) -> None:
        # No deadline: an idle daemon thread.
        while os.read(self._asks, 1):
            faulthandler.dump_traceback(self._stacks)

    def show(self, doing: str, *, is_open: bool, num_done: int = 0, phase: str = "") -> None:
        self._num_done += num_done
        self._phase = phase or self._phase
        texts = self._phase.encode()[:16], doing.encode()[:160]
        SIGN.pack_into(self._memory, 0, os.getpid(), self._num_done, time.monotonic(), is_open, *texts)

    def count(self) -> None:
        self._num_done += 1
        struct.pack_into("<Q", self._memory, 8, self._num_done)


class _Recorder:
    def __init__(self, path: Path, *, by_thread: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()
        self._offset_s = time.time() - time.monotonic()
        self._lanes: dict[str, int] = {}
        self._stretches: dict[str, _Stretch] = {}
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_waiting, name="spans", daemon=True) if by_thread else None
        if os.fstat(self._file).st_size == 0:
            # A list whose end may be missing: other processes of this name may append to it.
            self._write_bytes(b"[\n")
        self._write(
            {"ph": "M", "name": "process_name", "pid": os.getpid(), "args": {"name": path.name.removesuffix(SUFFIX)}}
        )
        if self._thread is not None:
            self._thread.start()

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
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        if self._file is not None and (self._thread is None or not self._thread.is_alive()):
            os.close(self._file)
            self._file = None

    def _end_stretch(self, lane: str) -> None:
        if (one := self._stretches.pop(lane, None)) is not None:
            self._add(one.name, one.start, one.end, lane, one.facts)

    def _add(self, name: str, start: float, end: float, lane: str, facts: Mapping[str, Fact]) -> None:
        if lane not in self._lanes:
            self._lanes[lane] = len(self._lanes)
            named = {
                "ph": "M",
                "name": "thread_name",
                "pid": os.getpid(),
                "tid": self._lanes[lane],
                "args": {"name": lane},
            }
            self._write(named)
        times = {"ts": round((start + self._offset_s) * 1e6), "dur": round((end - start) * 1e6)}
        self._write(
            times
            | {"ph": "X", "name": name, "pid": os.getpid(), "tid": self._lanes[lane], "cat": lane, "args": dict(facts)}
        )

    def _write(self, event: Mapping[str, object]) -> None:
        self._write_bytes(json.dumps(event, separators=(",", ":")).encode("ascii") + b",\n")

    def _write_bytes(self, line: bytes) -> None:
        if self._thread is None:
            self._put(line)
        else:
            self._waiting.append(line)

    def _write_waiting(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(WRITE_INTERVAL_S)
            if lines := [self._waiting.popleft() for _ in range(len(self._waiting))]:
                self._put(b"".join(lines))

    def _put(self, lines: bytes) -> None:
        if self._file is None:
            return
        try:
            os.write(self._file, lines)
        except OSError as error:
            logger.warning("%s cannot be written, and this process records no more spans: %s", self._path, error)
            os.close(self._file)
            self._file = None


_recorder: _Recorder | None = None
_sign: _Sign | None = None


def record_in(path: Path, *, by_thread: bool = True) -> None:
    """Writes this process's spans to `path` from now on, behind those that are there.

    `by_thread`: no caller waits for the file system. Without it, a process that is killed loses nothing: for a local
    disk.
    """
    global _recorder
    stop()
    _recorder = _Recorder(path, by_thread=by_thread)


def show_in(folder: Path, name: str) -> None:
    """Keeps this process's sign of life in `folder` from now on, and writes its threads' stacks there when asked.

    A byte in its pipe asks a thread, which answers while it holds the interpreter's lock. `STACK_SIGNAL` asks without
    the lock: only a process whose threads all sleep surely survives that.
    """
    global _sign
    _sign = _Sign(folder, name)


def ask_for_stacks(folder: Path, name: str) -> None:
    """Asks the process that is shown in `folder` as `name`, if any, and waits for nothing."""
    # OSError: it has ended, or its pipe is full of questions.
    with suppress(OSError):
        pipe = os.open(folder / ASKS / name, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, b"?")
        finally:
            os.close(pipe)


def stop() -> None:
    """Ends the recording."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.close()


def begin(name: str, phase: str = "") -> None:
    """Notes in the sign of life what this process does, until `add` or `stretch` ends it."""
    if _sign is not None:
        _sign.show(name, is_open=True, phase=phase)


def add(name: str, start: float, lane: str = MAIN, /, **facts: Fact) -> None:
    """Records what began at `start`, a time of `time.monotonic`, and ends now. Spans of one lane nest or lie apart."""
    _show_end(name, lane, facts)
    if _recorder is not None:
        _recorder.add(name, start, time.monotonic(), lane, facts)


def stretch(name: str, start: float, lane: str = MAIN, /, **facts: Fact) -> None:
    """Adds work in many short calls: calls of a lane that follow closely are one span, until `end_stretch`."""
    _show_end(name, lane, facts)
    if _recorder is not None:
        _recorder.stretch(name, start, time.monotonic(), lane, facts)


def _show_end(name: str, lane: str, facts: Mapping[str, Fact]) -> None:
    if _sign is None:
        return
    if lane == MAIN:
        _sign.show(name, is_open=False, num_done=1, phase=str(facts.get("phase", "")))
    else:
        _sign.count()


def end(name: str) -> None:
    """Notes in the sign of life that the work noted by `begin` is done, where no span is recorded."""
    _show_end(name, MAIN, {})


def end_stretch(lane: str = MAIN) -> None:
    """Ends what `stretch` has begun in a lane. Another span of the lane, or a gap, ends it too."""
    if _recorder is not None:
        _recorder.end_stretch(lane)


def read_sign(path: Path) -> Sign:
    """The sign of life in a file of `SIGNS`. OSError, struct.error: there is none yet."""
    pid, num_done, since, is_open, phase, doing = SIGN.unpack(path.read_bytes())
    texts = [text.rstrip(b"\0").decode(errors="replace") for text in (phase, doing)]
    return Sign(path.name.replace("-", " "), pid, num_done, since, is_open, *texts)


def process_key() -> str:
    """A name of this process among those of all nodes."""
    return f"{platform.node()} {os.getpid()}"


def memory_facts() -> dict[str, int]:
    """Host bytes of this process and, on a GPU, its tensors' peak since the last call and all memory in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    facts = {"host_bytes": pages * os.sysconf("SC_PAGE_SIZE")}
    # Asking a GPU that this process does not use would cost memory there.
    if "torch" in sys.modules and (cuda := sys.modules["torch"].cuda).is_initialized():
        free, total = cuda.mem_get_info()
        facts |= {"gpu_peak_bytes": cuda.max_memory_allocated(), "gpu_used_bytes": total - free}
        cuda.reset_peak_memory_stats()
    return facts


def name_of(verb: str, *arguments: object) -> str:
    """Name of a call of an actor's verb."""
    return f"enter {arguments[0]}" if verb == "enter" else verb


@contextmanager
def span(name: str, lane: str = MAIN, /, **facts: Fact) -> Iterator[None]:
    """Records the `with` block."""
    start = time.monotonic()
    if lane == MAIN:
        begin(name)
    try:
        yield
    finally:
        add(name, start, lane, **facts)
