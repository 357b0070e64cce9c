# SPDX-License-Identifier: Apache-2.0
"""Files and folders are written whole, and published once."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from conversion.files.durable import built_aside, publish, write_atomic


def test_of_many_who_publish_one_wins(tmp_path: Path):
    asides = [tmp_path / f"aside-{index}" for index in range(16)]
    for aside in asides:
        aside.mkdir()
        (aside / "content").write_text(aside.name)
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda aside: publish(aside, tmp_path / "final"), asides))
    assert won.count(True) == 1
    assert (tmp_path / "final" / "content").read_text() == asides[won.index(True)].name
    assert [aside.exists() for aside in asides] == [not has_won for has_won in won]


def test_what_is_not_a_lost_race_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        publish(tmp_path / "none", tmp_path / "final")


def test_a_rename_whose_answer_got_lost_has_won(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rename = Path.rename

    def rename_twice(path: Path, target: Path) -> None:
        rename(path, target)
        rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_twice)
    (tmp_path / "aside").mkdir()
    assert publish(tmp_path / "aside", tmp_path / "final")


def test_atomic_writes_leave_nothing_else(tmp_path: Path):
    write_atomic(tmp_path / "a", "1")
    write_atomic(tmp_path / "a", "2")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "2")]


def test_what_has_no_room_is_refused_before_it_is_written(tmp_path: Path):
    with pytest.raises(OSError, match=r"out needs 1e\+09 GB more, and .* GB are free") as failed:
        with built_aside(tmp_path / "out", {}, num_bytes=10**18):
            raise AssertionError("began")
    assert failed.value.errno == errno.ENOSPC and list(tmp_path.iterdir()) == []


def test_a_full_disk_names_the_part_that_is_kept(tmp_path: Path):
    with pytest.raises(OSError, match="No space left on device: --out .*/out; what was written") as failed:
        with built_aside(tmp_path / "out", {}) as folder:
            (folder / "a").touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    (kept,) = tmp_path.iterdir()
    assert str(kept) in str(failed.value) and [path.name for path in kept.rglob("a")] == ["a"]


@pytest.mark.parametrize(
    ("umask", "modes"), [(0o022, {0o755, 0o644}), (0o027, {0o750, 0o640}), (0o077, {0o700, 0o600})]
)
def test_what_is_published_has_the_modes_of_the_umask(tmp_path: Path, umask: int, modes: set[int]):
    """safetensors writes files that only their owner may read."""
    (tmp_path / "elsewhere").touch(mode=0o600)
    before = os.umask(umask)
    try:
        with built_aside(tmp_path / "out", {}) as folder:
            (folder / "below").mkdir(mode=0o700)
            save_file({"a": torch.zeros(2)}, folder / "below/model.safetensors")
            (folder / "link").symlink_to(tmp_path / "elsewhere")
    finally:
        os.umask(before)
    paths = [tmp_path / "out", *(path for path in (tmp_path / "out").rglob("*") if not path.is_symlink())]
    assert {path.stat().st_mode & 0o777 for path in paths} == modes and len(paths) == 3
    assert (tmp_path / "elsewhere").stat().st_mode & 0o777 == 0o600
