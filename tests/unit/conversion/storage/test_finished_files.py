"""Files that an interrupted attempt finished are kept if they are right."""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path

import pytest

from conversion.storage.finished_files import FinishedFiles
from conversion.storage.manifest import FINISHED_SUFFIX, FileRecord

CONTENT = b"weights" * 1000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that an earlier attempt finished."""
    path = tmp_path / "data"
    path.write_bytes(CONTENT)
    with FinishedFiles() as finished:
        finished.finish(path, {"places": [[0, 7]]})
        expected = FileRecord(len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), zlib.crc32(CONTENT))
        assert finished.records() == {"data": expected}
    return path


def test_a_finished_file_is_kept_with_its_note(path: Path):
    with FinishedFiles() as finished:
        assert finished.kept(path) == {"places": [[0, 7]]}
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
        assert finished.kept(path) is None and finished.records() == {}


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path):
    with FinishedFiles() as finished:
        finished.finish(tmp_path / "missing", None)
        with pytest.raises(FileNotFoundError):
            finished.records()
