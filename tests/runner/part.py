# SPDX-License-Identifier: Apache-2.0
"""Runs one test part: `python -m tests.runner.part NAME FOLDER COMMAND...` writes output, progress, result to FOLDER.

A part ends when its command ends, or when nothing in it moves any more: no test finishes, and its processes use next to
no processor time. How fast the host is does not matter.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tests.runner.progress import read_progress
from tests.waiting import PATIENCE

STALL_S = 600.0 * PATIENCE
"""Seconds without movement after which a part hangs. Tests wait for less: pytest ends one at 1,200 s of its own."""
STALL_LOAD = 0.05
"""Share of a core below which processes do no work: those of an idle Ray use about half of it."""
SAMPLE_S = 2.0
REAP_S = 0.1
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Result:
    """Result of a part."""

    name: str
    code: int
    seconds: float
    processor_s: float
    asleep_s: float
    """Seconds in which none of its processes could run: they waited for something else than a core."""
    longest_sleep: str
    """The test in which most of them passed, and how many; empty where there was none."""
    stalled_in: str | None
    """Place where nothing moved any more, if the part was ended for that."""


@dataclass
class Movement:
    """Time when a part last moved, judged by what it has done so far."""

    num_done: int = 0
    processor_s: float = 0.0
    since_s: float = 0.0

    def stalled(self, now_s: float, num_done: int, processor_s: float) -> bool:
        """Tells whether nothing moved for STALL_S, given the time, the tests done and the processor seconds used."""
        if num_done != self.num_done or processor_s - self.processor_s > STALL_LOAD * STALL_S:
            self.num_done, self.processor_s, self.since_s = num_done, processor_s, now_s
        return now_s - self.since_s > STALL_S


def run(name: str, folder: Path, command: list[str]) -> Result:
    """Runs a command to its end, or until it stalls; leaves none of its processes behind."""
    # Whatever loses its parent below becomes a child of this process, which counts its processor time and ends it.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    events = folder / f"{name}.events"
    asleep: dict[str, float] = defaultdict(float)
    started, movement, usage, stalled_in, used = time.monotonic(), Movement(), Usage(), None, 0.0
    with (folder / f"{name}.txt").open("wb") as output:
        environment = os.environ | {"MRL_TEST_EVENTS": str(events)}
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
        )
        while stalled_in is None and (code := wait(process.pid, SAMPLE_S)) is None:
            used, before = usage.seconds(), used
            progress = read_progress(events)
            if used - before < STALL_LOAD * SAMPLE_S:
                asleep[progress.current] += SAMPLE_S
            if movement.stalled(time.monotonic() - started, progress.num_done, used):
                stalled_in = progress.current or "its start"
        seconds, used = time.monotonic() - started, usage.seconds()
        process.returncode = -signal.SIGKILL if code is None else code
    test = max(asleep, key=lambda name: asleep[name], default="")
    where = f"{asleep[test]:.0f} s of it in {test.rpartition('::')[2]}" if test else ""
    return Result(name, process.returncode, seconds, used, sum(asleep.values()), where, stalled_in)


def wait(pid: int, seconds: float) -> int | None:
    """Exit code of a child that ends within some seconds, else None. Reaps every other child that ended."""
    end = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == pid:
            return os.waitstatus_to_exitcode(status)
        if not ended:
            if time.monotonic() > end:
                return None
            time.sleep(REAP_S)


class Usage:
    """Processor seconds of this process's children and theirs, since it began."""

    def __init__(self) -> None:
        self._own: dict[tuple[int, float], float] = {}
        """(process id, time of its start) -> what it had used itself when it was last seen."""

    def seconds(self) -> float:
        """Looks at all now. Of those that came and went in between counts what their parents were told of them."""
        times = os.times()
        told = times.children_user + times.children_system
        for child in psutil.Process().children(recursive=True):
            try:
                cpu, key = child.cpu_times(), (child.pid, child.create_time())
            except psutil.Error:
                continue
            self._own[key] = cpu.user + cpu.system
            told += cpu.user + cpu.system + cpu.children_user + cpu.children_system
        # Nobody is told of the children of a process that ignores their end, as Ray's raylet does.
        return max(told, sum(self._own.values()))


def end_children() -> None:
    """Kills all that is left below this process, and takes it off the kernel's list."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            try:
                child.kill()
            except psutil.Error:
                continue
        psutil.wait_procs(children, timeout=5)


if __name__ == "__main__":
    name, folder = sys.argv[1], Path(sys.argv[2])
    # Whoever ends the runner ends the part, too.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        result = run(name, folder, sys.argv[3:])
    finally:
        end_children()
    (folder / f"{name}.result").write_text(json.dumps(asdict(result)), encoding="utf-8")
