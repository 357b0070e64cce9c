# SPDX-License-Identifier: Apache-2.0
"""How processes of a run end: none survives its parent, and nothing of a run is left on its host.

`python -m mrl.cluster.lifetime FOLDER` is the reaper: it waits for its driver to end, in whatever way, kills every process of the run and
removes the run's session folder, through its carrier. Ray's own agents outlive a killed driver by up to a minute. This file imports the
standard library only, because the reaper must start in milliseconds and lives as long as the run.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from mrl.cluster.carrier import end_carrier, start_carrier

MARK = "MRL_RUN_FOLDER"
"""Environment variable that all processes of a run inherit from its driver."""
PR_SET_PDEATHSIG = 1
# After a clean shutdown processes are about to leave by themselves.
GRACE_S = 1.0
SWEEP_INTERVAL_S = 0.1
# A process that is being killed may have started another one meanwhile, which cannot be read while it changes its program:
# only after this many sweeps in a row that found nothing is nothing left.
QUIET_SWEEPS = 3
MAX_SWEEPS = 200


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent dies (prctl(2), PR_SET_PDEATHSIG). Linux only."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def session_folder() -> Path | None:
    """The private folder of the run that this process belongs to; None on other nodes than the driver's."""
    folder = os.environ.get(MARK)
    return Path(folder) if folder and Path(folder).is_dir() else None


def start_reaper(folder: Path) -> subprocess.Popen[bytes]:
    """Starts the reaper of all processes that this process starts from now on. It acts when this process closes its stdin, or dies."""
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    os.environ[MARK] = str(folder)
    # Ray's agents rename themselves; setproctitle would write the new name over their environment, and with it over the mark.
    os.environ["SPT_NOENV"] = "1"
    # A session of its own: Ctrl-C in the driver's terminal must not end it.
    return subprocess.Popen(
        [sys.executable, "-m", "mrl.cluster.lifetime", str(folder)], stdin=subprocess.PIPE, env=environment, start_new_session=True
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
                # The process ended meanwhile, or belongs to somebody else.
                continue
            if is_marked and not is_zombie:
                found.append(int(entry.name))
    return found


def reap(folder: str) -> None:
    """Kills what is left of the run."""
    time.sleep(GRACE_S)
    num_quiet = 0
    for _ in range(MAX_SWEEPS):
        remaining = processes_of(folder)
        num_quiet = 0 if remaining else num_quiet + 1
        if num_quiet == QUIET_SWEEPS:
            break
        for pid in remaining:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(SWEEP_INTERVAL_S)


if __name__ == "__main__":
    carrier = start_carrier(Path(sys.argv[1]))
    sys.stdin.buffer.read()
    reap(sys.argv[1])
    end_carrier(*carrier)
