# SPDX-License-Identifier: Apache-2.0
"""The driver's watchdog: a thread that names who hangs, keeps all Python stacks, and ends a run that cannot end itself.

It reads what the kernel says of the processes of the driver's node, and their signs of life (`mrl.spans`); it waits for
no process, for no call of Ray's, and for no file system but the local one.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from conversion.files.limits import flush_console, within
from mrl import spans
from mrl.cluster import hangs
from mrl.cluster.hangs import DRIVER, RAY_PROCESSES, STOPPED, UNINTERRUPTIBLE, Hang, HangJudge, ProcessReading
from mrl.cluster.lifetime import kill_processes, local_file
from mrl.cluster.tasks import AT_WORK
from mrl.config.schema.run import RunConfig
from mrl.plan.deadlines import all_deadlines
from mrl.shortage import end_on_shortage
from mrl.signals import LISTENER

logger = logging.getLogger(__name__)

LOG = "watchdog.log"
INTERVAL_S, LOOKS_A_NOTICE = 5.0, 10
STACKS_S, PY_SPY_TIMEOUT_S, STACKS_TIMEOUT_S = 1.0, 10.0, 15.0
CONSOLE_TIMEOUT_S = 5.0
MAX_NAMED = 4
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
Stacks = list[tuple[ProcessReading, str]]
FRAME = re.compile(r'File "(?:.*/)?([^"/]+)", line (\d+) in (\S+)')


@dataclass(frozen=True)
class Process:
    """A line of the kernel's table."""

    pid: int
    parent: int
    command: str
    state: str
    cpu_s: float
    fault_bytes: int
    """Read from files that are mapped into memory."""


def read_process(pid: int, task: str = "") -> Process | None:
    """Reads /proc/PID/stat, or that of a task of the process, see proc(5); None if it has ended."""
    try:
        head, _, rest = Path(f"/proc/{pid}/{task}stat").read_text(errors="replace").rpartition(")")
    except OSError:
        return None
    fields = rest.split()
    cpu_s, fault_bytes = (int(fields[11]) + int(fields[12])) / TICKS_PER_S, int(fields[9]) * mmap.PAGESIZE
    return Process(pid, int(fields[1]), head.partition("(")[2], fields[0], cpu_s, fault_bytes)


def read_io(pid: int, task: str = "") -> int:
    """Bytes that a process or a task of it has read and written, sockets apart; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/{task}io").read_text().splitlines()
    except OSError:
        return 0
    return sum(
        int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar", "read_bytes", "write_bytes"))
    )


def read_signs(folder: Path) -> dict[int, spans.Sign]:
    """Signs of life of the processes of a run, by process id."""
    signs: dict[int, spans.Sign] = {}
    for path in (folder / spans.SIGNS).glob("*"):
        try:
            sign = spans.read_sign(path)
        except (OSError, struct.error):  # it is being made
            continue
        signs[sign.pid] = sign
    return signs


def read_all(root: int, signs: dict[int, spans.Sign]) -> list[ProcessReading]:
    """Readings of process `root` and its descendants that give signs, of Ray's own, and any other that is stopped."""
    table = {
        found.pid: found
        for entry in os.scandir("/proc")
        if entry.name.isdigit() and (found := read_process(int(entry.name)))
    }
    children: dict[int, list[int]] = {}
    for found in table.values():
        children.setdefault(found.parent, []).append(found.pid)
    node = socket.gethostname()
    readings: list[ProcessReading] = []

    def name_of(found: Process) -> str:
        return signs[found.pid].name if found.pid in signs else found.command if found.command in RAY_PROCESSES else ""

    def visit(pid: int, owner: str) -> tuple[float, int]:
        """Adds up CPU seconds and bytes of a process and its unnamed children."""
        found = table[pid]
        name = name_of(found)
        spent = [visit(child, name or owner) for child in children.get(pid, [])]
        if pid == os.getpid():
            # Looking takes processor time, which is not work of the driver.
            task = f"task/{threading.get_native_id()}/"
            mine = read_process(pid, task)
            spent.append((-(mine.cpu_s if mine is not None else 0.0), -read_io(pid, task)))
        own = spent if found.command not in RAY_PROCESSES else []
        cpu_s = found.cpu_s + sum(cpu for cpu, _ in own)
        io_bytes = read_io(pid) + found.fault_bytes + sum(io for _, io in own)
        if name or found.state in STOPPED:
            reading = ProcessReading(name or f"{found.command} of {owner}", pid, node, found.state, cpu_s, io_bytes)
            if (sign := signs.get(pid)) is not None:
                doing = f"{'call' if sign.is_open else 'after'} {sign.doing}"
                reading = replace(reading, num_done=sign.num_done, doing=doing, since=sign.since, phase=sign.phase)
            readings.append(reading)
        return (0.0, 0) if name else (cpu_s, io_bytes)

    if root in table:
        visit(root, DRIVER)
    return readings


