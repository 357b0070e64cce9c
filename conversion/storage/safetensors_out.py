"""Writes Hugging Face weight files, one tensor after the other: safetensors files with their index.

The library's own save_file needs a whole file in memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from isal import isal_zlib
from torch import Tensor

from conversion.boxes import full
from conversion.progress import Report, counter
from conversion.storage.file_boxes import BoxSource, byte_view
from conversion.storage.files import INDEX_FILE, IO_TIMEOUT_S, SINGLE_FILE
from conversion.storage.finished_files import FinishedFiles
from conversion.storage.manifest import FileRecord, TensorRecord
from conversion.storage.safetensors_io import DTYPES
from conversion.tensors import dtype_name

Checksums = tuple[str, int]
"""sha256 and CRC-32 of a tensor's content, row by row, little-endian."""

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Shard:
    """A file, and the tensors in it."""

    file: str
    names: tuple[str, ...]


def plan_shards(sizes: Mapping[str, int], *, max_shard_bytes: int) -> list[Shard]:
    """The files for tensors of these sizes in bytes, in their order, named as transformers does.

    A tensor that is larger than `max_shard_bytes` gets a file of its own.
    """
    shards: list[list[str]] = [[]]
    num_bytes = 0
    for name, size in sizes.items():
        if shards[-1] and num_bytes + size > max_shard_bytes:
            shards.append([])
            num_bytes = 0
        shards[-1].append(name)
        num_bytes += size
    if len(shards) == 1:
        return [Shard(SINGLE_FILE, tuple(shards[0]))]
    return [Shard(f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors", tuple(names)) for index, names in enumerate(shards)]


def write_safetensors(
    folder: Path,
    source: BoxSource,
    names: Sequence[str],
    *,
    max_shard_bytes: int,
    dtype: torch.dtype | None = None,
    progress: Report | None = None,
) -> tuple[dict[str, TensorRecord], dict[str, FileRecord]]:
    """Writes tensors as one file or as shards with an index; checksums of the tensors and of their files.

    Tensors keep their dtypes unless `dtype` names one for all. Files that an interrupted call has finished are kept if they are right.
    """
    dtypes = {name: dtype or source.dtype(name) for name in names}
    sizes = {name: math.prod(source.shape(name)) * dtypes[name].itemsize for name in names}
    shards, report = plan_shards(sizes, max_shard_bytes=max_shard_bytes), progress or counter(None, 0)
    checksums: dict[str, Checksums] = {}
    with FinishedFiles() as finished:
        for shard in shards:
            path = folder / shard.file
            found = cast("dict[str, Checksums] | None", finished.kept(path))
            if found is None:
                found = _write_shard(path, shard.names, source, dtypes, report)
                finished.finish(path, found)
            else:
                report(sum(sizes[name] for name in shard.names), is_kept=True)
            checksums |= found
        files = finished.records()
    if len(shards) > 1:
        weight_map = {name: shard.file for shard in shards for name in shard.names}
        content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return {name: TensorRecord(dtype_name(dtypes[name]), source.shape(name), *checksums[name]) for name in names}, files


def _write_shard(
    path: Path, names: Sequence[str], source: BoxSource, dtypes: Mapping[str, torch.dtype], report: Report
) -> dict[str, Checksums]:
    # Wide elements first keep all of them aligned, as the safetensors library has it.
    names = sorted(names, key=lambda name: -dtypes[name].itemsize)
    checksums: dict[str, Future[Checksums]] = {}
    with path.open("wb") as file, ThreadPoolExecutor(1) as hasher:
        file.write(_header([(name, dtypes[name], source.shape(name)) for name in names]))
        for before, name in zip([None, *names], names, strict=False):
            tensor = torch.empty(source.shape(name), dtype=dtypes[name])
            source.read_into(name, full(tensor.shape), tensor)
            if before is not None:
                # At most two tensors are in memory.
                checksums[before].result(IO_TIMEOUT_S)
            checksums[name] = hasher.submit(_checksums, tensor)
            file.write(byte_view(tensor))
            report(tensor.nbytes)
    return {name: future.result(IO_TIMEOUT_S) for name, future in checksums.items()}


def _checksums(tensor: Tensor) -> Checksums:
    content = byte_view(tensor)
    return hashlib.sha256(content).hexdigest(), isal_zlib.crc32(content)


def _header(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> bytes:
    # transformers refuses files without the metadata.
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, dtype, shape in tensors:
        stop = start + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
