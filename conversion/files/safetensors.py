"""Hugging Face folders of safetensors files: read box by box, written tensor by tensor, as memory holds no whole file."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import cast

import torch
from isal import isal_zlib
from torch import Tensor

from conversion.boxes import Box, Layout, Slot
from conversion.files.durable import IO_TIMEOUT_S
from conversion.files.hashed_files import FinishedFiles, HashedFile
from conversion.files.hf_folder import INDEX_FILE, SINGLE_FILE, HeaderTensor, read_header, weights_by_file, write_json
from conversion.files.manifest import FileRecord, TensorRecord
from conversion.files.reading import open_file
from conversion.progress import Report, counter
from conversion.tensors import BoxSource, StoredTensor, byte_view, dtype_name, fill_from, read_stored, read_whole, torch_dtype

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Checksums = tuple[str, int]
"""sha256 and CRC-32 of a tensor's content, row by row, little-endian."""


class SafetensorsFolder:
    """The weights of a Hugging Face folder. A context manager: files stay open until it exits. Threads may share it."""

    def __init__(self, folder: Path | str) -> None:
        """Reads the index or the header of the only file. `folder` may also be a safetensors file.

        Raises:
            ValueError: there are no readable safetensors files.
        """
        self._folder = Path(folder)
        self._lock = threading.Lock()
        self._open_files: dict[str, tuple[int, dict[str, HeaderTensor]]] = {}
        try:
            self._file_of = self._find_files()
        except (OSError, ValueError) as error:
            self._close()
            raise ValueError(f"{self._folder}: no readable {INDEX_FILE} or {SINGLE_FILE} ({error}); name a Hugging Face folder") from error

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._close()

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file_of)

    @property
    def files(self) -> list[Path]:
        """The weight files."""
        return [self._folder / file for file in sorted(set(self._file_of.values()))]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._find(name)[1].shape

    def dtype(self, name: str) -> torch.dtype:
        """dtype of a tensor as it is stored.

        Raises:
            ValueError: the dtype is not one of plain weights.
        """
        stored = self._find(name)[1].dtype
        if stored not in DTYPES:
            raise ValueError(f"{self._folder}: {name} has dtype {stored}; only unquantised weights are supported ({sorted(DTYPES)})")
        return DTYPES[stored]

    def read_into(self, name: str, box: Box, target: Tensor) -> None:
        """Copies a box of a tensor into `target`, cast to its dtype. Memory holds no more than `target` and a block.

        Raises:
            ValueError: there is no such tensor, or the box is out of its bounds.
        """
        (descriptor, found), dtype = self._find(name), self.dtype(name)
        if len(box) != len(found.shape) or any(not 0 <= low < high <= size for (low, high), size in zip(box, found.shape, strict=True)):
            raise ValueError(
                f"{self._folder}: {name} has shape {found.shape}, but box {box} of it is needed; the weights do not fit config.json"
            )
        read_stored(descriptor, StoredTensor(self._folder / self._file_of[name], found.offset, dtype, found.shape), box, target)

    def check(self, canonical: Mapping[str, tuple[int, ...]]) -> None:
        """Returns if the folder holds exactly these tensors. Opens every file.

        Raises:
            ValueError: a tensor is missing, has another shape, or is unknown, be it only in a file and not in the index.
        """
        missing, unknown = canonical.keys() - self.names, self.names - canonical.keys()
        if missing or unknown:
            raise ValueError(
                f"{self._folder}: the weights do not fit config.json; missing: {_listed(missing)}; "
                f"unknown to this model_type: {_listed(unknown)}"
            )
        for name, shape in canonical.items():
            if self.shape(name) != shape:
                raise ValueError(f"{self._folder}: {name} has shape {self.shape(name)}; by config.json it must be {shape}")
        # All files are open by now: the index names none without a tensor.
        for file, (_, tensors) in self._open_files.items():
            unlisted = {name for name in tensors if self._file_of.get(name) != file}
            if unlisted:
                raise ValueError(f"{self._folder / file} holds tensors that {INDEX_FILE} does not place there: {_listed(unlisted)}")

    def _find_files(self) -> dict[str, str]:
        """The file of each tensor."""
        if self._folder.is_file():
            file, self._folder = self._folder.name, self._folder.parent
        elif (self._folder / INDEX_FILE).exists():
            return weights_by_file(self._folder)
        else:
            file = SINGLE_FILE
        return dict.fromkeys(self._open(file)[1], file)

    def _open(self, file: str) -> tuple[int, dict[str, HeaderTensor]]:
        """Descriptor and header of a file."""
        with self._lock:
            if file not in self._open_files:
                descriptor = open_file(self._folder / file)
                try:
                    self._open_files[file] = descriptor, read_header(descriptor, self._folder / file)
                except ValueError:
                    os.close(descriptor)
                    raise
            return self._open_files[file]

    def _close(self) -> None:
        for descriptor, _ in self._open_files.values():
            os.close(descriptor)
        self._open_files.clear()

    def _find(self, name: str) -> tuple[int, HeaderTensor]:
        """Descriptor of the file of a tensor, and where the tensor lies in it."""
        if name not in self._file_of:
            raise ValueError(f"{self._folder}: there is no tensor {name}; the weights do not fit config.json")
        file = self._file_of[name]
        try:
            descriptor, tensors = self._open(file)
            return descriptor, tensors[name]
        except (FileNotFoundError, ValueError, KeyError) as error:
            raise ValueError(f"{self._folder / file}: {name} cannot be read: {error}") from error


