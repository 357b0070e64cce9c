# SPDX-License-Identifier: Apache-2.0
"""Megatron torch_dist checkpoints, read box by box in one process without Megatron; `torch_dist_writer` writes them."""

from __future__ import annotations

import io
import os
import pickle
import re
import weakref
import zipfile
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from conversion.boxes import Box, Layout, Piece, Slot, counted_from, intersect, lengths, place, tiling_fault
from conversion.files.checkpoint_metadata import METADATA_FILE, CheckpointMetadata, StoredChunk
from conversion.files.hf_folder import read_config, without_mtp
from conversion.files.manifest import HF_CONFIG_FILE
from conversion.files.reading import open_file, read_file
from conversion.tensors import StoredTensor, box_view, read_stored

ITERATION_FOLDER = "iter_0000000"
LATEST_FILE = "latest_checkpointed_iteration.txt"
EMBEDDING_KEY = "embedding.word_embeddings.weight"
MAX_OPEN_FILES = 256
"""Far below what a process may have, and what a checkpoint of many ranks has."""

# Training state, under the names of Megatron's trainers and ours. Any other name is a weight that the layout must
# contain.
_NO_WEIGHT = re.compile(
    r"(chained_\d+\.)?(optimizer|optimizer_state_dict|grad_scaler|opt_param_scheduler|rng|rng_state|rerun_state_machine)\b"
)
_GROUPED_MLP_KEYS = (".experts.weight1", ".experts.weight2")


@dataclass(frozen=True)
class CheckpointPaths:
    """Paths of the parts of a Megatron checkpoint."""

    iteration: Path
    hf_config: dict[str, object]
    tokenizer: Path | None


def find_checkpoint(folder: Path) -> CheckpointPaths:
    """The checkpoint in a step folder, weights folder or iter_ folder, with its copy of the model's config.json."""
    if not folder.is_dir():
        raise ValueError(
            f"--mcore {folder} is not a folder; name a step_N folder, its policy/weights, or an iter_ folder"
        )
    weights = folder / "policy" / "weights" if (folder / "policy" / "weights").is_dir() else folder
    latest = weights / LATEST_FILE
    if (weights / METADATA_FILE).exists():
        found = [weights]
    elif latest.exists():
        number = read_file(latest).decode(errors="replace").strip()
        found = [weights / f"iter_{int(number):07d}"] if number.isdigit() else []
    else:
        found = sorted(weights.glob("iter_*"))
    if not found or not (found[-1] / METADATA_FILE).exists():
        raise ValueError(
            f"--mcore {weights}: no complete Megatron checkpoint there; name a step_N folder, its policy/weights, "
            "or an iter_ folder"
        )
    iteration = found[-1]
    configs = [path for path in (iteration / HF_CONFIG_FILE, iteration.parent / HF_CONFIG_FILE) if path.exists()]
    if not configs:
        raise ValueError(
            f"--mcore {folder}: {iteration} has no {HF_CONFIG_FILE}, a copy of the Hugging Face config.json; put "
            "one there"
        )
    tokenizers = [
        path for path in (iteration.parent / "tokenizer", iteration.parent.parent / "tokenizer") if path.is_dir()
    ]
    return CheckpointPaths(iteration, read_config(configs[0]), tokenizers[0] if tokenizers else None)


