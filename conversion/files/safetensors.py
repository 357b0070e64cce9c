# SPDX-License-Identifier: Apache-2.0
"""Hugging Face safetensors folders: read box by box, written tensor by tensor, as memory holds no whole file."""

from __future__ import annotations

import json
import math
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor

from conversion.boxes import Box, Layout, Slot, lengths
from conversion.files.experts import of_mxfp4
from conversion.files.hf_folder import (
    DTYPES,
    EMBEDDING,
    INDEX_FILE,
    MXFP4_BLOCK,
    MXFP4_BYTES,
    OUTPUT,
    SINGLE_FILE,
    HeaderTensor,
    scales_of,
    stored_tensors,
    write_json,
)
from conversion.files.manifest import FileChecksums, FileRecord, FinishedFiles, HashedFile, TensorRecord
from conversion.files.reading import open_file
from conversion.progress import Report, counter
from conversion.tensors import (
    BoxSource,
    StoredTensor,
    blocks,
    byte_view,
    dtype_name,
    fill_from,
    read_ahead,
    read_stored,
    torch_dtype,
)

_DTYPE_NAMES = {torch_dtype(dtype): name for name, dtype in DTYPES.items()}


class SafetensorsFolder(AbstractContextManager["SafetensorsFolder"]):
    """The weights of a Hugging Face folder. A context manager: files stay open until it exits. Threads may share it."""

    def __init__(self, folder: Path | str) -> None:
        """Reads the headers of all weight files."""
        self._folder = Path(folder)
        self._lock = threading.Lock()
        self._open_files: dict[Path, int] = {}
        self._tensors = stored_tensors(self._folder)
        # `check_hf` lets no other model pass than one that ties the two.
        if OUTPUT in self._tensors:
            self._tensors.setdefault(EMBEDDING, self._tensors[OUTPUT])

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        for descriptor in self._open_files.values():
            os.close(descriptor)
        self._open_files.clear()

    @property
    def files(self) -> list[Path]:
        return sorted({path for path, _ in self._tensors.values()})

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name)[1].shape

    def dtype(self, name: str) -> torch.dtype:
        """dtype of a tensor as it is stored; a ValueError for one that is not of plain weights."""
        stored = self._find(name)[1].dtype
        if stored not in DTYPES:
            raise ValueError(
                f"{self._folder}: {name} has dtype {stored}; only unquantised weights are supported ({sorted(DTYPES)})"
            )
        return torch_dtype(DTYPES[stored])

    def read_into(self, name: str, box: Box, target: Tensor) -> None:
        """Copies a box of a tensor into `target`, cast to its dtype. Memory holds no more than `target` and a block."""
        (path, found), dtype = self._find(name), self.dtype(name)
        if len(box) != len(found.shape) or any(
            not 0 <= low < high <= size for (low, high), size in zip(box, found.shape, strict=True)
        ):
            raise ValueError(
                f"{self._folder}: {name} has shape {found.shape}, but box {box} of it is needed; the weights do "
                "not fit config.json"
            )
        if found.is_mxfp4:
            self._read_mxfp4(name, box, target)
            return
        shape, file = found.shape, self._descriptor(path)
        if not found.is_transposed:
            read_stored(file, StoredTensor(path, found.offset, dtype, shape), box, target)
            return
        turned = torch.empty(lengths(box[::-1]), dtype=dtype)
        read_stored(file, StoredTensor(path, found.offset, dtype, shape[::-1]), box[::-1], turned)
        target.copy_(turned.t())

    def _read_mxfp4(self, name: str, box: Box, target: Tensor) -> None:
        """Reads whole blocks of 32 numbers, and of them what lies in the box."""
        rows, (low, high) = box
        first, last = low // MXFP4_BLOCK, -(-high // MXFP4_BLOCK)
        parts = {name: (first * MXFP4_BYTES, last * MXFP4_BYTES), scales_of(name): (first, last)}
        found = []
        for part, columns in parts.items():
            path, stored = self._find(part)
            width = stored.shape[1] * MXFP4_BYTES // MXFP4_BLOCK if stored.is_mxfp4 else stored.shape[1]
            held = torch.empty(lengths((rows, columns)), dtype=torch.uint8)
            tensor = StoredTensor(path, stored.offset, torch.uint8, (stored.shape[0], width))
            read_stored(self._descriptor(path), tensor, (rows, columns), held)
            found.append(held)
        start = first * MXFP4_BLOCK
        target.copy_(of_mxfp4(*found)[:, low - start : high - start])

    def _descriptor(self, path: Path) -> int:
        with self._lock:
            if path not in self._open_files:
                self._open_files[path] = open_file(path)
            return self._open_files[path]

    def _find(self, name: str) -> tuple[Path, HeaderTensor]:
        if name not in self._tensors:
            raise ValueError(f"{self._folder}: there is no tensor {name}; the weights do not fit config.json")
        return self._tensors[name]


