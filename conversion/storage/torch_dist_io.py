"""Megatron's torch_dist checkpoints, read box by box in one process without Megatron; `torch_dist_out` writes them."""

from __future__ import annotations

import io
import os
import pickle
import re
import weakref
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import IO

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from conversion.boxes import Box, Layout, Piece, Slot, full, lengths, place, tiling_fault
from conversion.storage.file_boxes import StoredTensor, overlap, read_stored
from conversion.storage.files import open_file, read_file
from conversion.storage.pickles import METADATA_NAMES, RefusedPickle, unpickle
from conversion.storage.safetensors_header import MAX_DIMENSIONS
from conversion.storage.torch_archive import check_archive, find_content
from conversion.tensors import box_view

EMBEDDING_KEY = "embedding.word_embeddings.weight"
METADATA_FILE = ".metadata"
MAX_METADATA_BYTES = 1 << 30
"""Ten times what a model of a trillion parameters on thousands of ranks has."""
MAX_OPEN_FILES = 256
"""Far below what a process may have, and what a checkpoint of many ranks has."""

# Training state, under the names of Megatron's trainers and ours. What has another name is a weight, and must have a place.
_NO_WEIGHT = re.compile(
    r"(chained_\d+\.)?(optimizer|optimizer_state_dict|grad_scaler|opt_param_scheduler|rng|rng_state|rerun_state_machine)\b"
)
_GROUPED_MLP_KEYS = (".experts.weight1", ".experts.weight2")


def read_metadata(folder: Path) -> Metadata:
    """The metadata of a torch_dist checkpoint. It is a pickle, from which only plain data are taken.

    Raises:
        RefusedPickle: it asks for more than that.
        ValueError: there is none, or it is damaged.
    """
    path = folder / METADATA_FILE
    try:
        metadata = unpickle(read_file(path, MAX_METADATA_BYTES), METADATA_NAMES, str(path))
    except RefusedPickle:
        raise
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} is not a Megatron torch_dist checkpoint, or not a complete one: {error}; name a complete weights folder"
        ) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ValueError(f"{folder} is not a Megatron torch_dist checkpoint: {path.name} holds a {type(metadata).__name__}")
    entries = metadata.state_dict_metadata
    if not isinstance(entries, dict) or not all(map(_is_sound, entries.items())):
        raise ValueError(f"{folder} is not a Megatron torch_dist checkpoint: {path.name} describes no tensors; restore the checkpoint")
    return metadata


