"""Hugging Face folders of safetensors files: boxes are read lazily out of shards; shards are written with their index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from conversion.boxes import Box, Layout, Slot
from conversion.files import INDEX_FILE, SINGLE_FILE
from conversion.tensors import fill, torch_dtype

_DTYPES = {
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
    """The weights of a Hugging Face folder. A context manager: files stay mapped until it exits."""

    def __init__(self, folder: Path | str) -> None:
        """Reads the index or the header of the only file.

        Raises:
            ValueError: there are no readable safetensors files.
        """
        self._folder = Path(folder)
        self._stack = ExitStack()
        self._files: dict[str, safe_open] = {}
        try:
            self._file_of = self._find_files()
        except (OSError, SafetensorError, json.JSONDecodeError, KeyError) as error:
            raise ValueError(f"{self._folder}: no readable {INDEX_FILE} or {SINGLE_FILE} ({error}); name a Hugging Face folder") from error

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._files.clear()
        self._stack.close()

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """dtype of a tensor as it is stored.

        Raises:
            ValueError: the dtype is not one of plain weights.
        """
        stored = self._slice(name).get_dtype()
        if stored not in _DTYPES:
            raise ValueError(f"{self._folder}: {name} has dtype {stored}; only unquantised weights are supported ({sorted(_DTYPES)})")
        return _DTYPES[stored]

    def read(self, name: str, box: Box) -> Tensor:
        """A box of a tensor, in its stored dtype. Only the files that it lies in are touched.

        Raises:
            ValueError: there is no such tensor, or the box is out of its bounds.
        """
        shape = self.shape(name)
        if len(box) != len(shape) or any(not 0 <= start < stop <= size for (start, stop), size in zip(box, shape, strict=True)):
            raise ValueError(f"{self._folder}: {name} has shape {shape}, but box {box} of it is needed; the weights do not fit config.json")
        return self._slice(name)[tuple(slice(start, stop) for start, stop in box)]

    def check(self, canonical: Mapping[str, tuple[int, ...]]) -> None:
        """Returns if the folder holds exactly these tensors.

        Raises:
            ValueError: a tensor is missing, has another shape, or is one that nobody asks for.
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

    def _find_files(self) -> dict[str, str]:
        index = self._folder / INDEX_FILE
        if index.exists():
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        return dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)

    def _open(self, file: str) -> safe_open:
        if file not in self._files:
            self._files[file] = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
        return self._files[file]

    def _slice(self, name: str):  # noqa: ANN202  (safetensors' PySafeSlice cannot be imported)
        if name not in self._file_of:
            raise ValueError(f"{self._folder}: there is no tensor {name}; the weights do not fit config.json")
        try:
            return self._open(self._file_of[name]).get_slice(name)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self._folder / self._file_of[name]}: {name} cannot be read: {error}") from error


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
            fill(tensors[slot], content, source.read)


def write_safetensors(folder: Path, tensors: Iterable[tuple[str, Tensor]], *, max_shard_bytes: int) -> None:
    """Writes tensors, in their order, as one file or as shards with an index. Holds one shard in memory at a time.

    A tensor that is larger than `max_shard_bytes` gets a shard of its own.
    """
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    num_bytes = total_bytes = 0
    for name, tensor in tensors:
        if shard and num_bytes + tensor.nbytes > max_shard_bytes:
            shards.append(_write_shard(folder, len(shards), shard))
            shard, num_bytes = {}, 0
        shard[name] = tensor.contiguous()
        num_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    shards.append(_write_shard(folder, len(shards), shard))
    if len(shards) == 1:
        _part(folder, 0).rename(folder / SINGLE_FILE)
        return
    weight_map = {}
    for index, names in enumerate(shards):
        # The number of shards, which is part of every name, is known only now.
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        _part(folder, index).rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    content = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _part(folder: Path, index: int) -> Path:
    return folder / f"part-{index:05d}.safetensors"


def _write_shard(folder: Path, index: int, shard: dict[str, Tensor]) -> list[str]:
    # transformers refuses files without this entry.
    path = _part(folder, index)
    save_file(shard, path, metadata={"format": "pt"})
    # safetensors makes files that only their owner can read.
    path.chmod(0o644)
    return list(shard)


def _listed(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:6])
    return f"{shown} and {len(names) - 6} more" if len(names) > 6 else shown or "none"
