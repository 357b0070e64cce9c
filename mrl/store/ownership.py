# SPDX-License-Identifier: Apache-2.0
"""Run-folder ownership: one attempt at a time owns a folder, anywhere in the cluster. Shared file systems lack locks.

The file `owner.json` names the owner's process, which touches the file while it lives. On the same host, the process
list says whether the owner lives. A later start of the same Slurm job takes the folder over at once, since Slurm ends
one start before the next. Any other owner is dead when it stops touching the file. Of several starts at the same moment
link(2) lets one take the folder, on network file systems too. An attempt that has lost the folder reads another name in
the file before it publishes anything.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import secrets
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from conversion.files.durable import WRITE_TIMEOUT_S, read_whole, remove_file, sync_file, write_atomic
from conversion.files.limits import within
from conversion.files.owners import HEARTBEAT_S, Owner, heartbeat, this_process
from mrl import env

logger = logging.getLogger(__name__)

LEASE_S = 6 * HEARTBEAT_S
POLL_S = 1.0
MAX_TRIES = 100
# For file systems without hard links, where the name of an owner appears before its content.
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)


class FolderLost(RuntimeError):
    """Another attempt has taken the run folder over."""


def unowned() -> None:
    """The check of a file that needs no owner."""


@dataclass(frozen=True)
class Attempt:
    """The process that owns the folder, as the file names it."""

    process: Owner
    job: str | None
    restart: int

    def __str__(self) -> str:
        job = "" if self.job is None else f" (job {self.job})"
        return f"process {self.process.pid} on {self.process.host}{job}"


NOBODY = Attempt(Owner("an unknown host", "", 0, 0, 0), None, 0)
"""Stands for an owner whose name cannot be read: signs of life decide."""


class Ownership:
    """The calling process's hold on a run folder, from `take` to `give_back`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._mine = Attempt(this_process(), env.SLURM_JOB_ID.read(), int(env.SLURM_RESTART_COUNT.read() or 0))
        self._beating, self._is_held = ExitStack(), False

    def take(self) -> None:
        """Makes this process the owner, after watching for signs of life; ValueError: a living process owns it."""
        self._claim(self._file)
        self._is_held = True
        self._beating.enter_context(heartbeat(self._file))

    def _claim(self, file: Path) -> None:
        """Makes `file` name this process, unless it names one that lives; of several that try, one succeeds."""
        for _ in range(MAX_TRIES):
            if within(WRITE_TIMEOUT_S, f"write of {file}", self._create, file):
                return
            other = self._read(file)
            if other is None:
                continue
            if self._lives(other, file):
                raise ValueError(
                    f"checkpointing.checkpoint_dir={file.parent} is in use by {other}; wait for it, stop it, or "
                    "choose another folder"
                )
            # A process with the right to replace this owner may be killed first: then another claims that right.
            right = file.with_name(f"{file.name}.{hashlib.sha256(repr(other).encode()).hexdigest()[:8]}")
            self._claim(right)
            try:
                if self._read(file) == other:
                    write_atomic(file, self._text())
                    return
            finally:
                remove_file(right)
        raise ValueError(f"{file} keeps changing its owner, or is a broken link; remove it if no run uses this folder")

    def _create(self, file: Path) -> bool:
        """Creates `file` with this process's name in it; False if it existed."""
        aside = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
        try:
            aside.write_text(self._text(), encoding="utf-8")
            sync_file(aside)
            os.link(aside, file)
        except FileExistsError:
            # A file server whose first answer got lost is asked again, and finds what it has made.
            try:
                return file.samefile(aside)
            except FileNotFoundError:  # given back meanwhile
                return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            try:
                file.touch(exist_ok=False)
            except FileExistsError:
                return False
            file.write_text(self._text(), encoding="utf-8")
        finally:
            aside.unlink(missing_ok=True)
        return True

    def _text(self) -> str:
        return json.dumps(asdict(self._mine))

    def check(self) -> None:
        """Raises FolderLost if another attempt has taken the folder over: this one must leave it alone."""
        owner = self._read(self._file)
        if owner is None and not self._file.parent.is_dir():
            raise FolderLost(
                f"{self._file.parent} is not there any more: it was moved or removed while this attempt ran. Move "
                "it back, or set checkpointing.checkpoint_dir to where it is: a start without it begins at step 0"
            )
        if owner != self._mine:
            raise FolderLost(
                f"{self._file.parent} belongs to {owner or 'nobody'} now: this attempt was taken for dead, and "
                "writes nothing more"
            )

    def holder(self) -> str | None:
        """The process that owns the folder, if it lives on this host; None if unknown without a watch."""
        other = self._read(self._file)
        return str(other) if other is not None and other.process.is_visible() and other.process.is_running() else None

    def give_back(self) -> None:
        """Ends the hold; the file goes if it is still this process's."""
        self._beating.close()
        if self._is_held and self._read(self._file) == self._mine:
            remove_file(self._file)

    def _read(self, file: Path) -> Attempt | None:
        try:
            found = json.loads(read_whole(file))
            return Attempt(Owner(**found["process"]), found["job"], found["restart"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):  # as a power loss leaves it, or a kill where there are no hard links
            return NOBODY

    def _lives(self, other: Attempt, file: Path) -> bool:
        if other.process.is_visible():
            return other.process.is_running()
        if other.job is not None and other.job == self._mine.job and other.restart < self._mine.restart:
            return False
        logger.info("%s belonged to %s; watching for %g s whether that lives", file.parent, other, LEASE_S)

        def touched() -> float:
            with suppress(FileNotFoundError):
                return file.stat().st_mtime
            return 0.0

        first, end = touched(), time.monotonic() + LEASE_S
        while time.monotonic() < end:
            time.sleep(POLL_S)
            if touched() != first:
                return file.exists()
        return False