class TorchDistFolder:
    """The tensors of a torch_dist checkpoint (an iter_ folder), by key. Not for several threads at once."""

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        """Reads metadata. With `verify`, compares each chunk with the checksums in its archive before its first use."""
        self.folder = folder
        self._metadata = CheckpointMetadata(folder)
        self.keys = set(self._metadata.shapes)
        self._chunks: dict[str, tuple[list[StoredChunk], list[int], int]] = {}
        self._stored: dict[StoredChunk, StoredTensor | None] = {}
        self._files: dict[str, int] = {}
        self._verify = verify
        self._loaded: tuple[StoredChunk, Tensor] | None = None
        weakref.finalize(self, _close, self._files)

    def shape(self, key: str) -> tuple[int, ...]:
        return self._metadata.shapes[self._known(key)]

    def dtype(self, key: str) -> torch.dtype:
        return self._metadata.dtypes[self._known(key)]

    def _known(self, key: str) -> str:
        if key not in self.keys:
            raise ValueError(
                f"{self.folder}: the checkpoint has no tensor {key}; it does not fit the model's "
                f"config{without_mtp([key])}"
            )
        return key

    def read_into(self, key: str, box: Box, target: Tensor) -> None:
        """Copies a box of a global tensor into `target`, cast to its dtype.

        Memory holds no more than `target` and a block; where only torch can read a chunk, that chunk too, until it
        reads another.
        """
        parts = [
            (chunk, common) for chunk in self._chunks_in(key, box) if (common := intersect(chunk.box, box)) is not None
        ]
        fault = tiling_fault(lengths(box), [counted_from(common, box) for _, common in parts])
        if fault is not None:
            raise ValueError(
                f"{self.folder}: {key} cannot be read: the chunks in its metadata do not cover {box} once: there, "
                f"{fault}"
            )
        for chunk, common in parts:
            inside, part = counted_from(common, chunk.box), box_view(target, counted_from(common, box))
            try:
                if chunk not in self._stored:
                    self._stored[chunk] = self._find(chunk)
                stored = self._stored[chunk]
                if stored is not None:
                    read_stored(self._file(chunk), stored, inside, part)
                    continue
                if self._loaded is None or self._loaded[0] != chunk:
                    self._loaded = None
                    self._loaded = chunk, self._torch_load(chunk, "cpu")
                part.copy_(box_view(self._loaded[1], inside))
            except (FileNotFoundError, EOFError, RuntimeError, ValueError) as error:
                raise ValueError(f"{self.folder}: {key} cannot be read: {error}") from error

    def check(self, layout: Layout) -> None:
        """Raises ValueError unless its weights are exactly these. Ignores optimizers, schedules and generators."""
        wanted = {slot.name: content.shape for slot, content in layout.items()}
        legacy = sorted(key for key in self.keys if key.endswith(_GROUPED_MLP_KEYS))
        if legacy:
            raise ValueError(
                f"{self.folder}: {legacy[0]} has all experts of Megatron's legacy GroupedMLP in one tensor, which "
                "is not supported; save the model with SequentialMLP or TEGroupedMLP"
            )
        for key, shape in wanted.items():
            if self.shape(key) != shape:
                raise ValueError(
                    f"{self.folder}: {key} has shape {self.shape(key)}; by the model's config it must be {shape}"
                )
        unknown = sorted(key for key in self.keys - wanted.keys() if not _NO_WEIGHT.match(key))
        if unknown:
            raise ValueError(f"{self.folder}: weights that the model's config does not have: {', '.join(unknown[:6])}")

    def _chunks_in(self, key: str, box: Box) -> Sequence[StoredChunk]:
        """Chunks that may share elements with a box: those whose first rows do."""
        if key not in self._chunks:
            chunks = self._metadata.chunks(self._known(key))
            starts = [chunk.box[0][0] for chunk in chunks if chunk.box]
            self._chunks[key] = (
                chunks,
                starts,
                max((stop - start for chunk in chunks for start, stop in chunk.box[:1]), default=0),
            )
        chunks, starts, longest = self._chunks[key]
        if not box or not starts:
            return chunks
        (low, high), *_ = box
        return chunks[bisect_left(starts, low - longest + 1) : bisect_left(starts, high)]

    def _find(self, chunk: StoredChunk) -> StoredTensor | None:
        """Finds the content of a chunk in its file; None where only torch can read it, as for views."""
        what = f"{chunk.file} at byte {chunk.offset}"
        try:
            with self._archive(chunk) as file, zipfile.ZipFile(file) as archive:
                records = archive.infolist()
                orders = {archive.read(record) for record in records if record.filename.endswith("/byteorder")}
                if self._verify and (damaged := archive.testzip()) is not None:
                    raise ValueError(f"{what} is damaged: {damaged} does not have its CRC-32")
        except (zipfile.BadZipFile, NotImplementedError) as error:
            raise ValueError(f"{what} is damaged: {error}") from error
        if orders - {b"little"} or any(record.compress_type != zipfile.ZIP_STORED for record in records):
            return None
        tensor = self._torch_load(chunk, "meta")
        storage = tensor.untyped_storage()
        offset = getattr(storage, "_checkpoint_offset", None)
        if offset is None or not tensor.is_contiguous() or tensor.storage_offset() or storage.nbytes() != tensor.nbytes:
            return None
        if offset + tensor.nbytes > chunk.length:
            raise ValueError(f"{what} is damaged: the content exceeds its archive")
        return StoredTensor(self.folder / chunk.file, chunk.offset + offset, tensor.dtype, tuple(tensor.shape))

    def _torch_load(self, chunk: StoredChunk, device: str) -> Tensor:
        """The tensor of a chunk; on "meta" without its content."""
        what = f"{chunk.file} at byte {chunk.offset}"
        try:
            with self._archive(chunk) as file:
                tensor = torch.load(file, map_location=device, weights_only=True)
        except pickle.UnpicklingError as error:
            # The rest of torch's message suggests unsafe loading, which would run the pickle's code.
            asked = re.search(r"GLOBAL (\S+)", str(error))
            reason = f"its pickle asks for {asked[1]}" if asked else str(error)
            raise ValueError(f"{what} is not a plain tensor, so it is not read: {reason}") from error
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != lengths(chunk.box):
            raise ValueError(f"{what} does not hold a tensor of shape {lengths(chunk.box)}")
        return tensor.detach()

    @contextmanager
    def _archive(self, chunk: StoredChunk) -> Iterator[IO[bytes]]:
        part = _FilePart(self._file(chunk), chunk.offset, chunk.length)
        try:
            yield io.BufferedReader(part)
        except Exception:
            if part.error is not None:
                # zipfile and torch report a disk error as a damaged archive.
                raise part.error from None
            raise

    def _file(self, chunk: StoredChunk) -> int:
        """A descriptor of the file of a chunk, which stays open until many others were opened since."""
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


