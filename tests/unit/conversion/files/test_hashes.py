# SPDX-License-Identifier: Apache-2.0
"""Each file is read once, unless it may have changed; the Hub's own checksums are believed."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from conversion.files import reading
from conversion.files.reading import file_hash
from conversion.files.reading import file_hashes as hashes_of


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are read."""
    found: list[Path] = []
    compute = reading.sha256_file

    def sha256_file(path: Path) -> str:
        found.append(path)
        return compute(path)

    monkeypatch.setattr(reading, "sha256_file", sha256_file)
    return found


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a test are young."""
    monkeypatch.setattr(reading, "SETTLED_S", -1.0)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.mark.usefixtures("settled")
def test_a_file_is_read_once(tmp_path: Path, reads: list[Path]):
    path = tmp_path / "a"
    path.write_bytes(b"first")
    assert [file_hash(path, tmp_path / "memory") for _ in range(3)] == [sha256(b"first")] * 3
    assert reads == [path]
    # Another folder's memory knows nothing.
    assert file_hash(path, tmp_path / "other") == sha256(b"first")
    assert len(reads) == 2


@pytest.mark.usefixtures("settled")
def test_a_file_of_another_content_is_read_again_even_with_the_same_size_and_time(tmp_path: Path):
    path, memory = tmp_path / "a", tmp_path / "memory"
    path.write_bytes(b"first")
    assert file_hash(path, memory) == sha256(b"first")
    time_ns = path.stat().st_mtime_ns
    path.write_bytes(b"other")
    os.utime(path, ns=(time_ns, time_ns))
    assert file_hash(path, memory) == sha256(b"other")
    replacement = tmp_path / "b"
    replacement.write_bytes(b"third")
    shutil.copystat(path, replacement)
    replacement.rename(path)
    assert file_hash(path, memory) == sha256(b"third")


@pytest.mark.usefixtures("settled")
def test_another_node_whose_kernel_numbers_the_file_system_otherwise_reads_nothing(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
):
    path, memory, stat = tmp_path / "a", tmp_path / "memory", Path.stat
    path.write_bytes(b"first")
    file_hash(path, memory)

    def elsewhere(path: Path, **options: bool) -> SimpleNamespace:
        status = stat(path, **options)
        fields = {name: getattr(status, name) for name in dir(status) if name.startswith("st_")}
        return SimpleNamespace(**fields | {"st_dev": status.st_dev + 1})

    monkeypatch.setattr(Path, "stat", elsewhere)
    assert file_hash(path, memory) == sha256(b"first")
    assert reads == [path]


def test_what_has_just_changed_is_not_remembered(tmp_path: Path, reads: list[Path]):
    path = tmp_path / "a"
    path.write_bytes(b"first")
    file_hash(path, tmp_path / "memory")
    file_hash(path, tmp_path / "memory")
    assert len(reads) == 2


@pytest.mark.usefixtures("settled")
def test_a_damaged_memory_is_ignored(tmp_path: Path):
    path, memory = tmp_path / "a", tmp_path / "memory"
    path.write_bytes(b"first")
    file_hash(path, memory)
    (record,) = memory.iterdir()
    record.write_text(record.read_text()[:-1])
    assert file_hash(path, memory) == sha256(b"first")
    assert record.read_text() == sha256(b"first")


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a"
    path.write_bytes(b"first")

    def slow(path: Path) -> str:
        path.write_bytes(b"longer")
        return "0" * 64

    monkeypatch.setattr(reading, "sha256_file", slow)
    with pytest.raises(ValueError, match="changed while it was read"):
        file_hash(path, tmp_path / "memory")


def test_the_hubs_checksum_is_taken_as_given(tmp_path: Path, reads: list[Path]):
    model = tmp_path / "hub" / "models--org--name"
    snapshot, blobs = model / "snapshots" / "0123", model / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    # Large files are named by sha256, small ones by git's sha1.
    for name, blob in (("model.safetensors", "ab" * 32), ("config.json", "cd" * 20)):
        (blobs / blob).write_bytes(b"content")
        (snapshot / name).symlink_to(blobs / blob)
    found = hashes_of([snapshot / "model.safetensors", snapshot / "config.json"], tmp_path / "memory")
    assert found == {snapshot / "model.safetensors": "ab" * 32, snapshot / "config.json": sha256(b"content")}
    assert reads == [snapshot / "config.json"]


def test_a_file_elsewhere_is_read_whatever_it_is_called(tmp_path: Path):
    path = tmp_path / "blobs" / ("ab" * 32)
    path.parent.mkdir()
    path.write_bytes(b"content")
    assert file_hash(path, tmp_path / "memory") == sha256(b"content")


def test_a_missing_file_is_named(tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for name in ("none", "link"):
        with pytest.raises(ValueError, match=f"{name} is missing"):
            file_hash(tmp_path / name, tmp_path / "memory")
