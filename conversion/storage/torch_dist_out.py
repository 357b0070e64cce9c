"""Writes Megatron's torch_dist checkpoints, without Megatron, holding one chunk in memory.

A file is what torch's FileSystemWriter makes: one torch.save after the other. The writer itself keeps every tensor of a file until the file
is complete, so it cannot be used for large models.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from conversion.boxes import Layout, SlotLayout
from conversion.progress import Report, counter
from conversion.storage.chunks import Chunk, is_stacked
from conversion.storage.file_boxes import BoxSource, fill_from
from conversion.storage.finished_files import FinishedFiles
from conversion.storage.manifest import FileRecord
from conversion.storage.torch_dist_io import METADATA_FILE
from conversion.tensors import torch_dtype

MAX_CHUNK_BYTES = 1 << 30
"""Larger tensors are cut: one chunk is held in memory."""

Place = tuple[int, int]
"""Offset and length of a chunk in its file, in bytes."""

# What megatron.core.dist_checkpointing looks for before it opens a folder.
_MEGATRON_METADATA = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}

# Modules that keep an `_extra_state` in checkpoints (scales of FP8) where they are Transformer Engine's. It is empty here, but Megatron's
# loader insists on the keys. Some versions have it in norms too; those that have not ignore it.
_MODULES_WITH_EXTRA_STATE = (
    *("in_proj", "out_proj", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "fc1_latent_proj", "fc2_latent_proj", "output_layer"),
    *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
    *("input_layernorm", "q_layernorm", "k_layernorm", "kv_layernorm", "pre_mlp_layernorm", "final_layernorm", "final_norm"),
)


def write_torch_dist(
    folder: Path, layout: Layout, files: Sequence[Sequence[Chunk]], source: BoxSource, *, progress: Report | None = None
) -> dict[str, FileRecord]:
    """Writes a checkpoint of weights that megatron.core.dist_checkpointing loads at any parallel layout; checksums of its data files.

    `files` holds the chunks of each file, which together are the layout's tensors. What an interrupted call has written of them is kept
    if it is still right. `progress` gets numbers of bytes as they are done.
    """
    report = progress or counter(None, 0)
    metadata = Metadata(
        {slot.name: TensorStorageMetadata(_properties(content), torch.Size(content.shape), []) for slot, content in layout.items()},
        storage_data={},
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )
    with FinishedFiles() as finished:
        for index, chunks in enumerate(files):
            path = folder / f"__{index}_0.distcp"
            extra_states = sorted(_extra_states(layout)) if index == 0 else []
            places = cast("list[Place] | None", finished.kept(path))
            if places is None:
                places = _write_file(path, extra_states, chunks, source, report)
                finished.finish(path, places)
            else:
                report(sum(chunk.num_bytes for chunk in chunks), is_kept=True)
            _describe(metadata, path.name, extra_states, chunks, places)
        records = finished.records()
    (folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    torch.save({"checkpoint_version": 3.0, "iteration": 0}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(_MEGATRON_METADATA), encoding="utf-8")
    return records


def _write_file(path: Path, extra_states: Sequence[str], chunks: Sequence[Chunk], source: BoxSource, report: Report) -> list[Place]:
    places = []
    with path.open("wb") as file:
        file.write(_EMPTY_STATE * len(extra_states))
        for chunk in chunks:
            tensor = torch.empty(chunk.content.shape, dtype=torch_dtype(chunk.content.dtype))
            fill_from(tensor, chunk.content, source)
            start = file.tell()
            torch.save(tensor, file)
            places.append((start, file.tell() - start))
            report(tensor.nbytes)
    return places


def _describe(metadata: Metadata, file: str, extra_states: Sequence[str], chunks: Sequence[Chunk], places: Sequence[Place]) -> None:
    """Adds what a file holds."""
    assert metadata.storage_data is not None
    for position, key in enumerate(extra_states):
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(key)] = _StorageInfo(file, position * len(_EMPTY_STATE), len(_EMPTY_STATE))
    for chunk, (start, length) in zip(chunks, places, strict=True):
        offsets = torch.Size(chunk.offsets)
        entry = metadata.state_dict_metadata[chunk.key]
        assert isinstance(entry, TensorStorageMetadata)
        entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.content.shape)))
        metadata.storage_data[MetadataIndex(chunk.key, offsets)] = _StorageInfo(file, start, length)


def _properties(content: SlotLayout) -> TensorProperties:
    return TensorProperties(dtype=torch_dtype(content.dtype))


def _empty_state() -> bytes:
    stream = io.BytesIO()
    torch.save([None], stream)
    return stream.getvalue()


_EMPTY_STATE = _empty_state()


def _extra_states(layout: Layout) -> set[str]:
    keys = set()
    for slot, content in layout.items():
        module = slot.name.rpartition(".weight")[0]
        if module.split(".")[-1] in _MODULES_WITH_EXTRA_STATE:
            num_shards = content.shape[0] if is_stacked(content) else 1
            keys |= {f"{module}._extra_state/shard_{index}_{num_shards}" for index in range(num_shards)}
    return keys
