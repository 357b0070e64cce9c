"""Finished files of a folder that is not complete yet: each has its checksums beside it, so that a later attempt keeps it."""

from __future__ import annotations

import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from conversion.storage.files import IO_TIMEOUT_S
from conversion.storage.manifest import FINISHED_SUFFIX, FileRecord, file_record


class FinishedFiles:
    """Makes files durable and records their checksums in the background, in the order in which they are finished. A context manager."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._records: dict[str, Future[FileRecord]] = {}

    def __enter__(self) -> FinishedFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def kept(self, path: Path) -> object | None:
        """The note of a file that an earlier attempt finished; None if there is none, or its content is not what was recorded."""
        try:
            content = json.loads(_beside(path).read_text(encoding="utf-8"))
            expected, note = FileRecord(**content["record"]), content["note"]
            if path.stat().st_size != expected.size or file_record(path) != expected:
                return None
        except (OSError, ValueError, KeyError, TypeError):
            # The attempt died before or while it recorded the file.
            return None
        self._records[path.name] = self._pool.submit(lambda: expected)
        return note

    def finish(self, path: Path, note: object) -> None:
        """Records a file that is written. `note` (plain JSON values) is what a later attempt needs to know of it."""
        self._records[path.name] = self._pool.submit(_finish, path, note)

    def records(self) -> dict[str, FileRecord]:
        """Checksums by file name, once all files are durable."""
        return {name: record.result(IO_TIMEOUT_S) for name, record in self._records.items()}


def _finish(path: Path, note: object) -> FileRecord:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    record = file_record(path)
    _beside(path).write_text(json.dumps({"record": asdict(record), "note": note}), encoding="utf-8")
    return record


def _beside(path: Path) -> Path:
    return path.with_name(path.name + FINISHED_SUFFIX)
