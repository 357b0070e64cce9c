"""The header of a safetensors file: where each tensor lies. Needs the standard library only."""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""

MAX_DIMENSIONS = 64
"""More than torch has."""
ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1}
"""Bytes of an element of each dtype of plain weights, by its name in a header."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file; `offset` is that of its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_header(file: int, path: Path) -> dict[str, Entry]:
    """Where each tensor of an open file lies: 8 bytes with the length of a JSON header, the header, the data.

    Raises:
        ValueError: it is no safetensors file, or the data do not fit the header.
    """
    size = os.fstat(file).st_size
    prefix = os.pread(file, 8, 0)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"{path} is no safetensors file, or an incomplete one")
    try:
        entries, end = _entries(json.loads(os.pread(file, length, 8)), 8 + length, path)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} has a damaged header: {str(error)[:200]!r}; download the file again") from error
    if end != size:
        raise ValueError(f"{path} has {size} bytes instead of {end}: it is incomplete or damaged")
    return entries


def _entries(header: dict[str, dict], data: int, path: Path) -> tuple[dict[str, Entry], int]:
    """The tensors of a header whose data begin at byte `data`, and where they end."""
    entries, end = {}, 0
    spans = {name: entry for name, entry in header.items() if name != "__metadata__"}
    for name, entry in sorted(spans.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        if len(entry["shape"]) > MAX_DIMENSIONS:
            raise ValueError(f"{path}: {name[:200]} has {len(entry['shape'])} dimensions; download the file again")
        shape = tuple(entry["shape"])
        if not all(isinstance(length, int) and length >= 0 for length in (start, stop, *shape)):
            raise ValueError(f"{path}: {name[:200]} has a shape or place that is no number; download the file again")
        itemsize = ITEM_BYTES.get(entry["dtype"])
        if start != end or (itemsize and stop - start != itemsize * math.prod(shape)):
            raise ValueError(f"{path}: {name} has {stop - start} bytes at {start}, which does not fit its header")
        entries[name] = Entry(entry["dtype"], shape, data + start)
        end = stop
    return entries, data + end
