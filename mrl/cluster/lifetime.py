# SPDX-License-Identifier: Apache-2.0
"""End of a run's processes: none survives its parent, and nothing of a run is left on its host.

`python -m mrl.cluster.lifetime FOLDER` is the reaper: it waits for its driver to end, in whatever way, kills every
process of the run and removes the run's session folder, through its carrier. Ray's own agents outlive a killed driver
by up to a minute. Needs the standard library only, because the reaper must start in milliseconds and lives as long as
the run.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from conversion.files.limits import limit_console, within
from mrl.cluster.carrier import end_carrier, start_carrier
from mrl.signals import MARK

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
    """The capacity of this host now; `cgroup` has the limits of its container, if there is one."""
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
