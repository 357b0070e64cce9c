# SPDX-License-Identifier: Apache-2.0
"""The process that starts NeMo Gym's servers, and leaves none of them behind.

`python -m mrl.nemo.gym.process_child PROGRAM ARGUMENT...` detaches itself, and ends when the program does, or when its
standard input is closed: when whoever started it is gone. All that the program has started ends with it, daemons of its
Ray included.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
START_S = 120
RAY = {
    "RAY_gcs_server_port_wait_time_s": f"{START_S}",
    "RAY_worker_register_timeout_seconds": f"{START_S}",
    "RAY_agent_register_timeout_ms": f"{START_S * 1000}",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Gives their Ray less to do, and more time than its own 15 to 60 s, which are too few while a run starts on
the host.
"""
GRACE_MS = 15_000
"""For the servers to end by themselves."""
MAX_SESSION_FOLDER_BYTES = 107 - 68 - len("/g12345678")
# A process that the kernel cannot end is left.
KILL_S, LOOK_S = 60.0, 0.05


def main() -> None:
    """Runs the program of the command line until it or the owner ends."""
    if os.fork():  # Ray kills the children of a worker that exits, and would leave their children
        os._exit(0)
    os.setsid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Actors of a run ignore and block signals, and their children with them.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    ray_folder = make_ray_folder(os.environ.get("MRL_RUN_FOLDER", ""))
    # Standard output stays with this process alone: it is closed when everything has ended.
    program = subprocess.Popen(
        sys.argv[1:], stdin=subprocess.DEVNULL, stdout=sys.stderr, env=os.environ | RAY | {"RAY_TMPDIR": ray_folder}
    )
    descriptor, poll = os.pidfd_open(program.pid), select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLIN)
    if not any(ready == descriptor for ready, _ in poll.poll()):
        poll.unregister(sys.stdin.fileno())
        program.send_signal(signal.SIGINT)
        poll.poll(GRACE_MS)
    end = time.monotonic() + KILL_S
    while (left := descendants(os.getpid())) and time.monotonic() < end:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        time.sleep(LOOK_S)
    shutil.rmtree(ray_folder, ignore_errors=True)


def make_ray_folder(session_folder: str) -> str:
    """A folder for their Ray: in the run's (`mrl.signals.MARK`), which goes when the run's reaper killed this process.

    A run's folder with a long path is not taken, as the paths of sockets have 107 bytes, of which Ray's names take 68.
    """
    is_fit = os.path.isdir(session_folder) and len(os.fsencode(session_folder)) <= MAX_SESSION_FOLDER_BYTES
    return tempfile.mkdtemp(prefix="g", dir=session_folder) if is_fit else tempfile.mkdtemp(prefix="mrl-gym-")


def descendants(ancestor: int) -> list[int]:
    """The processes below one, by /proc."""
    parents = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # one that has ended meanwhile
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found, above = list[int](), {ancestor}
    while above := {pid for pid, parent in parents.items() if parent in above}:
        found += above
    return found


if __name__ == "__main__":
    main()