def _is_sound(entry: tuple[object, object]) -> bool:
    """Whether a pickle, which can give any attribute any value, describes a tensor as torch does; other objects are not looked at."""
    key, content = entry
    if not isinstance(content, TensorStorageMetadata):
        return True
    dtype = getattr(content.properties, "dtype", None)
    has_shape = isinstance(content.size, torch.Size) and len(content.size) <= MAX_DIMENSIONS
    return isinstance(key, str) and has_shape and isinstance(dtype, torch.dtype) and isinstance(content.chunks, list)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Part of a global tensor, as one rank wrote it."""

    box: Box
    file: str
    offset: int
    length: int


class TorchDistFolder:
    """The tensors of a torch_dist checkpoint (an iter_ folder), by key. Not for several threads at once."""

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        """Reads the metadata. With `verify`, each chunk is held against the checksums in its archive before it is first read.

        Raises:
            ValueError: it is not a complete torch_dist checkpoint.
        """
        self.folder = folder
        self._metadata = read_metadata(folder)
        entries = self._metadata.state_dict_metadata.items()
        self._tensors = {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}
        self._chunks: dict[str, tuple[list[_Chunk], list[int], int]] = {}
        self._stored: dict[_Chunk, StoredTensor | None] = {}
        self._files: dict[str, int] = {}
        self._verify = verify
        self._loaded: tuple[_Chunk, Tensor] | None = None
        weakref.finalize(self, _close, self._files)

    @property
    def keys(self) -> set[str]:
        """Keys of all tensors, optimizer state included."""
        return set(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """Global shape of a tensor.

        Raises:
            ValueError: there is no such tensor.
        """
        return tuple(self._entry(key).size)

    def dtype(self, key: str) -> torch.dtype:
        """dtype of a tensor as it is stored.

        Raises:
            ValueError: there is no such tensor.
        """
        return self._entry(key).properties.dtype

    def read(self, key: str) -> Tensor:
        """The whole global tensor, put together from the chunks that the ranks wrote.

        Raises:
            ValueError: there is no such tensor, or a file is missing or damaged.
        """
        tensor = torch.empty(self.shape(key), dtype=self.dtype(key))
        self.read_into(key, full(tensor.shape), tensor)
        return tensor

    def read_into(self, key: str, box: Box, target: Tensor) -> None:
        """Copies a box of a global tensor into `target`, cast to its dtype.

        Memory holds no more than `target` and a block; where only torch can read a chunk, that chunk too, until it reads another.

        Raises:
            ValueError: there is no such tensor, or a file is missing or damaged.
        """
        parts = [(chunk, *common[1:]) for chunk in self._chunks_in(key, box) if (common := overlap(chunk.box, box)) is not None]
        fault = tiling_fault(lengths(box), [wanted for _, _, wanted in parts])
        if fault is not None:
            raise ValueError(f"{self.folder}: {key} cannot be read: the chunks in its metadata do not cover {box} once: there, {fault}")
        for chunk, inside, wanted in parts:
            part = box_view(target, wanted)
            try:
                stored = self._find(chunk)
                if stored is None:
                    part.copy_(box_view(self._load(chunk), inside))
                elif stored.shape != lengths(chunk.box):
                    raise ValueError(f"{chunk.file} holds a tensor of shape {stored.shape} instead of {lengths(chunk.box)}")
                else:
                    read_stored(self._file(chunk), stored, inside, part)
            # Other errors of the system are no fault of the checkpoint.
            except (FileNotFoundError, EOFError, RuntimeError, ValueError) as error:
                raise ValueError(f"{self.folder}: {key} cannot be read: {error}") from error

    def check(self, layout: Layout) -> None:
        """Returns if the checkpoint holds exactly these weights. State of the optimizer, of schedules and of generators is not looked at.

        Raises:
            ValueError: a tensor is missing, has another shape, or is a weight that nobody asks for; or experts are of a legacy module.
        """
        wanted = {slot.name: content.shape for slot, content in layout.items()}
        legacy = sorted(key for key in self.keys if key.endswith(_GROUPED_MLP_KEYS))
        if legacy:
            raise ValueError(
                f"{self.folder}: {legacy[0]} has all experts of Megatron's legacy GroupedMLP in one tensor, which is not supported; "
                "save the model with SequentialMLP or TEGroupedMLP"
            )
        for key, shape in wanted.items():
            if self.shape(key) != shape:
                raise ValueError(f"{self.folder}: {key} has shape {self.shape(key)}; by the model's config it must be {shape}")
        unknown = sorted(key for key in self.keys - wanted.keys() if not _NO_WEIGHT.match(key))
        if unknown:
            raise ValueError(f"{self.folder}: weights that the model's config does not have: {', '.join(unknown[:6])}")

    def _entry(self, key: str) -> TensorStorageMetadata:
        if key not in self._tensors:
            raise ValueError(f"{self.folder}: the checkpoint has no tensor {key}; it does not fit the model's config")
        return self._tensors[key]

    def _chunks_in(self, key: str, box: Box) -> Iterable[_Chunk]:
        """Chunks that may share elements with a box: those whose first rows do."""
        if key not in self._chunks:
            try:
                chunks = [self._chunk(key, tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in self._entry(key).chunks]
            except (AttributeError, TypeError) as error:
                raise ValueError(f"{self.folder}: {METADATA_FILE} describes the chunks of {key} wrongly: {error}") from error
            chunks.sort(key=lambda chunk: chunk.box)
            starts = [chunk.box[0][0] for chunk in chunks if chunk.box]
            self._chunks[key] = chunks, starts, max((stop - start for chunk in chunks for start, stop in chunk.box[:1]), default=0)
        chunks, starts, longest = self._chunks[key]
        if not box or not starts:
            return chunks
        (low, high), *_ = box
        return chunks[bisect_left(starts, low - longest + 1) : bisect_left(starts, high)]

    def _chunk(self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> _Chunk:
        info = self._metadata.storage_data.get(MetadataIndex(key, offsets))
        if not isinstance(info, _StorageInfo):
            raise ValueError(f"{self.folder}: {METADATA_FILE} does not say where the chunk of {key} at {offsets} is stored")
        path = PurePath(info.relative_path)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{self.folder}: {METADATA_FILE} places {key} in {info.relative_path}, outside of the folder; it is not read")
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{self.folder}: {key} is stored through {info.transform_descriptors}; save it without extensions")
        if not all(isinstance(number, int) and number >= 0 for number in (info.offset, info.length, *offsets, *sizes)):
            raise ValueError(f"{self.folder}: {METADATA_FILE} places {key} at numbers that are none; it is not read")
        box = tuple((start, start + size) for start, size in zip(offsets, sizes, strict=True))
        return _Chunk(box, str(path), info.offset, info.length)

    def _find(self, chunk: _Chunk) -> StoredTensor | None:
        """Where the content of a chunk lies; None where only torch can tell."""
        if chunk not in self._stored:
            part = _Slice(self._file(chunk), chunk.offset, chunk.length)
            archive = io.BufferedReader(part)
            try:
                if self._verify:
                    check_archive(archive, self._what(chunk))
                content = find_content(archive, self._what(chunk))
            except RefusedPickle:
                # Parameters and subclasses of tensors: torch knows which of them are harmless.
                content = None
            except ValueError:
                if part.error is not None:
                    # zipfile takes an error of the disk for a damaged archive.
                    raise part.error from None
                raise
            found = content and StoredTensor(self.folder / chunk.file, chunk.offset + content.offset, content.dtype, content.shape)
            self._stored[chunk] = found
        return self._stored[chunk]

    def _load(self, chunk: _Chunk) -> Tensor:
        if self._loaded is not None and self._loaded[0] == chunk:
            return self._loaded[1]
        self._loaded = None
        try:
            tensor = torch.load(self._slice(chunk), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(f"{chunk.file} at byte {chunk.offset} is not a plain tensor, so it is not read: {error}") from error
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != lengths(chunk.box):
            raise ValueError(f"{chunk.file} at byte {chunk.offset} does not hold a tensor of shape {lengths(chunk.box)}")
        self._loaded = chunk, tensor.detach()
        return self._loaded[1]

    def _slice(self, chunk: _Chunk) -> IO[bytes]:
        """The archive of a chunk, as a file that is read at once."""
        return io.BufferedReader(_Slice(self._file(chunk), chunk.offset, chunk.length))

    def _what(self, chunk: _Chunk) -> str:
        return f"{self.folder / chunk.file} at byte {chunk.offset}"

    def _file(self, chunk: _Chunk) -> int:
        """A descriptor of the file of a chunk, which is closed when many others were asked for since."""
        descriptor = self._files.pop(chunk.file, None)
        if descriptor is None:
            descriptor = open_file(self.folder / chunk.file)
        self._files[chunk.file] = descriptor
        if len(self._files) > MAX_OPEN_FILES:
            os.close(self._files.pop(next(iter(self._files))))
        return descriptor


def _close(files: dict[str, int]) -> None:
    for descriptor in files.values():
        os.close(descriptor)
    files.clear()


class _Slice(io.RawIOBase):
    """Part of a file, as a file."""

    def __init__(self, file: int, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0
        self.error: OSError | None = None
        """The last error of a read."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        # As io.BytesIO does. An error would look like one of the disk.
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: bytearray | memoryview, /) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._position)]
        try:
            num_bytes = os.preadv(self._file, [view], self._start + self._position) if view else 0
        except OSError as error:
            self.error = error
            raise
        self._position += num_bytes
        return num_bytes


