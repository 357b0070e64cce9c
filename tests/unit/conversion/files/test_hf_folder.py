# SPDX-License-Identifier: Apache-2.0
"""The files of a Hugging Face folder are found."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from conversion.files import hf_folder
from conversion.files.hf_folder import INDEX_FILE, SINGLE_FILE, stored_tensors, weight_files


def test_weight_files_are_the_single_file_before_those_of_the_index(tmp_path: Path):
    (tmp_path / INDEX_FILE).write_text(
        json.dumps({"weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"}})
    )
    assert weight_files(tmp_path) == [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    (tmp_path / SINGLE_FILE).touch()
    assert weight_files(tmp_path) == [tmp_path / SINGLE_FILE]


@pytest.mark.parametrize("index", [None, "{", "{}", "[]", '{"weight_map": 3}'])
def test_a_folder_without_weights_is_refused(tmp_path: Path, index: str | None):
    if index is not None:
        (tmp_path / INDEX_FILE).write_text(index)
    with pytest.raises(ValueError, match="name a Hugging Face folder"):
        weight_files(tmp_path)


def test_weights_of_another_user_need_no_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Root may read everything."""
    (tmp_path / SINGLE_FILE).touch()

    def refuse(path: Path) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(hf_folder, "open_file", refuse)
    with pytest.raises(
        ValueError, match=r"model\.safetensors may not be read by this user: .*; let it: chmod -R a\+rX "
    ) as caught:
        stored_tensors(tmp_path)
    assert "download" not in str(caught.value)
