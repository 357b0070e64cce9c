"""Writes Hugging Face weight files, one block after the other: safetensors files with their index."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from conversion.boxes import Box
from conversion.progress import Report, counter
from conversion.storage.file_boxes import BoxSource, content_checksums
from conversion.storage.files import INDEX_FILE, SINGLE_FILE
from conversion.storage.manifest import FileRecord, TensorRecord
from conversion.storage.output_file import OutputFile, write_tensor
from conversion.storage.safetensors_io import DTYPES, SafetensorsFolder
from conversion.tensors import dtype_name

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
    known: Mapping[str, TensorRecord] | None = None,
    progress: Report | None = None,
) -> tuple[dict[str, TensorRecord], dict[str, FileRecord]]:
    """Writes tensors as one file or as shards with an index; checksums of the tensors and of their files.

    Tensors keep their dtypes unless `dtype` names one for all. Those whose CRC-32 is that of their `known` record get the record's sha256
    without the work; where it differs, none, so that the records differ. What an interrupted call has written is kept if it is still right.
    """
    dtypes = {name: dtype or source.dtype(name) for name in names}
    sizes = {name: math.prod(source.shape(name)) * dtypes[name].itemsize for name in names}
    shards = plan_shards(sizes, max_shard_bytes=max_shard_bytes)
    tensors: dict[str, TensorRecord] = {}
    files = {}
    for shard in shards:
        expected = {name: known[name] for name in shard.names if known and name in known and known[name].dtype == dtype_name(dtypes[name])}
        report = progress or counter(None, 0)
        checksums, files[shard.file] = _write_shard(folder / shard.file, shard.names, source, dtypes, expected, report)
        tensors |= {name: TensorRecord(dtype_name(dtypes[name]), source.shape(name), *found) for name, found in checksums.items()}
    if len(shards) > 1:
        weight_map = {name: shard.file for shard in shards for name in shard.names}
        content = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return {name: tensors[name] for name in names}, files


def _write_shard(
    path: Path,
    names: Sequence[str],
    source: BoxSource,
    dtypes: Mapping[str, torch.dtype],
    known: Mapping[str, TensorRecord],
    report: Report,
) -> tuple[dict[str, tuple[str, int]], FileRecord]:
    # Wide elements first keep all of them aligned, as the safetensors library has it.
    names = sorted(names, key=lambda name: -dtypes[name].itemsize)
    header = _header([(name, dtypes[name], source.shape(name)) for name in names])
    with OutputFile(path) as out:
        # The header counts as one item.
        if not out.num_items:
            out.append(header)
            out.end_section()
            out.end_item()
        done, rest = names[: out.num_items - 1], names[out.num_items - 1 :]
        shas, crcs = {name: hashlib.sha256() for name in rest if name not in known}, {}
        for name in rest:

            def fill(box: Box, target: Tensor, name: str = name) -> None:
                source.read_into(name, box, target)

            for num_bytes in write_tensor(out, source.shape(name), dtypes[name], fill, tap=shas.get(name)):
                report(num_bytes)
            crcs[name] = out.end_section()
            out.end_item()
        record = out.close()
    checksums = {name: (sha.hexdigest(), crcs[name]) for name, sha in shas.items()}
    checksums |= {name: (known[name].sha256 if crc32 == known[name].crc32 else "", crc32) for name, crc32 in crcs.items() if name in known}
    with SafetensorsFolder(path) as written:
        for name in done:
            checksums[name] = content_checksums(written, name, dtypes[name])
            report(math.prod(source.shape(name)) * dtypes[name].itemsize, is_kept=True)
    return checksums, record


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