class CanonicalTensors:
    """The canonical tensors that lie in a Megatron checkpoint, by the checkpoint's layout."""

    def __init__(self, source: TorchDistFolder, layout: Layout) -> None:
        """Checks that the checkpoint fits.

        Raises:
            ValueError: a tensor is missing, has another shape, or is a weight that nobody asks for.
        """
        source.check(layout)
        self._source = source
        self._holders: dict[str, list[tuple[Slot, Piece]]] = {}
        for slot, content in layout.items():
            for piece in content.pieces:
                assert piece.transform is None, "checkpoints hold canonical values"
                self._holders.setdefault(piece.name, []).append((slot, piece))

    @property
    def names(self) -> list[str]:
        """Names, in the order of the layout."""
        return list(self._holders)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        boxes = [piece.box for _, piece in self._holders[name]]
        return tuple(max(box[dim][1] for box in boxes) for dim in range(len(boxes[0])))

    def dtype(self, name: str) -> torch.dtype:
        """dtype of a tensor as it is stored.

        Raises:
            ValueError: its parts have several.
        """
        dtypes = {self._source.dtype(slot.name) for slot, _ in self._holders[name]}
        if len(dtypes) > 1:
            raise ValueError(f"the checkpoint holds parts of {name} in several dtypes: {sorted(map(str, dtypes))}")
        return dtypes.pop()

    def read_into(self, name: str, box: Box, target: Tensor) -> None:
        """Copies a box of a tensor into `target`, cast to its dtype.

        Raises:
            ValueError: a file is missing or damaged.
        """
        for slot, piece in self._holders[name]:
            common = overlap(piece.box, box)
            if common is None:
                continue
            inside, _, wanted = common
            local = place(inside, piece.box, piece.local)
            part = box_view(target, wanted)
            # Leading dimensions of stacked experts have length 1.
            self._source.read_into(slot.name, local, part[(None,) * (len(local) - part.ndim)])
