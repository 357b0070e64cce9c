"""Writes large files with their checksums, and keeps those that an interrupted attempt finished."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from isal import isal_zlib

from conversion.files.durable import IO_TIMEOUT_S, sync_file
from conversion.files.manifest import FINISHED_SUFFIX, FileRecord, file_record

# Larger writes are several times slower on Linux 6 with ext4: the kernel looks for large free pages to cache them in.
_WRITE_BYTES = 512 << 10
# Hashing less takes no longer than waking a thread.
_SMALL_BYTES = 64 << 10
# The disk works while the rest of the file is made; else it would wait for the end of the file.
SYNC_BYTES = 128 << 20


class HashedFile:
    """A file that is written from front to back, while other threads hash it and force it to disk. A context manager."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        # One thread hashes, one syncs.
        self._pool = ThreadPoolExecutor(2)
        self._sha256, self._crc32, self._size = hashlib.sha256(), 0, 0
        self._sync: Future[None] | None = None
        self._num_synced = 0

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._pool.shutdown()
        self._file.close()
        if error is None and self._sync is not None:
            self._sync.result(timeout=0)

    def write(self, data: bytes | memoryview) -> int:
        """Writes all of `data`, which the caller may change afterwards."""
        content = memoryview(data).cast("B")
        hashed = self._pool.submit(self._hash, content) if len(content) > _SMALL_BYTES else None
        start = 0
        while start < len(content):
            start += self._file.write(content[start : start + _WRITE_BYTES])
        if hashed is None:
            self._hash(content)
        else:
            hashed.result(IO_TIMEOUT_S)
        self._size += len(content)
        if self._size - self._num_synced >= SYNC_BYTES and (self._sync is None or self._sync.done()):
            if self._sync is not None:
                # The kernel tells of a failed write only once.
                self._sync.result(timeout=0)
            self._sync, self._num_synced = self._pool.submit(os.fdatasync, self._file.fileno()), self._size
        return len(content)

    def flush(self) -> None:
        """Does nothing: all is with the kernel already. torch.save asks for it."""

    def tell(self) -> int:
        """Number of bytes that were written."""
        return self._size

    def record(self) -> FileRecord:
        """Size and checksums of what was written."""
        return FileRecord(self._size, self._sha256.hexdigest(), self._crc32)

    def _hash(self, content: memoryview) -> None:
        self._sha256.update(content)
        self._crc32 = isal_zlib.crc32(content, self._crc32)


class FinishedFiles:
    """The files of a folder that is not complete. Each finished one has a record beside it, so that a later attempt keeps it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._records: dict[str, FileRecord] = {}
        self._synced: list[Future[None]] = []

    def __enter__(self) -> FinishedFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def written(self, path: Path, write: Callable[[HashedFile], object]) -> tuple[object, bool]:
        """The note (plain JSON values) that `write` returned about a file, and whether an earlier attempt had finished the file.

        Calls `write` only if there is no such file, or its content is not what was recorded. Syncs the file in the background.
        """
        kept = _kept(path)
        if kept is not None:
            self._records[path.name], note = kept
            return note, True
        with HashedFile(path) as file:
            note = write(file)
        self._records[path.name] = file.record()
        self._synced.append(self._pool.submit(_finish, path, file.record(), note))
        return note, False

    def records(self) -> dict[str, FileRecord]:
        """Checksums by file name, once all files are on disk."""
        for synced in self._synced:
            synced.result(IO_TIMEOUT_S)
        return self._records


def _kept(path: Path) -> tuple[FileRecord, object] | None:
    try:
        content = json.loads(_beside(path).read_text(encoding="utf-8"))
        expected = FileRecord(**content["record"])
        is_right = path.stat().st_size == expected.size and file_record(path) == expected
        return (expected, content["note"]) if is_right else None
    except (OSError, ValueError, KeyError, TypeError):
        # The attempt died before or while it recorded the file.
        return None


def _finish(path: Path, record: FileRecord, note: object) -> None:
    sync_file(path)
    _beside(path).write_text(json.dumps({"record": asdict(record), "note": note}), encoding="utf-8")


def _beside(path: Path) -> Path:
    return path.with_name(path.name + FINISHED_SUFFIX)
