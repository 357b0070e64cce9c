# SPDX-License-Identifier: Apache-2.0
"""End of a run's processes: none survives its parent, and nothing of a run is left on its host.

A process writes to a file of `outbox` on the local disk, and a link next to it says where in the run folder that
belongs: none waits for its file system. The carrier, a child of the reaper, outlives driver and actors, so that their
last words arrive.

`python -m mrl.cluster.lifetime FOLDER` is the reaper: it waits for its driver to end, in whatever way, kills every
process of the run and removes the run's session folder, through its carrier. Ray's own agents outlive a killed driver
by up to a minute. Needs the standard library only, because the reaper must start in milliseconds and lives as long as
the run.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from conversion.files.limits import limit_console, within
from mrl.signals import MARK

OUTBOX = "outbox"
LINK_SUFFIX = ".to"
INTERVAL_S = 0.2
MAX_BYTES = 2**22
CARRY_TIMEOUT_S = 5.0
# fallocate(2): what has been carried leaves the local disk, and the offsets of what follows stay.
KEEP_SIZE, PUNCH_HOLE = 1, 2


def local_file(folder: Path, target: Path) -> Path:
    """A local file, below the run's private `folder`, whose content is carried behind that of `target`."""
    outbox = folder / OUTBOX
    outbox.mkdir(mode=0o700, exist_ok=True)
    link = outbox / f"{target.name}{LINK_SUFFIX}"
    if not link.is_symlink():
        link.symlink_to(target.absolute())
    return outbox / target.name


class Carrier:
    """Carries the files of one folder."""

    def __init__(self, folder: Path) -> None:
        self._outbox = folder / OUTBOX
        self._offsets: dict[str, int] = {}
        self._failed: set[str] = set()

    def carry(self) -> None:
        """Carries the bytes written since the last call; the next call tries again those that fail."""
        for link in self._outbox.glob(f"*{LINK_SUFFIX}"):
            name, target = link.name.removesuffix(LINK_SUFFIX), os.readlink(link)
            try:
                self._carry(name, Path(target))
            except OSError as error:
                if name not in self._failed:
                    self._failed.add(name)
                    print(
                        f"{target} cannot be written, and waits on the local disk: {error}", file=sys.stderr, flush=True
                    )

    def _carry(self, name: str, target: Path) -> None:
        local = self._outbox / name
        offset = self._offsets.get(name, 0)
        if not local.exists() or local.stat().st_size <= offset:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        with local.open("r+b") as source, target.open("ab", buffering=0) as sink:
            source.seek(offset)
            while piece := source.read(MAX_BYTES):
                self._offsets[name] = offset = offset + sink.write(piece)
                source.seek(offset)
            ctypes.CDLL(None).fallocate(
                source.fileno(), KEEP_SIZE | PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(offset)
            )


def start_carrier(folder: Path) -> tuple[int, int]:
    """Forks a carrier; its process id and a descriptor: when closed, it carries the rest, removes `folder` and ends."""
    ends_here, stays_open = os.pipe()
    pid = os.fork()
    if pid:
        os.close(ends_here)
        return pid, stays_open
    os.close(stays_open)
    limit_console()
    carrier, is_last = Carrier(folder), False
    while not is_last:
        is_last = bool(select.select([ends_here], [], [], INTERVAL_S)[0])
        carrier.carry()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def end_carrier(pid: int, stays_open: int) -> None:
    """Waits until the carrier has ended, unless the run folder's file system does not answer: then it goes on alone."""
    os.close(stays_open)
    end = time.monotonic() + CARRY_TIMEOUT_S
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            print(
                "The run folder does not answer; the last lines of the actors' logs follow when it does.",
                file=sys.stderr,
                flush=True,
            )
            return
        time.sleep(0.02)


# After a clean shutdown processes are about to leave by themselves.
GRACE_S = 1.0
SWEEP_INTERVAL_S = 0.1
# A process that is being killed may have started another one meanwhile, which cannot be read while it changes its
# program: only after this many sweeps in a row that found nothing is nothing left.
QUIET_SWEEPS = 3
# A process in state D, as on a file system that hangs, dies when that answers. Nobody waits for it longer.
SWEEP_LIMIT_S = 20.0
REAPER_TIMEOUT_S = 30.0
LOOK_TIMEOUT_S = 5.0


