# SPDX-License-Identifier: Apache-2.0
"""Run-folder ownership: one attempt at a time owns a run folder, wherever in the cluster it runs. Shared file systems keep no locks.

The file `owner.json` names the owner's process, which touches the file while it lives. On the same host, the process list says whether the
owner lives. A later start of the same Slurm job takes the folder over at once, since Slurm ends one start before the next. Any other owner
is dead when it stops touching the file. An attempt that has lost the folder reads another name in the file before it publishes anything.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from conversion.files.durable import read_whole, write_atomic
from conversion.files.owners import HEARTBEAT_S, Owner, heartbeat, this_process
from mrl import env

logger = logging.getLogger(__name__)

# An owner elsewhere that has not touched its file for so long is dead.
LEASE_S = 6 * HEARTBEAT_S
POLL_S = 1.0


class FolderLost(RuntimeError):
    """Another attempt has taken the run folder over."""


def unowned() -> None:
    """The check of a file that needs no owner."""


@dataclass(frozen=True)
class Attempt:
    """The process that owns the folder, as the file names it."""

    process: Owner
    job: str | None
    """Slurm's id of the job."""
    restart: int
    """Number of times that Slurm has started the job again."""

    def __str__(self) -> str:
        job = "" if self.job is None else f" (job {self.job})"
        return f"process {self.process.pid} on {self.process.host}{job}"


class Ownership:
    """The calling process's hold on a run folder, from `take` to `give_back`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._mine = Attempt(this_process(), env.SLURM_JOB_ID.read(), int(env.SLURM_RESTART_COUNT.read() or 0))
        self._beating = ExitStack()

    def take(self) -> None:
        """Makes this process the owner, after a watch for the owner's signs of life; ValueError: a living process owns the folder."""
        other = self._read()
        if other is not None and self._lives(other):
            raise ValueError(
                f"checkpointing.checkpoint_dir={self._file.parent} is in use by {other}; wait for it, stop it, or choose another folder"
            )
        write_atomic(self._file, json.dumps(asdict(self._mine)))
        self._beating.enter_context(heartbeat(self._file))

    def check(self) -> None:
        """Raises FolderLost if another attempt has taken the folder over: this one must leave it alone."""
        owner = self._read()
        if owner != self._mine:
            raise FolderLost(
                f"{self._file.parent} belongs to {owner or 'nobody'} now: this attempt was taken for dead, and writes nothing more"
            )

    def give_back(self) -> None:
        """Ends the hold; the file goes if it is still this process's."""
        self._beating.close()
        if self._read() == self._mine:
            self._file.unlink(missing_ok=True)

    def _read(self) -> Attempt | None:
        try:
            found = json.loads(read_whole(self._file))
            return Attempt(Owner(**found["process"]), found["job"], found["restart"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self._file} names no process ({error}); remove it if no run uses this folder") from error

    def _lives(self, other: Attempt) -> bool:
        if other.process.is_visible():
            return other.process.is_running()
        if other.job is not None and other.job == self._mine.job:
            return False
        logger.info("%s belonged to %s; watching for %g s whether that lives", self._file.parent, other, LEASE_S)

        def touched() -> float:
            with suppress(FileNotFoundError):
                return self._file.stat().st_mtime
            return 0.0

        first, end = touched(), time.monotonic() + LEASE_S
        while time.monotonic() < end:
            time.sleep(POLL_S)
            if touched() != first:
                return self._file.exists()
        return False
