# SPDX-License-Identifier: Apache-2.0
"""The `.metadata` of a torch_dist checkpoint: its tensors, and the file of each chunk. Runs no code of its pickle."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

import torch

from conversion.boxes import Box
from conversion.files.hf_folder import MAX_DIMENSIONS
from conversion.files.reading import read_file

METADATA_FILE = ".metadata"
MAX_METADATA_BYTES = 1 << 30
"""Ten times what a model of a trillion parameters on thousands of ranks has."""

_CLASSES = {
    "torch.distributed.checkpoint.metadata": (
        *(
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
        ),
        *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    # Megatron's own saves keep all ranks' plans, which no load here looks at.
    "torch.distributed.checkpoint.planner": (
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
}
# Immutable types of plain values: nothing that a pickle does to them outlives it.
_VALUES: Mapping[tuple[str, str], object] = {
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
    **{("builtins", kind.__name__): kind for kind in (set, frozenset, list, dict, tuple, int, float, str, bool)},
    **{
        ("torch", str(value).removeprefix("torch.")): value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype)
    },
}


class RefusedPickle(ValueError):
    """A pickle names something that checkpoints of weights do not need."""


class PickledRecord:
    """An object of a pickled class, without its methods. Each pickle gets subclasses of its own, which end with it."""

    def __init__(self, *arguments: object) -> None:
        self.state: object = arguments

    def __setstate__(self, state: object) -> None:
        self.state = state
        if isinstance(state, dict):
            vars(self).update(state)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, what: str) -> None:
        super().__init__(io.BytesIO(data))
        self._what = what
        self._records = {
            (module, name): type(name, (PickledRecord,), {}) for module, names in _CLASSES.items() for name in names
        }

    def find_class(self, module: str, name: str) -> object:
        key = "builtins" if module == "__builtin__" else module, name
        found = self._records.get(key) or _VALUES.get(key)
        if found is None:
            raise RefusedPickle(
                f"{self._what} is a pickle that asks for {key[0]}.{name}, which checkpoints of weights do not need "
                "and which could run anything; it is not read. Save the checkpoint again in Megatron's torch_dist "
                "format"
            )
        return found


def unpickle(data: bytes, what: str) -> object:
    """The object of a pickle, in which torch's classes are `PickledRecord`s; `what` names the pickle in messages."""
    try:
        return _Unpickler(data, what).load()
    except RefusedPickle:
        raise
    # A damaged pickle can make its types raise anything.
    except Exception as error:
        raise ValueError(f"{what} is damaged: {error!r}") from error


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """Part of a global tensor, as one rank wrote it: its box, its file, and where its archive lies there."""

    box: Box
    file: str
    offset: int
    length: int


class CheckpointMetadata:
    """Tensors of a torch_dist checkpoint by key, from its metadata."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / METADATA_FILE
        problem = f"{folder} is not a Megatron torch_dist checkpoint"
        try:
            content = unpickle(read_file(self._path, MAX_METADATA_BYTES), str(self._path))
        except RefusedPickle:
            raise
        except (OSError, ValueError) as error:
            raise ValueError(f"{problem}, or not a complete one: {error}; name a complete weights folder") from error
        entries, places = (getattr(content, name, None) for name in ("state_dict_metadata", "storage_data"))
        if not isinstance(entries, dict) or not isinstance(places, dict):
            raise ValueError(
                f"{problem}: {METADATA_FILE} holds a {type(content).__name__} without tables; restore the checkpoint"
            )
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Global shapes of all tensors by key, optimizer state included."""
        self.dtypes: dict[str, torch.dtype] = {}
        self._chunks: dict[str, list[object]] = {}
        for key, entry in entries.items():
            if type(entry).__name__ == "TensorStorageMetadata":
                properties, size, chunks = (getattr(entry, name, None) for name in ("properties", "size", "chunks"))
                # torch's TensorProperties are a tuple whose first value is the dtype.
                state = getattr(properties, "state", None)
                dtype = state[0] if isinstance(state, tuple) and state else None
                is_sound = isinstance(key, str) and isinstance(size, torch.Size) and len(size) <= MAX_DIMENSIONS
                if not (
                    is_sound and isinstance(dtype, torch.dtype) and isinstance(size, tuple) and isinstance(chunks, list)
                ):
                    raise ValueError(f"{problem}: {METADATA_FILE} describes no tensors; restore the checkpoint")
                self.shapes[key], self.dtypes[key], self._chunks[key] = tuple(size), dtype, chunks
        self._places = {
            (getattr(index, "fqn", None), _plain(getattr(index, "offset", None))): info
            for index, info in places.items()
        }

    def chunks(self, key: str) -> list[StoredChunk]:
        """The chunks of a tensor, sorted by box; ValueError if they are described wrongly or lie outside the folder."""
        return sorted((self._chunk(key, chunk) for chunk in self._chunks[key]), key=lambda chunk: chunk.box)

    def _chunk(self, key: str, chunk: object) -> StoredChunk:
        offsets, sizes = (_plain(getattr(chunk, name, None)) for name in ("offsets", "sizes"))
        info = self._places.get((key, offsets))
        path, offset, length = (getattr(info, name, None) for name in ("relative_path", "offset", "length"))
        if not isinstance(path, str):
            raise ValueError(
                f"{self._path} does not say where the chunk of {key} at {offsets} is stored; restore the checkpoint"
            )
        if PurePath(path).is_absolute() or ".." in PurePath(path).parts:
            raise ValueError(f"{self._path} places {key} in {path}, outside of the folder; it is not read")
        if getattr(info, "transform_descriptors", None):
            raise ValueError(
                f"{self._path}: {key} is stored through {vars(info)['transform_descriptors']}; save it without "
                "extensions"
            )
        numbers = (offset, length, *(offsets or ()), *(sizes or ()))
        is_sound = offsets is not None and sizes is not None and len(offsets) == len(sizes)
        if not is_sound or not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise ValueError(f"{self._path} places {key} at offsets that are no numbers; it is not read")
        assert isinstance(offset, int) and isinstance(length, int) and offsets is not None and sizes is not None
        return StoredChunk(
            tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True)), path, offset, length
        )


def _plain(size: object) -> tuple[int, ...] | None:
    return tuple(size) if isinstance(size, tuple) else None
