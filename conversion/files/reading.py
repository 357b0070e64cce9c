"""Reads files that others wrote, with care: only regular files, of a bounded size, inside of their folder. Standard library only."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path, PurePath

MAX_SMALL_BYTES = 256 << 20
"""Far more than the index of the largest model has."""


def open_file(path: Path) -> int:
    """Opens a regular file, or one that a link leads to; a descriptor to read it by.

    A FIFO would block the reader, and a device has no end.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = {stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a folder"}.get(stat.S_IFMT(mode), "a device")
        raise ValueError(f"{path} is {kind}, not a file; put the file there")
    os.set_blocking(descriptor, True)
    return descriptor


def read_file(path: Path, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
    """The content of a regular file of at most `max_bytes`: an index, a config, a description of tensors.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a regular file, or larger.
    """
    with os.fdopen(open_file(path), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"{path} has more than {max_bytes >> 20} MiB, and is read only up to that; put the right file there")
    return content


def read_json(path: Path) -> object:
    """The content of a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a regular file, or not JSON.
    """
    try:
        return json.loads(read_file(path))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply to be read") from error


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's content."""
    with os.fdopen(open_file(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_state(path: Path) -> list[int]:
    """Size, times and inode of a file: they change when its content does, also where a tool gives the new content the old times."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def check_plain_folder(folder: Path) -> None:
    """Returns if a folder holds only files, links to files, and folders. Libraries that read it would wait for a FIFO's writer.

    Raises:
        ValueError: names a FIFO or a device.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is a FIFO or a device, not a file; remove it")


def name_inside(name: str, named_by: Path) -> str:
    """Returns `name` if it names a file in or below a folder. Links are followed: snapshots of the Hub consist of them.

    Raises:
        ValueError: the name leads out of the folder; the message blames `named_by`.
    """
    path = PurePath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
        raise ValueError(f"{named_by} names {name[:200]!r}, outside of its folder; it is not read")
    return name
