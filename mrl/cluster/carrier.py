# SPDX-License-Identifier: Apache-2.0
"""Carries files of a run's processes from the local disk to the run folder, so that none waits for its file system.

A process writes to a file of `outbox`, and a link next to it says where that belongs. The carrier is a child of the
run's reaper: it outlives driver and actors, so that their last words arrive, and it removes the folder of the run.
Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import sys
import time
from pathlib import Path

from conversion.files.limits import limit_console

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