class _FilePart(io.RawIOBase):
    """Part of an open file, as a file."""

    def __init__(self, file: int, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0
        self.error: OSError | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
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
    """The canonical tensors that lie in a Megatron checkpoint, by the checkpoint's layout, which it must fit."""

    def __init__(self, source: TorchDistFolder, layout: Layout) -> None:
        source.check(layout)
        self._source = source
        self._holders: dict[str, list[tuple[Slot, Piece]]] = {}
        for slot, content in layout.items():
            for piece in content.pieces:
                assert piece.transform is None, "checkpoints hold canonical values"
                self._holders.setdefault(piece.name, []).append((slot, piece))
        self.names = list(self._holders)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(
            max(stop for _, stop in bounds)
            for bounds in zip(*(piece.box for _, piece in self._holders[name]), strict=True)
        )

    def dtype(self, name: str) -> torch.dtype:
        dtypes = {self._source.dtype(slot.name) for slot, _ in self._holders[name]}
        if len(dtypes) > 1:
            raise ValueError(f"the checkpoint holds parts of {name} in several dtypes: {sorted(map(str, dtypes))}")
        return dtypes.pop()

    def read_into(self, name: str, box: Box, target: Tensor) -> None:
        for slot, piece in self._holders[name]:
            common = intersect(piece.box, box)
            if common is not None:
                local, part = place(common, piece.box, piece.local), box_view(target, counted_from(common, box))
                self._source.read_into(slot.name, local, part[(None,) * (len(local) - part.ndim)])
