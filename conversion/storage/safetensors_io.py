"""Hugging Face folders of safetensors files, read box by box and without mapping them; `safetensors_out` writes them."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from conversion.boxes import Box, Layout, Slot, lengths
from conversion.storage.file_boxes import StoredTensor, fill_from, read_stored
from conversion.storage.files import INDEX_FILE, SINGLE_FILE, open_file, weights_by_file
from conversion.storage.safetensors_header import Entry, read_header
from conversion.tensors import torch_dtype

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


class SafetensorsFolder:
    """The weights of a Hugging Face folder. A context manager: files stay open until it exits. Threads may share it."""

    def __init__(self, folder: Path | str) -> None:
        """Reads the index or the header of the only file. `folder` may also be a safetensors file.

        Raises:
            ValueError: there are no readable safetensors files.
        """
        self._folder = Path(folder)
        self._lock = threading.Lock()
        self._files: dict[str, _File] = {}
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
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """dtype of a tensor as it is stored.

        Raises:
            ValueError: the dtype is not one of plain weights.
        """
        stored = self._entry(name).dtype
        if stored not in DTYPES:
            raise ValueError(f"{self._folder}: {name} has dtype {stored}; only unquantised weights are supported ({sorted(DTYPES)})")
        return DTYPES[stored]

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a tensor, in its stored dtype. Only the files that it lies in are touched.

        Raises:
            ValueError: there is no such tensor, or the box is out of its bounds.
        """
        tensor = torch.empty(lengths(box), dtype=self.dtype(name))
        self.read_into(name, box, tensor)
        return tensor

    def read_into(self, name: str, box: Box, target: Tensor) -> None:
        """Copies a box of a tensor into `target`, cast to its dtype. Memory holds no more than `target` and a block.

        Raises:
            ValueError: there is no such tensor, or the box is out of its bounds.
        """
        entry, dtype = self._entry(name), self.dtype(name)
        if len(box) != len(entry.shape) or any(not 0 <= low < high <= size for (low, high), size in zip(box, entry.shape, strict=True)):
            raise ValueError(
                f"{self._folder}: {name} has shape {entry.shape}, but box {box} of it is needed; the weights do not fit config.json"
            )
        file = self._file_of[name]
        read_stored(self._files[file].descriptor, StoredTensor(self._folder / file, entry.offset, dtype, entry.shape), box, target)

    def check(self, canonical: Mapping[str, tuple[int, ...]]) -> None:
        """Returns if the folder holds exactly these tensors. Opens every file.

        Raises:
            ValueError: a tensor is missing, has another shape, or is one that nobody asks for, be it only in a file and not in the index.
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
        for file, opened in self._files.items():
            unlisted = {name for name in opened.entries if self._file_of.get(name) != file}
            if unlisted:
                raise ValueError(f"{self._folder / file} holds tensors that {INDEX_FILE} does not place there: {_listed(unlisted)}")

    def _find_files(self) -> dict[str, str]:
        if self._folder.is_file():
            file, self._folder = self._folder.name, self._folder.parent
            return dict.fromkeys(self._open(file), file)
        if (self._folder / INDEX_FILE).exists():
            return weights_by_file(self._folder)
        return dict.fromkeys(self._open(SINGLE_FILE), SINGLE_FILE)

    def _open(self, file: str) -> set[str]:
        """Reads the header of a file; names of its tensors."""
        path = self._folder / file
        descriptor = open_file(path)
        try:
            entries = read_header(descriptor, path)
        except ValueError:
            os.close(descriptor)
            raise
        self._files[file] = _File(descriptor, entries)
        return set(entries)

    def _close(self) -> None:
        for file in self._files.values():
            os.close(file.descriptor)
        self._files.clear()

    def _entry(self, name: str) -> Entry:
        if name not in self._file_of:
            raise ValueError(f"{self._folder}: there is no tensor {name}; the weights do not fit config.json")
        file = self._file_of[name]
        try:
            with self._lock:
                if file not in self._files:
                    self._open(file)
            return self._files[file].entries[name]
        except (FileNotFoundError, ValueError, KeyError) as error:
            raise ValueError(f"{self._folder / file}: {name} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class _File:
    descriptor: int
    entries: dict[str, Entry]


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


def _listed(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:6])
    return f"{shown} and {len(names) - 6} more" if len(names) > 6 else shown or "none"
