# SPDX-License-Identifier: Apache-2.0
"""Each file is read once, unless it may have changed; names of the Hub's files are compared with what they hold."""

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


def hub_snapshot(root: Path, blob: str, content: bytes) -> Path:
    """A file as huggingface_hub keeps it: content under the name of a checksum, and a link to it."""
    model = root / "hub" / "models--org--name"
    (model / "blobs").mkdir(parents=True)
    (model / "snapshots" / "0123").mkdir(parents=True)
    (model / "blobs" / blob).write_bytes(content)
    link = model / "snapshots" / "0123" / "model.safetensors"
    link.symlink_to(model / "blobs" / blob)
    return link


@pytest.mark.usefixtures("settled")
def test_a_file_of_the_hub_is_read_once_and_compared_with_its_name(tmp_path: Path, reads: list[Path]):
    path = hub_snapshot(tmp_path, sha256(b"content"), b"content")
    assert [file_hash(path, tmp_path / "memory") for _ in range(2)] == [sha256(b"content")] * 2
    assert len(reads) == 1
    blob = path.resolve()
    blob.write_bytes(b"conten\0")
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=rf"model.safetensors is damaged: the sha256 of .*{blob.name} is {sha256(b'conten' + bytes(1))}",
        ):
            file_hash(path, tmp_path / "memory")
    blob.write_bytes(b"content")
    assert file_hash(path, tmp_path / "memory") == sha256(b"content")


def test_a_small_file_of_the_hub_may_have_been_edited(tmp_path: Path):
    # It has the name of git's sha1; people change config.json in place.
    path = hub_snapshot(tmp_path, "cd" * 20, b"edited")
    assert file_hash(path, tmp_path / "memory") == sha256(b"edited")


@pytest.mark.usefixtures("settled")
def test_what_is_remembered_counts_for_nothing_where_all_is_read(tmp_path: Path):
    path, memory = tmp_path / "file", tmp_path / "memory"
    path.write_bytes(b"content")
    file_hash(path, memory)
    for record in memory.iterdir():
        record.write_text("0" * 64)
    assert file_hash(path, memory) == "0" * 64
    assert hashes_of([path], memory, reads_all=True) == {path: sha256(b"content")}


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
