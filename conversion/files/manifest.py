# SPDX-License-Identifier: Apache-2.0
"""Checksums of conversion files: taken while it writes, stored beside each finished file, listed in manifest.json."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from conversion.files.crc32 import crc32
from conversion.files.durable import IO_TIMEOUT_S, remove_file, sync_file, write_atomic
from conversion.files.reading import name_inside, open_file, parse_json, read_file
from conversion.texts import listed

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
# Raised whenever the same Hugging Face folder would be written differently than before: other keys, shapes, or formats.
TABLE_VERSION = 1
FINISHED_SUFFIX = ".finished"
HF_CONFIG_FILE = "hf_config.json"
"""The model's config.json, beside the shards."""
RUN_CONFIG_FILE = "run_config.yaml"
"""JSON beside the shards of a model: settings without which nobody can load them."""

# Syncs often, so that the disk writes while the rest of the file is made.
SYNC_BYTES = 128 << 20
# Larger writes are several times slower on Linux 6 with ext4: the kernel looks for large free pages to cache them in.
_WRITE_BYTES = 512 << 10
# Hashing less takes no longer than waking a thread.
_SMALL_BYTES = 64 << 10
_BLOCK_BYTES = 8 << 20
_NO_CHECKSUM = '"sha256": ""'


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A canonical tensor as it is stored."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str
    """Checksum of the tensor's content in `dtype`, row by row, little-endian."""
    crc32: int
    """Checksum of the same content. Much faster than sha256: checked while the tensor is read for another purpose."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and checksums of a file."""

    size: int
    sha256: str
    crc32: int
    """Much faster than sha256: what loading checks."""


@dataclass(frozen=True)
class Manifest:
    """Content of a folder."""

    source: Mapping[str, object]
    """Origin of the folder, for people; the tensors' checksums identify it."""
    tensors: Mapping[str, TensorRecord]
    files: Mapping[str, FileRecord]
    """Records by path relative to the folder; every file but the manifest itself."""
    table_version: int = TABLE_VERSION


class FileChecksums:
    """sha256 and CRC-32 of bytes that come in pieces."""

    def __init__(self) -> None:
        self._sha256, self._crc32 = hashlib.sha256(), 0

    def add(self, content: memoryview) -> None:
        """Adds these bytes to the checksums."""
        self._sha256.update(content)
        self._crc32 = crc32(content, self._crc32)

    def values(self) -> tuple[str, int]:
        """The sha256 in hexadecimal digits, and the CRC-32."""
        return self._sha256.hexdigest(), self._crc32


