# SPDX-License-Identifier: Apache-2.0
"""Starts processes where hostile programs run at the same time, and says how much of this host one of them may take."""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# A program's threads are counted every `code.LOOK_S`, and it dies when it has too many; a busy machine looks late.
MAX_WAIT_S = 5.0
RETRY_S = 0.02


def start(popen: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Calls `popen()`, again while the user's or the container's process limit is reached, up to MAX_WAIT_S.

    The threads of one hostile program may fill that limit until it is killed, and cost no other program its verdict.
    BlockingIOError: the limit stays reached.
    """
    end = time.monotonic() + MAX_WAIT_S
    while True:
        try:
            return popen()
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(RETRY_S)


# As many programs as a node has children run at once: each may take this part of what is free, so that none takes all.
PART = 8
MAX_FILE_BYTES, MAX_THREADS, MIN_THREADS = 64 << 20, 128, 4
SCARCE_BYTES, SCARCE_FILES, SCARCE_THREADS = 1 << 20, 16, 2
# No number of children times MAX_THREADS reaches a larger limit.
LARGE_LIMIT = 1 << 15


@dataclass(frozen=True)
class Share:
    """The part of this host that one program may take."""

    num_bytes: int
    num_threads: int
    num_tasks: int
    """RLIMIT_NPROC, which counts all threads of the user; -1 leaves it."""


def share() -> Share:
    """The share of a program that starts now."""
    num_bytes = min(MAX_FILE_BYTES, max(SCARCE_BYTES, free_bytes() // PART))
    free, used = free_threads()
    if free is None:
        return Share(num_bytes, MAX_THREADS, -1)
    num_threads = min(MAX_THREADS, max(MIN_THREADS, free // PART))
    return Share(num_bytes, num_threads, used + num_threads + 1)


def is_scarce() -> bool:
    """True if the temporary folder is full or the limit of processes is reached."""
    found = os.statvfs(tempfile.gettempdir())
    has_no_names = found.f_files > 0 and found.f_favail < SCARCE_FILES
    free, _ = free_threads()
    return (
        found.f_bavail * found.f_frsize < SCARCE_BYTES or has_no_names or (free is not None and free < SCARCE_THREADS)
    )


def free_bytes() -> int:
    """Bytes that this user may still write to the temporary folder."""
    found = os.statvfs(tempfile.gettempdir())
    return found.f_bavail * found.f_frsize


def free_threads() -> tuple[int | None, int]:
    """Threads that this user may still start (None: more than programs can take), and how many it has."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    by_user = soft if os.geteuid() and soft != resource.RLIM_INFINITY and soft < LARGE_LIMIT else None
    by_group = _group_room()
    if by_user is None and by_group is None:
        return None, 0
    used = 0
    for entry in os.scandir("/proc"):
        with suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == os.geteuid():
                used += len(os.listdir(f"{entry.path}/task"))
    rooms = [room for room in (None if by_user is None else by_user - used, by_group) if room is not None]
    return max(0, min(rooms)), used


def _group_room() -> int | None:
    """Threads that the container's limit (pids of its control group) leaves, or None."""
    with suppress(OSError, ValueError):
        group = Path("/proc/self/cgroup").read_text(encoding="utf-8").strip().rpartition("::")[2].lstrip("/")
        for folder in (Path("/sys/fs/cgroup", group), Path("/sys/fs/cgroup")):
            if (folder / "pids.max").exists():
                most = (folder / "pids.max").read_text(encoding="utf-8").strip()
                if most == "max" or int(most) >= LARGE_LIMIT:
                    return None
                return int(most) - int((folder / "pids.current").read_text(encoding="utf-8"))
    return None
