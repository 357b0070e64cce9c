# SPDX-License-Identifier: Apache-2.0
"""Faults at a chosen file operation of a process: an audit hook of Python sees each before the kernel does."""

from __future__ import annotations

import errno
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.waiting import HANG_S

CHANGES = {"os.mkdir": 0, "os.rename": 1, "os.remove": 0, "os.rmdir": 0, "os.truncate": 0}
"""Events that change a folder, with the place of the changed path among their arguments; `open` for writing, too."""

Act = Callable[[int, str], None]
"""Called with the number of an operation, from 1 on, and its path."""


class Operations:
    """Counts the operations of this process below a folder while `is_armed`, and calls `act` before each."""

    def __init__(self, folder: Path, act: Act, *, removals: bool = True) -> None:
        self.folder, self.act, self.removals = str(folder), act, removals
        self.is_armed, self.count = False, 0
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.is_armed or (event not in CHANGES and event != "open"):
            return
        path = arguments[CHANGES.get(event, 0)]
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        is_seen = self.removals or event not in ("os.remove", "os.rmdir")
        if is_seen and isinstance(path, str | os.PathLike) and os.fspath(path).startswith(self.folder):
            self.count += 1
            self.act(self.count, os.fspath(path))


def failing(number: int, code: int, *, stays: bool) -> Act:
    """Fails the operation of this number with an errno, and all later ones if it `stays`."""

    def act(count: int, path: str) -> None:
        if count == number or (stays and count > number):
            raise OSError(code, os.strerror(code), path)

    return act


def in_child(work: Callable[[], Any]) -> Any:
    """Returns what a forked process returns, None if it ends before; hooks could not be removed from this one."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(work()))
    process.start()
    theirs.close()
    assert ours.poll(HANG_S)
    try:
        return ours.recv()
    except EOFError:
        return None
    finally:
        process.join(HANG_S)


FAULTS = (errno.EIO, errno.ENOSPC, errno.EROFS)
"""Errors of a moment, of a full disk, which still lets files be removed, and of a file system that went read-only."""