class HashedFile(AbstractContextManager["HashedFile"]):
    """A file written from front to back, while other threads hash it and force it to disk. A context manager."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._pool = ThreadPoolExecutor(2)
        self._checksums, self._size = FileChecksums(), 0
        self._sync: Future[None] | None = None
        self._num_synced = 0

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._pool.shutdown()
        self._file.close()
        if error is None and self._sync is not None:
            self._sync.result(timeout=0)

    def write(self, data: bytes | memoryview) -> int:
        """Writes all of `data`, which the caller may change afterwards."""
        content = memoryview(data).cast("B")
        hashed = self._pool.submit(self._checksums.add, content) if len(content) > _SMALL_BYTES else None
        start = 0
        while start < len(content):
            start += self._file.write(content[start : start + _WRITE_BYTES])
        if hashed is None:
            self._checksums.add(content)
        else:
            hashed.result(IO_TIMEOUT_S)
        self._size += len(content)
        if self._size - self._num_synced >= SYNC_BYTES and (self._sync is None or self._sync.done()):
            if self._sync is not None:
                # The kernel reports a failed write only once.
                self._sync.result(timeout=0)
            self._sync, self._num_synced = self._pool.submit(os.fdatasync, self._file.fileno()), self._size
        return len(content)

    def flush(self) -> None:
        """Does nothing: the kernel has all data already. torch.save calls it."""

    def tell(self) -> int:
        """Number of bytes written so far."""
        return self._size

    def record(self) -> FileRecord:
        """Size and checksums of the written bytes."""
        return FileRecord(self._size, *self._checksums.values())


class FinishedFiles(AbstractContextManager["FinishedFiles"]):
    """Files of an incomplete folder. Each finished file has a record next to it, so that a later attempt keeps it."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._records: dict[str, FileRecord] = {}
        self._synced: list[Future[None]] = []

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def written(self, path: Path, write: Callable[[HashedFile], object]) -> tuple[object, bool]:
        """The note (plain JSON values) that `write` returned about a file, and whether an earlier attempt finished it.

        Calls `write` only if there is no such file, or its content is not what was recorded. Syncs the file in the
        background.
        """
        beside = path.with_name(path.name + FINISHED_SUFFIX)
        with suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads(beside.read_text(encoding="utf-8"))
            expected, note = FileRecord(**kept["record"]), kept["note"]
            if path.stat().st_size == expected.size and file_record(path) == expected:
                self._records[path.name] = expected
                return note, True
        with HashedFile(path) as file:
            note = write(file)
        record = self._records[path.name] = file.record()

        def finish() -> None:
            sync_file(path)
            beside.write_text(json.dumps({"record": asdict(record), "note": note}), encoding="utf-8")

        self._synced.append(self._pool.submit(finish))
        return note, False

    def records(self) -> dict[str, FileRecord]:
        """Checksums by file name, once all files are on disk."""
        for synced in self._synced:
            synced.result(IO_TIMEOUT_S)
        return self._records


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest of a folder, with a checksum of the manifest itself."""
    content = {
        "sha256": "",
        "table_version": manifest.table_version,
        "source": dict(manifest.source),
        "tensors": {name: asdict(record) for name, record in manifest.tensors.items()},
        "files": {name: asdict(record) for name, record in manifest.files.items()},
    }
    text = json.dumps(content, indent=1) + "\n"
    own = hashlib.sha256(text.encode()).hexdigest()
    (folder / MANIFEST).write_text(text.replace(_NO_CHECKSUM, f'"sha256": "{own}"', 1), encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder; a ValueError if there is none, or it is damaged."""
    path = folder / MANIFEST
    try:
        text = read_file(path).decode()
        content = cast(dict, parse_json(text))
        plain = text.replace(f'"sha256": "{content["sha256"]}"', _NO_CHECKSUM, 1)
        if hashlib.sha256(plain.encode()).hexdigest() != content["sha256"]:
            raise ValueError("its own checksum differs")
        return Manifest(
            source=dict(content["source"]),
            tensors={
                str(name): TensorRecord(
                    str(record["dtype"]), tuple(map(int, record["shape"])), str(record["sha256"]), int(record["crc32"])
                )
                for name, record in content["tensors"].items()
            },
            files={
                name_inside(str(name), path): FileRecord(
                    int(record["size"]), str(record["sha256"]), int(record["crc32"])
                )
                for name, record in content["files"].items()
            },
            table_version=int(content["table_version"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is missing or damaged ({error!r}); convert again with python -m mrl.convert"
        ) from error


def seal(
    folder: Path, source: Mapping[str, object], tensors: Mapping[str, TensorRecord], known: Mapping[str, FileRecord]
) -> None:
    """Writes the manifest of a complete folder. Reads files for their checksums, except those that are `known`."""
    for record in folder.rglob(f"*{FINISHED_SUFFIX}"):
        record.unlink()
    files = {name: known[name] if name in known else file_record(folder / name) for name in file_names(folder)}
    if missing := sorted(known.keys() - files.keys()):
        raise ValueError(
            f"{folder} lacks files that were written to it: {', '.join(missing[:6])}; something has removed them, "
            "start again"
        )
    write_manifest(folder, Manifest(source, tensors, files))


def check_same_tensors(source: Path, tensors: Mapping[str, TensorRecord]) -> None:
    """Raises ValueError if tensors read from a folder differ from its manifest, if any. Compares only equal dtypes."""
    if not (source / MANIFEST).exists():
        return
    expected = read_manifest(source).tensors
    same_dtype = [name for name, record in tensors.items() if name in expected and expected[name].dtype == record.dtype]
    different = [f"{name}: not the values that were written" for name in same_dtype if expected[name] != tensors[name]]
    _refuse(source, different + [f"{name}: missing" for name in sorted(expected.keys() ^ tensors.keys())])


def check_files(folder: Path, names: Iterable[str]) -> None:
    """Raises ValueError unless these files of a folder match its manifest. For loading: reads them once, by CRC-32."""
    files = read_manifest(folder).files
    _refuse(folder, [fault for name in names if (fault := _fault(folder, name, files.get(name), with_sha256=False))])


def file_faults(folder: Path) -> list[str]:
    """Lists the differences between a folder and its manifest, one line each. Reads all bytes once."""
    files = read_manifest(folder).files
    names = [*(name for name in file_names(folder) if name not in files), *files]
    return [fault for name in names if (fault := _fault(folder, name, files.get(name), with_sha256=True))]


def file_names(folder: Path) -> list[str]:
    """Every file below a folder but its manifest, by relative path."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if path != MANIFEST)


def file_record(path: Path, *, with_sha256: bool = True) -> FileRecord:
    """Checksums of a file, which is read once; an empty sha256 unless asked for."""
    sha256, checksum, size = hashlib.sha256(), 0, 0
    buffer = bytearray(_BLOCK_BYTES)
    with os.fdopen(open_file(path), "rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):
            block = memoryview(buffer)[:num_bytes]
            if with_sha256:
                sha256.update(block)
            checksum = crc32(block, checksum)
            size += num_bytes
    return FileRecord(size, sha256.hexdigest() if with_sha256 else "", checksum)


def _fault(folder: Path, name: str, expected: FileRecord | None, *, with_sha256: bool) -> str | None:
    path = folder / name
    if expected is None:
        return f"{name}: not in the manifest"
    if not path.is_file():
        return f"{name}: missing"
    if (size := path.stat().st_size) != expected.size:
        return f"{name}: {size} bytes instead of {expected.size}"
    found = file_record(path, with_sha256=with_sha256)
    is_same = found.crc32 == expected.crc32 and (not with_sha256 or found.sha256 == expected.sha256)
    return None if is_same else f"{name}: its checksum differs, so the file is damaged"


def _refuse(folder: Path, faults: list[str]) -> None:
    if faults:
        said = listed(faults, between="; ")
        raise ValueError(f"{folder} is not what its {MANIFEST} says: {said}; remove the folder and convert again")


@dataclass(frozen=True)
class WriteReport:
    """The files that one rank wrote of a checkpoint."""

    files: dict[str, FileRecord]
    """Records by path below the folder of the weights; the files are flushed to disk."""
    hidden_s: float
    """Seconds of writing in the background."""
    problem: str = ""
    """Reason why there is no checkpoint, the same on all ranks; "" if there is one."""


WRITTEN = "written.json"
"""File beside weights that ranks write in the background: empty until all have written, then with their reports;
removed if one failed.
"""


def tell_written(weights: Path, reports: Sequence[WriteReport]) -> None:
    """Writes the reports of all ranks; without any, or on a full disk, removes the file: the ranks must be asked."""
    try:
        if reports:
            write_atomic(weights / WRITTEN, json.dumps([asdict(report) for report in reports]))
            return
    except OSError as error:
        logger.warning("%s: %s", weights / WRITTEN, error)
    remove_file(weights / WRITTEN)


def read_written(weights: Path) -> list[WriteReport] | None:
    """The reports of all ranks; None while they write, empty if they must be asked."""
    try:
        text = read_file(weights / WRITTEN).decode()
    except FileNotFoundError:
        return []
    parts = json.loads(text) if text else None
    return parts and [
        WriteReport({name: FileRecord(**record) for name, record in part["files"].items()}, part["hidden_s"])
        for part in parts
    ]
