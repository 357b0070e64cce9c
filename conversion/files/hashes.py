"""sha256 of the files of a model. Reads each file once: remembers results by device, inode, size and times."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from conversion.files.durable import write_atomic
from conversion.files.owners import time_of_folder
from conversion.files.reading import sha256_file

# A file that changes within one tick of the clock after it was hashed keeps its times (as in git's "racy" index).
SETTLED_S = 2.0
MAX_THREADS = 8
# Reading a larger file takes seconds, and is logged.
ANNOUNCED_BYTES = 10**9

logger = logging.getLogger(__name__)

_SHA256 = re.compile(r"[0-9a-f]{64}")


def file_hashes(paths: Iterable[Path], memory: Path) -> dict[Path, str]:
    """sha256 of every file; `memory` is the folder of remembered ones.

    Raises:
        ValueError: a file is missing, or changes while it is read.
    """
    found = list(paths)
    with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
        return dict(zip(found, pool.map(lambda path: file_hash(path, memory), found), strict=True))


def file_hash(path: Path, memory: Path) -> str:
    """sha256 of a file: the Hub's own where it names the file, else a remembered one, else computed.

    Raises:
        ValueError: the file is missing, or changes while it is read.
    """
    try:
        given = _hash_of_hub_blob(path)
        if given is not None:
            return given
        identity = _identity(path)
        record = memory / "-".join(map(str, identity))
        if record.exists() and _SHA256.fullmatch(remembered := record.read_text(encoding="utf-8")):
            return remembered
        if identity[2] >= ANNOUNCED_BYTES:
            logger.info("Reading %s once, to know it by its checksum", path)
        digest = sha256_file(path)
        has_changed = _identity(path) != identity
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing: the folder is not a complete model; download it again") from error
    if has_changed:
        raise ValueError(f"{path} changed while it was read; wait until its writer is done, and start again")
    memory.mkdir(parents=True, exist_ok=True)
    # Model and memory may lie on one file server, whose clock may differ from ours.
    if time_of_folder(memory) - max(identity[3:]) / 1e9 > SETTLED_S:
        write_atomic(record, digest)
    return digest


def _identity(path: Path) -> tuple[int, int, int, int, int]:
    """Values that change when the content does. The inode's time is among them because tools can set the time of the content."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _hash_of_hub_blob(path: Path) -> str | None:
    """huggingface_hub keeps large files as `models--NAME/blobs/<sha256>` and links to them from `snapshots/`."""
    blob = path.resolve(strict=True)
    is_blob = blob.parent.name == "blobs" and blob.parent.parent.name.startswith("models--")
    return blob.name if is_blob and _SHA256.fullmatch(blob.name) else None