def session_folder() -> Path | None:
    """The private folder of the run that this process belongs to; None on other nodes than the driver's."""
    folder = os.environ.get(MARK)
    return Path(folder) if folder and Path(folder).is_dir() else None


def start_reaper(folder: Path) -> subprocess.Popen[bytes]:
    """Starts the reaper of all processes this one starts from now on. Acts when this one closes its stdin or dies."""
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    os.environ[MARK] = str(folder)
    # Ray's agents rename themselves; setproctitle would write the new name over their environment, and with it over the
    # mark.
    os.environ["SPT_NOENV"] = "1"
    # A session of its own: no signal to the driver's group must end it.
    return subprocess.Popen(
        [sys.executable, "-m", "mrl.cluster.lifetime", str(folder)],
        stdin=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )


def processes_of(folder: str) -> list[int]:
    """Living processes that carry the mark of `folder`, without the caller."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                is_marked = mark in (entry / "environ").read_bytes().split(b"\0")
                is_zombie = (entry / "stat").read_bytes().rpartition(b")")[2].split()[:1] == [b"Z"]
            except OSError:
                continue
            if is_marked and not is_zombie:
                found.append(int(entry.name))
    return found


def end_reaper(reaper: subprocess.Popen[bytes], folder: Path) -> list[str]:
    """Waits for a reaper whose stdin is closed; describes the processes that are left."""
    try:
        reaper.wait(REAPER_TIMEOUT_S)
        # Reading about a process that hangs may hang, too.
        return within(LOOK_TIMEOUT_S, "/proc", lambda: [describe(pid) for pid in processes_of(str(folder))])
    except (subprocess.TimeoutExpired, TimeoutError) as error:
        return [f"process {reaper.pid}, which ends those of the run ({error})"]


@dataclass(frozen=True)
class Capacity:
    """Processors and memory that this process may use."""

    num_cores: int
    load: float
    """Processes that compute or want to, on all cores of the host, averaged over a minute."""
    free_bytes: int

    def __str__(self) -> str:
        return f"{self.num_cores} cores, load {self.load:.1f}, {self.free_bytes / 1e9:.1f} GB of memory free"


def read_capacity(cgroup: Path = Path("/sys/fs/cgroup")) -> Capacity:
    """The capacity of this host now; `cgroup` has the limits of its container, if any."""
    free = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    free_bytes = int(free[1]) * 1024 if free else 0
    with suppress(OSError, ValueError):  # no limit: the files are missing, or say "max"
        free_bytes = min(
            free_bytes, int((cgroup / "memory.max").read_text()) - int((cgroup / "memory.current").read_text())
        )
    return Capacity(len(os.sched_getaffinity(0)), os.getloadavg()[0], free_bytes)


def describe(pid: int) -> str:
    """A process in a message: its id, command and state."""
    try:
        name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:100]
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return f"process {pid}"
    waits = ", it waits for a file system or a device that does not answer" if state == "D" else ""
    return f"process {pid} ({name}; state {state}{waits})"


def kill_processes(folder: str) -> int:
    """Kills the processes that carry the mark of `folder`; returns how many there were."""
    remaining = processes_of(folder)
    for pid in remaining:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(remaining)


def reap(folder: str) -> None:
    """Kills the run's remaining processes."""
    time.sleep(GRACE_S)
    num_quiet, end = 0, time.monotonic() + SWEEP_LIMIT_S
    while time.monotonic() < end:
        num_quiet = 0 if kill_processes(folder) else num_quiet + 1
        if num_quiet == QUIET_SWEEPS:
            break
        time.sleep(SWEEP_INTERVAL_S)


if __name__ == "__main__":
    carrier = start_carrier(Path(sys.argv[1]))
    limit_console()
    sys.stdin.buffer.read()
    reap(sys.argv[1])
    end_carrier(*carrier)
