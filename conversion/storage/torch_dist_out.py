"""Writes Megatron's torch_dist checkpoints, without Megatron, holding a few blocks in memory.

torch's own FileSystemWriter keeps every tensor of a file until the file is complete, so it cannot be used for large models.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
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

from conversion.boxes import Box, Layout, SlotLayout
from conversion.progress import Report, counter
from conversion.storage.chunks import Chunk, is_stacked, restricted
from conversion.storage.file_boxes import BoxSource, fill_from
from conversion.storage.manifest import FileRecord
from conversion.storage.output_file import OutputFile, write_tensor
from conversion.storage.torch_archive import ALIGNMENT, Archive, archive_of
from conversion.storage.torch_dist_io import METADATA_FILE
from conversion.tensors import torch_dtype

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
    records = {}
    for index, chunks in enumerate(files):
        name = f"__{index}_0.distcp"
        extra_states = sorted(_extra_states(layout)) if index == 0 else []
        items = _placed(chunks, start=len(_EMPTY_STATE) * len(extra_states))
        _describe(metadata, name, extra_states, items)
        records[name] = _write_file(folder / name, extra_states, items, source, report)
    (folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    torch.save({"checkpoint_version": 3.0, "iteration": 0}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(_MEGATRON_METADATA), encoding="utf-8")
    return records


@dataclass(frozen=True, slots=True)
class _Item:
    """A chunk, and where its archive lies in the file."""

    chunk: Chunk
    archive: Archive
    offset: int


def _placed(chunks: Sequence[Chunk], start: int) -> list[_Item]:
    items = []
    for chunk in chunks:
        archive = archive_of(torch_dtype(chunk.content.dtype), chunk.content.shape)
        start += -start % ALIGNMENT
        items.append(_Item(chunk, archive, start))
        start += archive.size()
    return items


def _describe(metadata: Metadata, file: str, extra_states: Sequence[str], items: Sequence[_Item]) -> None:
    """Adds what a file holds."""
    assert metadata.storage_data is not None
    for position, key in enumerate(extra_states):
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(key)] = _StorageInfo(file, position * len(_EMPTY_STATE), len(_EMPTY_STATE))
    for item in items:
        key, offsets = item.chunk.key, torch.Size(item.chunk.offsets)
        entry = metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size(item.chunk.content.shape)))
        metadata.storage_data[MetadataIndex(key, offsets)] = _StorageInfo(file, item.offset, item.archive.size())


def _write_file(path: Path, extra_states: Sequence[str], items: Sequence[_Item], source: BoxSource, report: Report) -> FileRecord:
    with OutputFile(path) as out:
        # The extra states count as one item.
        if not out.num_items:
            out.append(_EMPTY_STATE * len(extra_states))
            out.end_item()
        num_done = out.num_items - 1
        report(sum(item.archive.num_bytes for item in items[:num_done]), is_kept=True)
        for item in items[num_done:]:
            out.append(bytes(item.offset - out.position) + item.archive.before)
            out.end_section()
            content = item.chunk.content

            def fill(box: Box, target: Tensor, content: SlotLayout = content) -> None:
                fill_from(target, restricted(content, box), source)

            for num_bytes in write_tensor(out, content.shape, torch_dtype(content.dtype), fill):
                report(num_bytes)
            out.append(item.archive.after(out.end_section()))
            out.end_item()
        return out.close()


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