def read_layout(folder: Path | str, layout: Layout) -> dict[Slot, Tensor]:
    """New tensors of every slot of a layout, filled from a Hugging Face folder.

    Raises:
        ValueError: the folder lacks a tensor, or has it in another shape.
    """
    tensors = {slot: torch.empty(content.shape, dtype=torch_dtype(content.dtype)) for slot, content in layout.items()}
    fill_layout(folder, layout, tensors)
    return tensors


def fill_layout(folder: Path | str, layout: Layout, tensors: Mapping[Slot, Tensor]) -> None:
    """Fills existing tensors from a Hugging Face folder, in place. Reads only the boxes that the layout names.

    Raises:
        ValueError: the folder lacks a tensor, or has it in another shape.
    """
    with SafetensorsFolder(folder) as source:
        for slot, content in layout.items():
            fill_from(tensors[slot], content, source)


def plan_files(sizes: Mapping[str, int], *, max_shard_bytes: int) -> dict[str, list[str]]:
    """Names of the tensors of each file, for tensors of these sizes in bytes, in their order; files are named as transformers does.

    A tensor larger than `max_shard_bytes` gets a file of its own.
    """
    groups: list[list[str]] = [[]]
    num_bytes = 0
    for name, size in sizes.items():
        if groups[-1] and num_bytes + size > max_shard_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(name)
        num_bytes += size
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{index + 1:05d}-of-{len(groups):05d}.safetensors": names for index, names in enumerate(groups)}


def write_safetensors(
    folder: Path,
    source: BoxSource,
    names: Sequence[str],
    *,
    max_shard_bytes: int,
    dtype: torch.dtype | None = None,
    progress: Report | None = None,
) -> tuple[dict[str, TensorRecord], dict[str, FileRecord]]:
    """Writes tensors as one file or as several with an index; checksums of the tensors and of their files.

    Tensors keep their dtypes unless `dtype` names one for all. Keeps files that an interrupted call has finished, if they are right. The
    library's own save_file needs a whole file in memory.
    """
    dtypes = {name: dtype or source.dtype(name) for name in names}
    sizes = {name: math.prod(source.shape(name)) * dtypes[name].itemsize for name in names}
    files, report = plan_files(sizes, max_shard_bytes=max_shard_bytes), progress or counter(None, 0)
    checksums: dict[str, Checksums] = {}
    with FinishedFiles() as finished:
        for file, members in files.items():
            # Wide elements first keep all of them aligned, as the safetensors library has it.
            members = sorted(members, key=lambda name: -dtypes[name].itemsize)
            note, is_kept = finished.written(folder / file, lambda out, members=members: _write_file(out, members, source, dtypes, report))
            checksums |= cast("dict[str, Checksums]", note)
            if is_kept:
                report(sum(sizes[name] for name in members), is_kept=True)
        records = finished.records()
    if len(files) > 1:
        weight_map = {name: file for file, members in files.items() for name in members}
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
    return {name: TensorRecord(dtype_name(dtypes[name]), source.shape(name), *checksums[name]) for name in names}, records


def _write_file(
    file: HashedFile, names: Sequence[str], source: BoxSource, dtypes: Mapping[str, torch.dtype], report: Report
) -> dict[str, Checksums]:
    checksums: dict[str, Future[Checksums]] = {}
    file.write(_header([(name, dtypes[name], source.shape(name)) for name in names]))
    with ThreadPoolExecutor(1) as hasher:
        for before, name in zip([None, *names], names, strict=False):
            tensor = read_whole(source, name, dtypes[name])
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


def _listed(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:6])
    return f"{shown} and {len(names) - 6} more" if len(names) > 6 else shown or "none"
