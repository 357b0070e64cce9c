# SPDX-License-Identifier: Apache-2.0
"""A manifest lists what was written, or there is none."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from conversion.files import manifest
from conversion.files.manifest import MANIFEST, FileRecord, WriteReport, file_faults, file_record, seal


def test_a_folder_is_sealed_only_with_all_files_that_were_written(tmp_path: Path):
    (tmp_path / "data").write_bytes(b"content")
    written = {"data": file_record(tmp_path / "data")}
    (tmp_path / "data").rename(tmp_path / "other")
    with pytest.raises(ValueError, match="lacks files that were written to it: data;"):
        seal(tmp_path, {}, {}, written)
    assert not (tmp_path / MANIFEST).exists()
    (tmp_path / "other").rename(tmp_path / "data")
    seal(tmp_path, {}, {}, written)
    assert file_faults(tmp_path) == []


def test_what_ranks_wrote_is_read_as_it_was_told_and_asked_for_where_it_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    reports = [
        WriteReport({f"iter_0000000/__{rank}_0.distcp": FileRecord(rank, "ab" * 32, 2**32 - 1)}, 1.5)
        for rank in range(2)
    ]
    told = tmp_path / manifest.WRITTEN
    told.touch()
    assert manifest.read_written(tmp_path) is None
    manifest.tell_written(tmp_path, reports)
    assert manifest.read_written(tmp_path) == reports
    manifest.tell_written(tmp_path, [])
    assert not told.exists() and manifest.read_written(tmp_path) == []

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(manifest, "write_atomic", full)
    told.touch()
    manifest.tell_written(tmp_path, reports)
    assert manifest.read_written(tmp_path) == []