def read_stacks(folder: Path) -> Stacks:
    """The stacks of all processes that keep a sign of life in `folder`."""
    found = [
        (reading, folder / spans.STACKS / reading.name.replace(" ", "-")) for reading in read_signed(read_signs(folder))
    ]
    before = {reading.key: path.stat().st_size for reading, path in found}
    for _, path in found:
        spans.ask_for_stacks(folder, path.name)
    time.sleep(STACKS_S)
    silent = [reading for reading, path in found if path.stat().st_size == before[reading.key]]
    # In those a call of C keeps the interpreter's lock. A stopped one would take the signal when it goes on.
    asleep = [reading.pid for reading in silent if is_asleep(reading.pid, reading.cpu_s) and writes_stacks(reading.pid)]
    for pid in asleep:
        with suppress(ProcessLookupError):
            os.kill(pid, spans.STACK_SIGNAL)
    if asleep:
        time.sleep(STACKS_S)
    stacks: Stacks = []
    for reading, path in found:
        with path.open("rb") as file:
            file.seek(before[reading.key])
            stacks.append((reading, file.read().decode(errors="replace") or by_py_spy(reading.pid) or "no answer\n"))
    return stacks


def is_asleep(pid: int, cpu_s: float) -> bool:
    """True if all threads of a process sleep and it has used `cpu_s` processor seconds, as at an earlier look."""
    found = read_process(pid)
    if found is None or found.cpu_s != cpu_s:
        return False
    tasks = [read_process(pid, f"task/{path.name}/") for path in Path(f"/proc/{pid}/task").glob("*")]
    return all(task is None or task.state == "S" for task in tasks)


