# SPDX-License-Identifier: Apache-2.0
"""Writes files and folders that survive crashes and races: synced, built aside, then renamed. Standard library only."""

from __future__ import annotations

import errno
import itertools
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from conversion.files.limits import within
from conversion.files.owners import REMOVED, heartbeat, is_alive, owned, owned_name, remove_leftover

# A file system that is silent this long will not answer.
IO_TIMEOUT_S = 3600.0
READ_TIMEOUT_S = WRITE_TIMEOUT_S = 600.0

_PLAN, _CONTENT = "plan.json", "content"


def sync_file(path: Path) -> None:
    """Forces to disk a file's content, or a folder's entries (names, renames). TimeoutError: as `sync_descriptor`."""
    descriptor = within(IO_TIMEOUT_S, f"open {path}", os.open, path, os.O_RDONLY)
    try:
        sync_descriptor(descriptor, path)
    finally:
        os.close(descriptor)


def sync_descriptor(descriptor: int, path: Path) -> None:
    """Syncs what was written to the open file of `path`; TimeoutError, an OSError: the file system does not answer."""
    within(IO_TIMEOUT_S, f"fsync of {path}", os.fsync, descriptor)


def read_whole(path: Path) -> bytes:
    """The content of a file, of whichever size; TimeoutError, an OSError: the file system does not answer."""
    return within(READ_TIMEOUT_S, f"read of {path}", path.read_bytes)


def sync_tree(folder: Path) -> None:
    """Forces `folder` and everything below it to disk."""
    for path in (*folder.rglob("*"), folder):
        sync_file(path)


def write_atomic(path: Path, text: str) -> None:
    """Replaces `path` by `text`: a reader sees the old or the new content, never a part; an error leaves the old."""
    within(WRITE_TIMEOUT_S, f"write of {path}", _write_atomic, path, text)


def _write_atomic(path: Path, text: str) -> None:
    # Not the process id: on a shared file system several hosts may write the same file.
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        aside.write_text(text, encoding="utf-8")
        sync_file(aside)
        aside.rename(path)
    except (OSError, ValueError):
        aside.unlink(missing_ok=True)
        raise
    sync_file(path.parent)


def put_aside(path: Path, prefix: str) -> Path:
    """Renames a file or folder in its folder to `prefix` and its name (and a number if taken); returns the new path."""
    return within(WRITE_TIMEOUT_S, f"rename of {path}", _put_aside, path, prefix)


def _put_aside(path: Path, prefix: str) -> Path:
    names = (f"{prefix}{path.name}" + (f".{number}" if number > 1 else "") for number in itertools.count(1))
    aside = path.with_name(next(name for name in names if not os.path.lexists(path.with_name(name))))
    path.rename(aside)
    sync_file(path.parent)
    return aside


def make_folder(path: Path) -> None:
    """Makes a private folder, and those above it. One that is there keeps its mode. TimeoutError: as `write_atomic`."""
    within(WRITE_TIMEOUT_S, f"mkdir of {path}", path.mkdir, mode=0o700, parents=True, exist_ok=True)


def remove_file(path: Path) -> None:
    """Removes a file, if it is there. TimeoutError: as `write_atomic`."""
    within(WRITE_TIMEOUT_S, f"removal of {path}", path.unlink, missing_ok=True)


def publish(aside: Path, final: Path) -> bool:
    """Renames the folder `aside` to `final`, whole or not at all. Returns False and leaves `aside` if `final` exists.

    Of several processes that publish one folder exactly one gets True, on network file systems too: rename(2) decides,
    without a lock.
    """
    folder = aside.stat()
    try:
        aside.rename(final)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            return False
        # After a lost answer the client asks the file server again, which no longer finds what it has renamed.
        if error.errno != errno.ENOENT or not final.exists() or not os.path.samestat(folder, final.stat()):
            raise
    sync_file(final.parent)
    return True


def give_new_modes(folder: Path) -> None:
    """Gives a folder, and the files and folders in it, the modes that the umask gives new ones. Links stay as they are.

    safetensors and `tempfile` write what only its owner may read.
    """
    probe = folder / f".mode.{secrets.token_hex(8)}"
    probe.mkdir()
    mode = probe.stat().st_mode & 0o777
    probe.rmdir()
    for path in (*folder.rglob("*"), folder):
        if not path.is_symlink():
            path.chmod(mode if path.is_dir() else mode & 0o666)


@contextmanager
def built_aside(out: Path, plan: Mapping[str, object], *, num_bytes: int = 0) -> Iterator[Path]:
    """Yields a folder to fill, which becomes `out` (which must not exist yet) when the `with` block ends without error.

    The folder may hold files of a killed attempt with the same `plan` (plain values). A ValueError in the block removes
    it. OSError: the disk lacks room for `num_bytes`, or has lacked it in the block.
    """
    if out.exists():
        raise ValueError(f"--out {out} exists; remove it or choose another")
    out.parent.mkdir(parents=True, exist_ok=True)
    what = f".{out.name}.partial"
    aside = out.parent / owned_name(what)
    for leftover in owned(out.parent, what):
        if is_alive(leftover):
            continue
        # Errors: the attempt had not begun, or another process has taken the folder.
        with suppress(OSError, ValueError):
            if not aside.exists() and json.loads((leftover / _PLAN).read_text(encoding="utf-8")) == plan:
                leftover.rename(aside)
                continue
        remove_leftover(leftover)
    for leftover in owned(out.parent, f"{what}{REMOVED}"):
        if not is_alive(leftover):
            remove_leftover(leftover)
    folder = aside / _CONTENT
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _check_room(folder, out, num_bytes)
        (aside / _PLAN).write_text(json.dumps(plan), encoding="utf-8")
        with heartbeat(aside):
            yield folder
            give_new_modes(folder)
            sync_tree(folder)
            if not publish(folder, out):
                raise ValueError(
                    f"--out {out} exists by now: another process has written it; remove it or choose another"
                )
    except ValueError:
        shutil.rmtree(aside)
        raise
    except OSError as error:
        if next(folder.iterdir(), None) is None:
            shutil.rmtree(aside)
        elif error.errno is not None:
            what = f"{error.strerror}: {error.filename or f'--out {out}'}"
            kept = f"what was written so far is kept in {aside}, and the same command goes on from there"
            raise OSError(error.errno, f"{what}; {kept}") from error
        raise
    shutil.rmtree(aside)


def _check_room(folder: Path, out: Path, num_bytes: int) -> None:
    """Raises OSError if the disk of a folder lacks room for `num_bytes`, those that the folder has included."""
    disk = shutil.disk_usage(folder)
    missing = num_bytes - sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if disk.total and missing > disk.free:  # some network file systems do not tell
        needed, free = (f"{number / 1e9:,.3g} GB" for number in (missing, disk.free))
        raise OSError(
            errno.ENOSPC, f"--out {out} needs {needed} more, and {free} are free; free some or choose another disk"
        )