def fill_layout(folder: Path | str, layout: Layout, tensors: Mapping[Slot, Tensor]) -> None:
    """Fills existing tensors from a Hugging Face folder, in place. Reads only the boxes that the layout names."""
    with SafetensorsFolder(folder) as source:
        for slot, content in layout.items():
            fill_from(tensors[slot], content, source)


def write_safetensors(
    folder: Path,
    source: BoxSource,
    names: Sequence[str],
    *,
    max_shard_bytes: int,
    dtypes: Mapping[str, torch.dtype] = MappingProxyType({}),
    progress: Report | None = None,
) -> tuple[dict[str, TensorRecord], dict[str, FileRecord]]:
    """Writes tensors as one file or as several with an index; checksums of the tensors and of their files.

    Tensors keep their dtypes unless `dtypes` has another. One larger than `max_shard_bytes` gets a file of its own.
    Keeps files that an interrupted call has finished, if they are right. The library's own save_file needs a whole file
    in memory.
    """
    report = progress or counter(None, 0)
    dtypes = {name: dtypes.get(name) or source.dtype(name) for name in names}
    sizes = {name: math.prod(source.shape(name)) * dtypes[name].itemsize for name in names}
    groups: list[list[str]] = [[]]
    num_bytes = 0
    for name, size in sizes.items():
        if groups[-1] and num_bytes + size > max_shard_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(name)
        num_bytes += size
    checksums: dict[str, tuple[str, int]] = {}
    weight_map: dict[str, str] = {}
    with FinishedFiles() as finished:
        for index, group in enumerate(groups):
            file = SINGLE_FILE if len(groups) == 1 else f"model-{index + 1:05d}-of-{len(groups):05d}.safetensors"
            weight_map |= dict.fromkeys(group, file)
            # Wide elements first keep all of them aligned, as the safetensors library has it.
            members = {name: dtypes[name] for name in sorted(group, key=lambda name: -dtypes[name].itemsize)}
            note, is_kept = finished.written(
                folder / file, lambda out, members=members: _write_file(out, members, source, report)
            )
            checksums |= cast("dict[str, tuple[str, int]]", note)
            if is_kept:
                report(sum(sizes[name] for name in members), is_kept=True)
        records = finished.records()
    if len(groups) > 1:
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
    return {
        name: TensorRecord(dtype_name(dtypes[name]), source.shape(name), *checksums[name]) for name in names
    }, records


def _write_file(
    file: HashedFile, dtypes: Mapping[str, torch.dtype], source: BoxSource, report: Report
) -> dict[str, tuple[str, int]]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, dtype in dtypes.items():
        stop = start + math.prod(source.shape(name)) * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(source.shape(name)), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    checksums = {name: FileChecksums() for name in dtypes}

    def read(part: tuple[str, Box], block: Tensor) -> None:
        name, box = part
        source.read_into(name, box, block)
        checksums[name].add(byte_view(block))

    parts = [(name, box) for name, dtype in dtypes.items() for box in blocks(source.shape(name), dtype.itemsize)]
    for block in read_ahead(parts, lambda part: (lengths(part[1]), dtypes[part[0]]), read):
        file.write(byte_view(block))
        report(block.nbytes)
    return {name: checksum.values() for name, checksum in checksums.items()}
