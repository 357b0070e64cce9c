"""`python -m mrl.cluster.reaper FOLDER`: waits for its driver to end, in whatever way, and leaves nothing of the run behind on this host.

Ray's own agents outlive a killed driver by up to a minute. Standard library only: it starts in milliseconds and lives as long as the run.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "MRL_RUN_FOLDER"
"""Environment variable that all processes of a run inherit from its driver."""
# After a clean shutdown processes are about to leave by themselves.
GRACE_S = 1.0
# A process that is being killed may have started another one meanwhile.
MAX_SWEEPS = 20
SWEEP_INTERVAL_S = 0.1


def start_reaper(folder: Path) -> subprocess.Popen[bytes]:
    """A reaper of the processes that this process starts from now on; closing its stdin, or dying, sets it to work."""
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    os.environ[MARK] = str(folder)
    # A session of its own: Ctrl-C in the driver's terminal must not end it.
    return subprocess.Popen(
        [sys.executable, "-m", "mrl.cluster.reaper", str(folder)], stdin=subprocess.PIPE, env=environment, start_new_session=True
    )


def processes_of(folder: str) -> list[int]:
    """Living processes that carry the mark of `folder`, without the caller."""
    mark = f"{MARK}={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                is_marked = mark in (entry / "environ").read_bytes().split(b"\0")
                is_zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if is_marked and not is_zombie:
                found.append(int(entry.name))
    return found


def reap(folder: str) -> None:
    """Kills what is left of the run and removes its folder."""
    time.sleep(GRACE_S)
    for _ in range(MAX_SWEEPS):
        remaining = processes_of(folder)
        if not remaining:
            break
        for pid in remaining:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(SWEEP_INTERVAL_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    reap(sys.argv[1])
