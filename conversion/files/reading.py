# SPDX-License-Identifier: Apache-2.0
"""Reads others' files with care: only regular files of bounded size, inside their folder. Remembers their checksums."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath

from conversion.files.durable import IO_TIMEOUT_S, READ_TIMEOUT_S, write_atomic
from conversion.files.limits import within
from conversion.files.owners import time_of_folder

MAX_SMALL_BYTES = 256 << 20
"""Far more than the index of the largest model has."""
# A file that changes within one tick of the clock after it was hashed keeps its times (as in git's "racy" index).
SETTLED_S = 2.0
MAX_DIGITS = 300
"""Digits of the largest integers that a float can hold."""
MAX_THREADS = 8
PART_BYTES = 1 << 24
ANNOUNCED_BYTES = 10**9

logger = logging.getLogger(__name__)

_SHA256 = re.compile(r"[0-9a-f]{64}")


def open_file(path: Path) -> int:
    """Opens a regular file, or one behind a link; a descriptor. A FIFO would block the reader, a device has no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = {stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a folder"}.get(stat.S_IFMT(mode), "a device")
        raise ValueError(f"{path} is {kind}, not a file; put the file there")
    os.set_blocking(descriptor, True)
    return descriptor


def read_file(path: Path, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
    """The content of a regular file of at most `max_bytes`: an index, a config, a description of tensors."""

    def read() -> bytes:
        with os.fdopen(open_file(path), "rb") as file:
            parts, left = list[bytes](), max_bytes + 1
            # Python would make room for all of `max_bytes` at once.
            while part := file.read(min(left, PART_BYTES)):
                parts.append(part)
                left -= len(part)
            return b"".join(parts)

    content = within(READ_TIMEOUT_S, f"read of {path}", read)
    if len(content) > max_bytes:
        raise ValueError(
            f"{path} has more than {max_bytes >> 20} MiB, and is read only up to that; put the right file there"
        )
    return content


def parse_json(text: bytes | str, *, allows_nan: bool = False) -> object:
    """A JSON text's value. ValueError: there is none, it is nested too deeply, or has a number that is no finite float.

    JSON has no NaN and no Infinity, but Python's reader takes them, and makes infinity of 1e400, which no integer
    equals. `allows_nan` is for files of ours with metrics that are not finite.
    """

    def number(digits: str) -> float:
        if not math.isfinite(value := float(digits)) and not allows_nan:
            raise ValueError(f"{digits[:40]} is no finite number")
        return value

    def whole(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise ValueError(f"an integer of {len(digits)} digits")
        return int(digits)

    try:
        return json.loads(text, parse_float=number, parse_int=whole, parse_constant=number)
    except RecursionError as error:
        raise ValueError("nested too deeply to be read") from error


def read_json(path: Path) -> object:
    """The content of a JSON file. Raises ValueError for anything else, however deep."""
    try:
        return json.loads(read_file(path))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply to be read") from error


def file_state(path: Path) -> list[int]:
    """Size, times and inode of a file: they change with its content, even where a tool restores the old times."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def check_plain_folder(folder: Path) -> None:
    """Raises ValueError if a folder holds a FIFO or a device: a library that reads it would wait for a writer."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is a FIFO or a device, not a file; remove it")


def name_inside(name: str, named_by: Path) -> str:
    """Returns `name` if it names a file in or below a folder. Links are followed: Hub snapshots consist of them."""
    path = PurePath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
        raise ValueError(f"{named_by} names {name[:200]!r}, outside of its folder; it is not read")
    return name


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's content; TimeoutError, an OSError: the file system does not answer."""

    def hashed() -> str:
        with os.fdopen(open_file(path), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return within(IO_TIMEOUT_S, f"read of {path}", hashed)


def find_difference(expected: Mapping[Path, str]) -> str:
    """Describes the first file whose sha256 is not the expected one, or "". Hashes in threads."""

    def difference(path: Path) -> str:
        try:
            return "" if sha256_file(path) == expected[path] else f"{path} does not have the manifest's sha256"
        except (OSError, ValueError) as error:
            return f"{path} cannot be read: {error}"

    return next(filter(None, _in_threads(difference, expected)), "")


def file_hashes(paths: Iterable[Path], memory: Path, *, reads_all: bool = False) -> dict[Path, str]:
    """`file_hash` of every file, in threads; with `reads_all`, of the bytes there now, whatever `memory` has."""
    found = list(paths)
    return dict(zip(found, _in_threads(lambda path: file_hash(path, memory, reads=reads_all), found), strict=True))


def _in_threads(function: Callable[[Path], str], paths: Iterable[Path]) -> list[str]:
    with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
        return list(pool.map(function, paths))


def known_hash(path: Path, memory: Path) -> str | None:
    """sha256 of a file that was read before in its present state, from the folder `memory`; None if it must be read."""
    record = _record(path, file_state(path), memory)
    if record.exists() and _SHA256.fullmatch(remembered := record.read_text(encoding="utf-8")):
        return remembered
    return None


def _record(path: Path, state: list[int], memory: Path) -> Path:
    """The file in `memory` that has the sha256 of a file in this state."""
    size, modified, changed, inode = state
    # Not by device: each node numbers a network file system differently, and would read all weights again.
    place = hashlib.sha256(os.fsencode(path.resolve(strict=True))).hexdigest()[:16]
    return memory / "-".join(map(str, (place, inode, size, modified, changed)))


def file_hash(path: Path, memory: Path, *, reads: bool = False) -> str:
    """sha256 of a file: `known_hash` unless `reads`, or computed and remembered."""
    try:
        if not reads and (known := known_hash(path, memory)) is not None:
            return known
        state = file_state(path)
        size, modified, changed, _ = state
        record = _record(path, state, memory)
        if size >= ANNOUNCED_BYTES:
            logger.info("Reading %s once, to know it by its checksum", path)
        digest = content_hash(path)
        has_changed = file_state(path) != state
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing: the folder is not a complete model; download it again") from error
    if has_changed:
        raise ValueError(f"{path} changed while it was read; wait until its writer is done, and start again")
    memory.mkdir(parents=True, exist_ok=True)
    if time_of_folder(memory) - max(modified, changed) / 1e9 > SETTLED_S:
        write_atomic(record, digest)
    return digest


def content_hash(path: Path) -> str:
    """sha256 of the bytes of a file. ValueError: the Hub's cache has it under another sha256, so it is damaged."""
    digest, blob = sha256_file(path), path.resolve(strict=True)
    if is_named_by_sha256(path) and digest != blob.name:
        raise ValueError(
            f"{path} is damaged: the sha256 of {blob} is {digest}, not its name; remove that file and download the "
            "model again"
        )
    return digest


def is_named_by_sha256(path: Path) -> bool:
    """True if huggingface_hub downloaded a file to `models--NAME/blobs/<sha256>`, which it never reads again."""
    blob = path.resolve(strict=True)
    return (
        blob.parent.name == "blobs"
        and blob.parent.parent.name.startswith("models--")
        and _SHA256.fullmatch(blob.name) is not None
    )