def writes_stacks(pid: int) -> bool:
    """True if a process handles `STACK_SIGNAL`, which would kill a process that does not."""
    try:
        handled = re.search(r"^SigCgt:\s+(\w+)$", Path(f"/proc/{pid}/status").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return False
    return handled is not None and bool(int(handled[1], 16) >> (spans.STACK_SIGNAL - 1) & 1)


def read_signed(signs: dict[int, spans.Sign]) -> list[ProcessReading]:
    """The state of every living process that gives signs."""
    node = socket.gethostname()
    living = {pid: found for pid in signs if (found := read_process(pid)) is not None}
    return [ProcessReading(signs[pid].name, pid, node, found.state, found.cpu_s, 0) for pid, found in living.items()]


class Nodes(Protocol):
    """Looks at nodes whose processes are no children of the driver."""

    def readings(self) -> list[ProcessReading]: ...
    def stacks(self) -> Stacks: ...
    def stop(self) -> None: ...


class Watchdog:
    """Looks at the run's processes from a thread of its own until `stop`."""

    def __init__(self, folder: Path, log_folder: Path, *, notice_s: float, end_s: float) -> None:
        """`folder` is the run's private one on the local disk, `log_folder` a part of the run folder.

        A process that hangs is named after `notice_s`; a run in which nothing has finished for `end_s` is ended.
        """
        self._folder, self._log_folder = folder, log_folder
        self._notice_s, self._end_s = notice_s, end_s
        self.interval_s = min(INTERVAL_S, notice_s / LOOKS_A_NOTICE)
        self.lookouts: Nodes | None = None
        """Looks at further nodes, from when it is set."""
        self._judge = HangJudge(notice_s)
        self._answered_at = time.monotonic()
        self._told: set[tuple] = set()
        self._num_stacks = 0
        self._asked: tuple[float, str] | None = None
        self._dead_daemons: Callable[[], str] | None = None
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=target, name="watchdog", daemon=True) for target in (self._probe, self._watch)
        ]

    def start(self) -> Watchdog:
        spans.show_in(self._folder, DRIVER)
        hangs.ask(self._judge)
        for thread in self._threads:
            thread.start()
        end_on_shortage(self._end_short)
        return self

    def look_after(self, dead_daemons: Callable[[], str]) -> None:
        """Sets the function that names dead daemons of Ray; "" means none."""
        self._dead_daemons = dead_daemons

    def stop(self) -> None:
        """Ends the watch; a thread that a file system holds is left behind."""
        hangs.ask(None)
        if self.lookouts is not None:
            self.lookouts.stop()
        self._is_over.set()
        if self._threads[1].is_alive():
            self._threads[1].join(CONSOLE_TIMEOUT_S)

    def _probe(self) -> None:
        while not self._is_over.wait(self.interval_s):
            try:
                os.utime(self._log_folder)
            except OSError as error:  # an answer too: who writes there says what it means
                logger.debug("%s: %s", self._log_folder, error)
            self._answered_at = time.monotonic()

    def _watch(self) -> None:
        while not self._is_over.wait(self.interval_s):
            others = self.lookouts.readings() if self.lookouts is not None else []
            readings = [*read_all(os.getpid(), read_signs(self._folder)), *others]
            # A launcher may have started Ray below the driver: lookouts know names.
            self.look(time.monotonic(), list({reading.key: reading for reading in readings}.values()))
            self._look_at_ray()

    def _look_at_ray(self) -> None:
        """Ends the run as a signal does once a Ray daemon has died: actors live on without the head, and can save."""
        if self._dead_daemons is None or not (dead := self._dead_daemons()):
            return
        self._dead_daemons = None
        if not LISTENER.is_listening:
            return self._end(dead)
        self._say(
            logging.ERROR, f"{dead}: the run ends. Logs of the actors: {self._log_folder}. The same command resumes."
        )
        os.kill(os.getpid(), signal.SIGTERM)

    def look(self, now: float, readings: Collection[ProcessReading]) -> None:
        """Judges the readings of a moment, and acts on the finding."""
        finding = self._judge.see(now, list(readings), list(hangs.waits))
        folder_silent_s = now - self._answered_at
        is_frozen = folder_silent_s >= self._notice_s
        if LISTENER.first is not None and self._asked is None:
            self._asked = now, LISTENER.first.name
        if finding is None and not is_frozen:
            if self._told:
                self._say(logging.INFO, "The run goes on")
            self._told.clear()
            return
        key = (finding.key if finding is not None else None, is_frozen)
        frozen = f"{self._log_folder} has not answered a write for {folder_silent_s:.0f} s: its file system hangs"
        if key not in self._told:
            self._told.add(key)
            self._tell(finding, frozen if is_frozen else "")
        silent_s = now - (self._judge.moved_at or now)
        if silent_s < self._notice_s or not (is_frozen or (finding is not None and finding.is_hang)):
            return
        reason = frozen if finding is None else described(finding, {})
        if silent_s >= self._end_s:
            self._end(f"nothing has finished for {silent_s:.0f} s, longer than any deadline: {reason}")
        elif (
            self._asked is not None
            and now - self._asked[0] >= self._notice_s
            and not is_frozen
            and self._never_ends(finding)
        ):
            self._end(f"{self._asked[1]} asked the run to end {now - self._asked[0]:.0f} s ago, and it hangs: {reason}")

    def _never_ends(self, finding: Hang | None) -> bool:
        """True if the driver is in a wait without limit; a wait for a file system may still end, and let it save."""
        is_known = finding is not None and all(reading.state != UNINTERRUPTIBLE for reading, _ in finding.suspects)
        return is_known and not hangs.waits

    def _tell(self, finding: Hang | None, frozen: str) -> None:
        places, path = self._keep_stacks()
        said = [frozen] if frozen else []
        if finding is not None:
            said.append(described(finding, places))
        text = f"{'; '.join(said)}; stacks of the run's processes: {path}"
        if not frozen and finding is not None and not finding.is_hang:
            # Ranks that spin in a collective look like ranks at work: their stacks tell.
            self._say(logging.INFO, f"Nothing has finished for {finding.silent_s:.0f} s: {text}")
        else:
            self._say(logging.WARNING, f"The run hangs: {text}")

    def _keep_stacks(self) -> tuple[dict[tuple[str, int], str], Path]:
        """Writes all processes' stacks to a file; returns where each is, by the key of its reading, and the file."""
        stacks = read_stacks(self._folder)
        if self.lookouts is not None:
            with suppress(TimeoutError):  # without the raylet of this node, whose stop is told without them
                stacks += within(STACKS_TIMEOUT_S, "stacks of other nodes", self.lookouts.stacks)
        self._num_stacks += 1
        target = self._log_folder / f"stacks-{self._num_stacks}.txt"
        with local_file(self._folder, target).open("a", encoding="utf-8") as file:
            for reading, text in stacks:
                file.write(f"=== {reading}, state {reading.state}\n{text}\n")
        return {reading.key: innermost(text) for reading, text in stacks}, target

    def _say(self, level: int, text: str) -> None:
        """Writes to the local disk first: the console may take nothing for a while."""
        with local_file(self._folder, self._log_folder / LOG).open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        logger.log(level, "%s", text)

    def _end(self, reason: str) -> None:
        """Kills the run's processes and ends this one, as a failed attempt."""
        with suppress(TimeoutError):  # to read about a process that hangs may hang; the reaper comes after this process
            within(CONSOLE_TIMEOUT_S, "/proc", kill_processes, str(self._folder))
        self._leave(reason)

    def _end_short(self, reason: str) -> None:
        """Ends this process, which finds no memory, whatever fails on the way. The reaper kills the others."""
        try:
            self._leave(f"driver: {reason}")
        finally:
            os._exit(1)

    def _leave(self, reason: str) -> None:
        self._say(
            logging.ERROR,
            f"The attempt ended: {reason}. Logs of the actors: {self._log_folder}. The same command resumes.",
        )
        flush_console()
        os._exit(1)


