"""Megatron's torch_dist checkpoints, read and written in one process without Megatron."""

from __future__ import annotations

import io
import json
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint import save as save_checkpoint
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from conversion.boxes import Layout, Piece, Slot, SlotLayout, full, lengths
from conversion.tensors import ReadBox, box_view, fill, torch_dtype

EMBEDDING_KEY = "embedding.word_embeddings.weight"

# What megatron.core.dist_checkpointing looks for before it opens a folder.
_MEGATRON_METADATA = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}

# Modules that keep an `_extra_state` in checkpoints (scales of FP8). It is empty here, but Megatron's loader insists on the keys.
_MODULES_WITH_EXTRA_STATE = ("in_proj", "out_proj", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "output_layer")


class TorchDistFolder:
    """The tensors of a torch_dist checkpoint (an iter_ folder), by key."""

    def __init__(self, folder: Path) -> None:
        """Reads the metadata.

        Raises:
            ValueError: it is not a complete torch_dist checkpoint.
        """
        self._folder = folder
        self._reader = FileSystemReader(folder)
        try:
            self._metadata = self._reader.read_metadata()
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{folder} is not a torch_dist checkpoint, or not a complete one: {error}") from error
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        entries = self._metadata.state_dict_metadata.items()
        self._tensors = {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}

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
        planner = DefaultLoadPlanner()
        planner.set_up_planner({key: tensor}, self._metadata, is_coordinator=True)
        try:
            plan = self._reader.prepare_local_plan(planner.create_local_plan())
            self._reader.read_data(plan, planner).value()
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise ValueError(f"{self._folder}: {key} cannot be read: {error}") from error
        return tensor

    def check(self, layout: Layout) -> None:
        """Returns if the checkpoint holds exactly these weights. State of the optimizer is not looked at.

        Raises:
            ValueError: a tensor is missing, has another shape, or is a weight that nobody asks for.
        """
        wanted = {slot.name: content.shape for slot, content in layout.items()}
        for key, shape in wanted.items():
            if self.shape(key) != shape:
                raise ValueError(f"{self._folder}: {key} has shape {self.shape(key)}; by the model's config it must be {shape}")
        modules = {key.split(".")[0] for key in wanted}
        unknown = sorted(key for key in self.keys - wanted.keys() if key.split(".")[0] in modules)
        if unknown:
            raise ValueError(f"{self._folder}: weights that the model's config does not have: {', '.join(unknown[:6])}")

    def _entry(self, key: str) -> TensorStorageMetadata:
        if key not in self._tensors:
            raise ValueError(f"{self._folder}: the checkpoint has no tensor {key}; it does not fit the model's config")
        return self._tensors[key]


def canonical_tensors(source: TorchDistFolder, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Every canonical tensor of a checkpoint's layout, in the layout's order and the checkpoint's dtype.

    Holds only those tensors of the checkpoint in memory that are still needed.

    Raises:
        ValueError: the checkpoint does not fit the layout.
    """
    source.check(layout)
    holders: dict[str, list[tuple[Slot, Piece]]] = {}
    num_uses: dict[Slot, int] = {}
    for slot, content in layout.items():
        num_uses[slot] = len(content.pieces)
        for piece in content.pieces:
            holders.setdefault(piece.name, []).append((slot, piece))
    loaded: dict[Slot, Tensor] = {}
    for name, parts in holders.items():
        for slot, _ in parts:
            if slot not in loaded:
                loaded[slot] = source.read(slot.name)
        yield name, _assemble(name, [(loaded[slot], piece) for slot, piece in parts])
        for slot, _ in parts:
            num_uses[slot] -= 1
            if not num_uses[slot]:
                del loaded[slot]


def _assemble(name: str, parts: list[tuple[Tensor, Piece]]) -> Tensor:
    dtypes = {tensor.dtype for tensor, _ in parts}
    if len(dtypes) > 1:
        raise ValueError(f"the checkpoint holds parts of {name} in several dtypes: {sorted(map(str, dtypes))}")
    rank = len(parts[0][1].box)
    tensor = torch.empty([max(piece.box[dim][1] for _, piece in parts) for dim in range(rank)], dtype=dtypes.pop())
    for source, piece in parts:
        target = box_view(tensor, piece.box)
        target.copy_(box_view(source, piece.local).view(target.shape))
    return tensor


def write_torch_dist(folder: Path, layout: Layout, read: ReadBox) -> None:
    """Writes a checkpoint of weights that megatron.core.dist_checkpointing loads at any parallel layout.

    Slots are read through `read` one after the other, so that memory holds one at a time.
    """
    planner = _LayoutPlanner(layout, read)
    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
    with warnings.catch_warnings():
        # torch warns that it writes from one process, which is the intent.
        warnings.simplefilter("ignore", UserWarning)
        save_checkpoint({}, storage_writer=writer, planner=planner, no_dist=True)
    torch.save({"checkpoint_version": 3.0, "iteration": 0}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(_MEGATRON_METADATA), encoding="utf-8")


@dataclass(frozen=True)
class _Chunk:
    """Part of a global tensor that is stored, and later read, as one."""

    offsets: tuple[int, ...]
    content: SlotLayout


def _chunks(content: SlotLayout) -> list[_Chunk]:
    """One chunk per expert where experts are stacked, so that a rank reads only its own; else the whole tensor."""
    if all(len(piece.local) == len(piece.box) for piece in content.pieces):
        return [_Chunk((0,) * len(content.shape), content)]
    chunks = []
    for piece in content.pieces:
        shape = lengths(piece.local)
        offsets = tuple(start for start, _ in piece.local)
        chunks.append(_Chunk(offsets, replace(content, shape=shape, pieces=(replace(piece, local=full(shape)),))))
    return chunks


class _LayoutPlanner(SavePlanner):
    """Writes tensors that do not exist yet: each is built when its turn comes."""

    def __init__(self, layout: Layout, read: ReadBox) -> None:
        self._read = read
        self._items: list[WriteItem] = []
        self._chunks: dict[tuple[str, tuple[int, ...]], _Chunk] = {}
        for slot, content in layout.items():
            for chunk in _chunks(content):
                self._chunks[slot.name, chunk.offsets] = chunk
                self._items.append(_write_item(slot.name, content, chunk))
        self._items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in sorted(_extra_states(layout))]

    def set_up_planner(self, state_dict: dict, storage_meta: StorageMeta | None = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            stream = io.BytesIO()
            torch.save([None], stream)
            return stream
        assert write_item.index.offset is not None
        content = self._chunks[write_item.index.fqn, tuple(write_item.index.offset)].content
        tensor = torch.empty(content.shape, dtype=torch_dtype(content.dtype))
        fill(tensor, content, self._read)
        return tensor


def _write_item(key: str, content: SlotLayout, chunk: _Chunk) -> WriteItem:
    offsets, sizes = torch.Size(chunk.offsets), torch.Size(chunk.content.shape)
    properties = TensorProperties(dtype=torch_dtype(content.dtype))
    data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, torch.Size(content.shape))
    return WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data)


def _extra_states(layout: Layout) -> set[str]:
    keys = set()
    for slot, content in layout.items():
        module = slot.name.rpartition(".weight")[0]
        if module.split(".")[-1] in _MODULES_WITH_EXTRA_STATE:
            is_stacked = any(len(piece.local) > len(piece.box) for piece in content.pieces)
            num_shards = content.shape[0] if is_stacked else 1
            keys |= {f"{module}._extra_state/shard_{index}_{num_shards}" for index in range(num_shards)}
    return keys
