# SPDX-License-Identifier: Apache-2.0
"""A manifest lists what was written, or there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from conversion.files.manifest import MANIFEST, file_faults, file_record, seal


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