def described(finding: Hang, places: Mapping[tuple[str, int], str]) -> str:
    """A finding in words, with the place in its code where each suspect is, if that is known."""
    parts = []
    for reading, reason in finding.suspects[:MAX_NAMED]:
        more = [f"phase {reading.phase}"] if reading.phase else []
        more += [reading.doing] if reading.doing else []
        more += [f"in {place}"] if (place := places.get(reading.key)) else []
        parts.append(f"{reading} {reason}" + (f", {', '.join(more)}" if more else ""))
    if (num_more := len(finding.suspects) - MAX_NAMED) > 0:
        parts.append(f"and {num_more} more")
    return "; ".join([*parts, *([f"the driver waits: {finding.wait}"] if finding.wait else [])])


def innermost(stacks: str) -> str:
    """The collective, else the function, in which a process's main thread is; "" if its stacks' text does not say.

    While the driver's worker is at work, it is where that is: the main thread awaits it.
    """
    # Python lists the threads from the youngest on, at most 100, then "..."; the main thread is the oldest.
    if stacks.rstrip().endswith("\n..."):
        return ""
    threads = [text for text in stacks.split("\n\n") if "most recent call first" in text]
    working = [text for text in threads if f" in {AT_WORK}\n" in text]
    frames = [f"{name} ({file}:{line})" for file, line, name in FRAME.findall("".join((working or threads)[-1:]))]
    collectives = [frame for frame in frames if "distributed_c10d" in frame and not frame.startswith("wrapper")]
    return next(iter(collectives or frames), "")


def by_py_spy(pid: int) -> str:
    """The stacks of a process that cannot write them itself; "" without py-spy."""
    if (program := shutil.which("py-spy")) is None:
        return ""
    try:
        command = [program, "dump", "--nonblocking", "--pid", str(pid)]
        return subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_TIMEOUT_S, check=False).stdout
    except subprocess.TimeoutExpired:
        return ""


def start_watchdog(config: RunConfig, folder: Path, log_folder: Path | None) -> Watchdog | None:
    """The watchdog of a run; None without a log folder."""
    if log_folder is None:
        return None
    limits = config.deadlines
    longest_s = max(
        limits.generate_s, limits.reward_s, limits.refit_s, *(deadline.seconds for deadline in all_deadlines(config))
    )
    return Watchdog(folder, log_folder, notice_s=limits.notice_s, end_s=longest_s + limits.notice_s).start()
