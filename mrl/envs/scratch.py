# SPDX-License-Identifier: Apache-2.0
"""Temporary folders for hostile code. Whatever it leaves there is removed, by the next run if the owner was killed."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

PREFIX = "mrl-scratch-"
# The owner of a younger folder may not have locked it yet.
MIN_ABANDONED_S = 60.0


class Scratch:
    """A locked folder that lives as long as this object. Once its process is dead, `remove_abandoned` takes it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._finalizer = weakref.finalize(self, _release, fd, self.path)

    def remove(self) -> None:
        """Removes the folder. May be called again."""
        self._finalizer()


def _release(fd: int, path: Path) -> None:
    os.close(fd)
    remove_folder(path)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for the body of a `with`. It lies in the scratch folder of the calling process, if that has one."""
    path = Path(tempfile.mkdtemp(prefix="mrl-code-"))
    try:
        yield path
    finally:
        remove_folder(path)


def remove_abandoned() -> None:
    """Removes scratch folders of this user whose owners were killed, in any PID namespace."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or gone
        try:
            found = os.fstat(fd)
            if found.st_uid == os.geteuid() and found.st_mtime < time.time() - MIN_ABANDONED_S:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_folder(path)
        except BlockingIOError:
            continue  # its owner lives
        finally:
            os.close(fd)


def remove_folder(folder: Path) -> None:
    """Removes a folder that no process writes to, at any depth and with any permissions; warns if something stays."""
    try:
        os.chmod(folder, 0o700)
        unguessed, num_moved = secrets.token_hex(8), 0
        # Folders within folders move up next to their parents: no path grows long, and nothing recurses.
        while folders := [entry.path for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]:
            for inner in folders:
                os.chmod(inner, 0o700)
                for entry in list(os.scandir(inner)):
                    if entry.is_dir(follow_symlinks=False):
                        os.chmod(entry.path, 0o700)
                        os.rename(entry.path, folder / f"{unguessed}{num_moved}")
                        num_moved += 1
                    else:
                        os.unlink(entry.path)
                os.rmdir(inner)
        for entry in list(os.scandir(folder)):
            os.unlink(entry.path)
        os.rmdir(folder)
    except OSError as error:
        logger.warning("%s cannot be removed: %s; remove it yourself", folder, error)
