"""The files of torch.save with one tensor inside: where its bytes lie, so that parts of them can be read.

The format is a zip archive without compression: `archive/data.pkl` describes the tensor, `archive/data/0` is its content.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
from dataclasses import dataclass
from typing import IO

import torch

from conversion.storage.pickles import TENSOR_NAMES, PlainTensor, unpickle


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
