# SPDX-License-Identifier: Apache-2.0
"""Files are hashed while they are written; those that an interrupted attempt finished are kept if they are right."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import zlib
from pathlib import Path

import pytest

from conversion.files import manifest
from conversion.files.manifest import FINISHED_SUFFIX, FileRecord, FinishedFiles, HashedFile, file_record

CONTENT = b"weights" * 1000
NOTE = {"places": [[0, 7]]}


def write(file: HashedFile) -> object:
    file.write(CONTENT)
    return NOTE


def never(file: HashedFile) -> object:
    raise AssertionError("must be kept")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that an earlier attempt finished."""
    path = tmp_path / "data"
    with FinishedFiles() as finished:
        assert finished.written(path, write) == (NOTE, False)
        expected = FileRecord(len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), zlib.crc32(CONTENT))
        assert finished.records() == {"data": expected}
    return path


def test_what_is_written_in_parts_has_the_checksums_of_the_whole(tmp_path: Path):
    parts = [bytes(os.urandom(size)) for size in (0, 1, 1000, 100_000, 3 << 20)]
    with HashedFile(tmp_path / "data") as file:
        for part in parts:
            assert file.write(memoryview(part)) == len(part)
        assert file.tell() == sum(map(len, parts))
    assert (tmp_path / "data").read_bytes() == b"".join(parts)
    assert file.record() == file_record(tmp_path / "data")


def test_a_file_whose_disk_fails_meanwhile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(manifest, "SYNC_BYTES", 1)
    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)), HashedFile(tmp_path / "data") as file:
        file.write(CONTENT)


def test_a_finished_file_is_kept_with_its_note(path: Path):
    with FinishedFiles() as finished:
        assert finished.written(path, never) == (NOTE, True)
        assert finished.records()["data"].size == len(CONTENT)


@pytest.mark.parametrize("damage", ["a byte", "the end", "the file", "no record", "half a record", "another record"])
def test_what_is_not_as_recorded_is_written_again(path: Path, damage: str):
    record = path.with_name(path.name + FINISHED_SUFFIX)
    match damage:
        case "a byte":
            path.write_bytes(b"x" + CONTENT[1:])
        case "the end":
            path.write_bytes(CONTENT[:-1])
        case "the file":
            path.unlink()
        case "no record":
            record.unlink()
        case "half a record":
            record.write_text(record.read_text()[:40])
        case "another record":
            record.write_text(json.dumps({"record": [], "note": 1}))
    with FinishedFiles() as finished:
        assert finished.written(path, write) == (NOTE, False)
    assert path.read_bytes() == CONTENT


def test_a_file_that_disappears_is_an_error(tmp_path: Path):
    def write_and_remove(file: HashedFile) -> object:
        (tmp_path / "data").unlink()
        return write(file)

    with FinishedFiles() as finished:
        finished.written(tmp_path / "data", write_and_remove)
        with pytest.raises(FileNotFoundError):
            finished.records()
