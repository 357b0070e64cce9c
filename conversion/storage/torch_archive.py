"""The files of torch.save with one tensor inside: where its bytes lie, and what stands around them, so that they can be streamed.

The format is a zip archive without compression: `archive/data.pkl` describes the tensor, `archive/data/0` is its content.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import IO

import torch
from torch._utils import _rebuild_tensor_v2

from conversion.storage.pickles import STORAGE_CLASSES, TENSOR_NAMES, PlainTensor, unpickle

MAX_TENSOR_BYTES = 1 << 30
"""Larger ones would need the 64-bit form of zip; who writes cuts them instead."""

ALIGNMENT = 64
"""Of the content from the start of the archive, as torch.save has it."""

_HAS_DESCRIPTOR = 1 << 3


class _Storage:
    """Stands for the storage of the tensor that is described."""

    def __init__(self, dtype: torch.dtype, num_elements: int) -> None:
        self.dtype, self.num_elements = dtype, num_elements


class _Tensor:
    """Stands for the tensor that is described."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape

    def __reduce__(self) -> tuple[object, ...]:
        strides = tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))
        storage = _Storage(self.dtype, math.prod(self.shape))
        return _rebuild_tensor_v2, (storage, 0, self.shape, strides, False, OrderedDict())


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> tuple[object, ...] | None:
        if isinstance(obj, _Storage):
            return "storage", STORAGE_CLASSES[obj.dtype], "0", "cpu", obj.num_elements
        return None


@dataclass(frozen=True)
class Archive:
    """What stands before and after the content of a tensor."""

    before: bytes
    num_bytes: int
    _entries: tuple[tuple[bytes, int, int, int], ...]
    """(name, crc32, size, offset) of the other records."""
    _data_offset: int

    @classmethod
    def of(cls, dtype: torch.dtype, shape: Sequence[int]) -> Archive:
        """The archive of a row-major tensor of at most MAX_TENSOR_BYTES."""
        num_bytes = math.prod(shape) * dtype.itemsize
        assert num_bytes <= MAX_TENSOR_BYTES
        description = io.BytesIO()
        _Pickler(description, protocol=2).dump(_Tensor(dtype, tuple(shape)))
        records = {
            "data.pkl": description.getvalue(),
            "byteorder": b"little",
            "version": b"3\n",
            ".format_version": b"1",
            ".storage_alignment": b"64",
        }
        before, entries = bytearray(), []
        for name, content in records.items():
            key, crc32 = b"archive/" + name.encode(), zlib.crc32(content)
            entries.append((key, crc32, len(content), len(before)))
            before += _local_header(key, len(before), crc32=crc32, size=len(content)) + content
        offset = len(before)
        before += _local_header(_DATA, offset, crc32=0, size=0, flags=_HAS_DESCRIPTOR)
        return cls(bytes(before), num_bytes, tuple(entries), offset)

    def after(self, crc32: int) -> bytes:
        """What follows a content of this CRC-32."""
        start = len(self.before) + self.num_bytes
        tail = bytearray(struct.pack("<4sIII", b"PK\x07\x08", crc32, self.num_bytes, self.num_bytes))
        directory = start + len(tail)
        for name, check, size, offset in (*self._entries, (_DATA, crc32, self.num_bytes, self._data_offset)):
            flags = _HAS_DESCRIPTOR if name == _DATA else 0
            tail += (
                struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 0, 0, flags, 0, 0, 0, check, size, size, len(name), 0, 0, 0, 0, 0, offset) + name
            )
        count = len(self._entries) + 1
        return bytes(tail + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, start + len(tail) - directory, directory, 0))

    def size(self) -> int:
        """Bytes of the whole archive."""
        return len(self.before) + self.num_bytes + len(self.after(0))


@lru_cache(maxsize=1024)
def archive_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Archive:
    """`Archive.of`, remembered: all experts of a model look the same."""
    return Archive.of(dtype, shape)


_DATA = b"archive/data/0"


def _local_header(name: bytes, offset: int, *, crc32: int, size: int, flags: int = 0) -> bytes:
    """A local header, padded in its extra field so that the content is aligned."""
    end = offset + 30 + len(name) + 4
    padding = b"FB" + struct.pack("<H", -end % ALIGNMENT) + b"Z" * (-end % ALIGNMENT)
    return struct.pack("<4s5H3I2H", b"PK\x03\x04", 0, flags, 0, 0, 0, crc32, size, size, len(name), len(padding)) + name + padding


@dataclass(frozen=True, slots=True)
class Content:
    """Where the content of an archive's tensor lies, from the start of the archive."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def find_content(file: IO[bytes], what: str) -> Content | None:
    """Where the tensor of an archive lies, or None where it is not a row-major tensor by itself, so that torch must load it.

    Raises:
        ValueError: the archive is damaged.
        RefusedPickle: its pickle asks for anything but a tensor's parts.
    """
    try:
        archive = zipfile.ZipFile(file)
        records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        described = unpickle(archive.read(records["data.pkl"]), TENSOR_NAMES, what)
        order = archive.read(records["byteorder"]) if "byteorder" in records else b"little"
        if not isinstance(described, PlainTensor) or order != b"little":
            return None
        dtype, key, offset, shape, strides = described
        data = records[f"data/{key}"]
        is_whole = data.compress_type == zipfile.ZIP_STORED and data.file_size == math.prod(shape) * dtype.itemsize and not offset
        expected = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        if not is_whole or any(size > 1 and a != b for size, a, b in zip(shape, strides, expected, strict=True)):
            return None
        file.seek(data.header_offset)
        header = file.read(30)
        if len(header) < 30 or header[:4] != b"PK\x03\x04":
            raise ValueError("no header before the content")
        content = Content(data.header_offset + 30 + sum(struct.unpack("<2H", header[26:30])), dtype, shape)
        if content.offset + data.file_size > file.seek(0, io.SEEK_END):
            raise ValueError("the content ends behind the archive")
        return content
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError, struct.error) as error:
        raise ValueError(f"{what} is damaged: {error!r}") from error


def check_archive(file: IO[bytes], what: str) -> None:
    """Returns if every record of an archive has its CRC-32. Reads all of it once.

    Raises:
        ValueError: the archive is damaged.
    """
    try:
        damaged = zipfile.ZipFile(file).testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError, struct.error) as error:
        raise ValueError(f"{what} is damaged: {error!r}") from error
    if damaged is not None:
        raise ValueError(f"{what} is damaged: {damaged} does not have its CRC-32")
