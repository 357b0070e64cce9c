# SPDX-License-Identifier: Apache-2.0
"""Writes Megatron's torch_dist checkpoints without Megatron: how tensors are cut into chunks and files, and the files.

A file is what torch's FileSystemWriter makes: one torch.save after the other. The writer itself keeps every tensor of a
file in memory until the file is complete, so it cannot write large files.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, cast

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

from conversion.boxes import (
    DTYPE_BYTES,
    Box,
    Layout,
    Piece,
    Slot,
    SlotLayout,
    counted_from,
    full,
    intersect,
    lengths,
    place,
    uncovered,
    volume,
)
from conversion.families.common import Family, HfConfig, MegatronParallel
from conversion.files.checkpoint_metadata import METADATA_FILE
from conversion.files.manifest import FileRecord, FinishedFiles, HashedFile
from conversion.progress import Report, counter
from conversion.tensors import BoxSource, fill_from, read_ahead, torch_dtype

MAX_CHUNK_BYTES = 1 << 30
"""Larger tensors are cut: one chunk is held in memory."""

_MEGATRON_METADATA = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}

# Transformer Engine's modules have an `_extra_state` (scales of FP8), empty here; Megatron's loader insists on the
# keys.
_MODULES_WITH_EXTRA_STATE = (
    *(
        "in_proj",
        "out_proj",
        "linear_qkv",
        "linear_proj",
        "linear_fc1",
        "linear_fc2",
        "fc1_latent_proj",
        "fc2_latent_proj",
        "output_layer",
    ),
    *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
    *(
        "input_layernorm",
        "q_layernorm",
        "k_layernorm",
        "kv_layernorm",
        "pre_mlp_layernorm",
        "final_layernorm",
        "final_norm",
    ),
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a global tensor that is stored and read as a unit."""

    key: str
    offsets: tuple[int, ...]
    content: SlotLayout

    @property
    def num_bytes(self) -> int:
        """Bytes of the chunk."""
        return math.prod(self.content.shape) * DTYPE_BYTES[self.content.dtype]


def restricted(content: SlotLayout, box: Box) -> SlotLayout:
    """The content of one box of a tensor, as a tensor of its own."""
    pieces = []
    for piece in content.pieces:
        common = intersect(piece.local, box)
        if common is not None:
            extra = len(piece.local) - len(piece.box)
            inside = place(common[extra:], piece.local[extra:], piece.box)
            pieces.append(Piece(piece.name, inside, counted_from(common, box), piece.transform))
    padding = tuple(
        counted_from(common, box) for hole in content.padding if (common := intersect(hole, box)) is not None
    )
    return replace(content, shape=lengths(box), pieces=tuple(pieces), padding=padding)


def is_stacked(content: SlotLayout) -> bool:
    """True if the first dimension of a global tensor counts experts."""
    return any(len(piece.local) > len(piece.box) for piece in content.pieces)


def files_of_size(layout: Layout, max_file_bytes: int, max_bytes: int) -> list[list[Chunk]]:
    """Files of about `max_file_bytes`: a chunk per expert where experts are stacked, else per tensor."""
    boxes: dict[str, list[Box]] = {}
    for slot, content in layout.items():
        whole = full(content.shape)
        boxes[slot.name] = (
            [((index, index + 1), *whole[1:]) for index in range(*whole[0])] if is_stacked(content) else [whole]
        )
    files: list[list[Chunk]] = [[]]
    num_bytes = 0
    for chunk in _chunks(layout, boxes, max_bytes):
        if files[-1] and num_bytes + chunk.num_bytes > max_file_bytes:
            files.append([])
            num_bytes = 0
        files[-1].append(chunk)
        num_bytes += chunk.num_bytes
    return files


def files_of_ranks(
    family: Family, hf_config: HfConfig, parallel: MegatronParallel, layout: Layout, max_bytes: int
) -> list[list[Chunk]]:
    """A file for each (tp, pp, ep, etp) rank with the chunks it reads; shared chunks are in the first one's file."""
    holders: dict[str, list[tuple[str, Piece]]] = {}
    for slot, content in layout.items():
        for piece in content.pieces:
            holders.setdefault(piece.name, []).append((slot.name, piece))
    taken: dict[tuple[str, Box], list[Box]] = {}
    files: list[dict[str, list[Box]]] = []
    world_size, sizes = parallel.pp * math.lcm(parallel.tp, parallel.ep * parallel.etp), replace(parallel, cp=1)
    for coords in dict.fromkeys(sizes.coords_of(rank, world_size) for rank in range(world_size)):
        read: dict[str, list[Box]] = {}
        for content in family.megatron_layout(hf_config, parallel, coords, "float32", "te").values():
            for piece in content.pieces:
                for key, held in holders[piece.name]:
                    common = intersect(piece.box, held.box)
                    if common is not None:
                        read.setdefault(key, []).append(place(common, held.box, held.local))
        files.append({})
        for key, boxes in read.items():
            stacked, rest = is_stacked(layout[Slot(key)]), []
            for box in boxes:
                # Experts do not overlap each other; looking at one at a time keeps this linear in their number.
                others = taken.setdefault((key, box[:1] if stacked else ()), [])
                left = uncovered(box, others)
                others += left
                rest += left
            files[-1][key] = _joined_up(rest, stacked=stacked)
    for slot, content in layout.items():
        # Padding has no canonical source, so no rank's layout names it. It is stored with the last rows of the tensor.
        holder = next((file for file in reversed(files) if file.get(slot.name)), files[-1])
        holder.setdefault(slot.name, [full(content.shape)]).extend(content.padding)
    return [_chunks(layout, boxes, max_bytes) for boxes in files]


def _joined_up(boxes: list[Box], *, stacked: bool) -> list[Box]:
    """Joins boxes that follow each other along one dimension. Boxes of different experts stay apart."""
    found: list[Box] = []
    for box in sorted(boxes):
        last = found[-1] if found else box
        different = [dim for dim, (a, b) in enumerate(zip(last, box, strict=True)) if a != b]
        follows = len(different) == 1 and last[different[0]][1] == box[different[0]][0]
        if follows and not (stacked and different[0] == 0):
            (dim,) = different
            found[-1] = (*last[:dim], (last[dim][0], box[dim][1]), *last[dim + 1 :])
        else:
            found.append(box)
    return found


def _chunks(layout: Layout, boxes: Mapping[str, list[Box]], max_bytes: int) -> list[Chunk]:
    chunks = []
    for slot, content in layout.items():
        for whole in boxes.get(slot.name, []):
            for box in _limited(whole, max_bytes // DTYPE_BYTES[content.dtype]):
                chunks.append(Chunk(slot.name, tuple(start for start, _ in box), restricted(content, box)))
    return chunks


def _limited(box: Box, max_elements: int) -> Iterator[Box]:
    """A box in slices along its longest dimension, of at most about `max_elements` each."""
    num_elements = volume(box)
    if num_elements <= max_elements:
        yield box
        return
    dim = max(range(len(box)), key=lambda dim: box[dim][1] - box[dim][0])
    start, stop = box[dim]
    num_slices = min(stop - start, -(-num_elements // max_elements))
    step = (stop - start) // num_slices
    for low in range(start, stop, step):
        yield (*box[:dim], (low, min(low + step, stop)), *box[dim + 1 :])


def write_torch_dist(
    folder: Path, layout: Layout, files: Sequence[Sequence[Chunk]], source: BoxSource, *, progress: Report | None = None
) -> dict[str, FileRecord]:
    """Writes weights that megatron.core.dist_checkpointing loads at any parallel layout; checksums of the data files.

    `files` holds the chunks of each file, which together are the layout's tensors. What an interrupted call has written
    of them is kept if it is still right. `progress` gets numbers of bytes as they are done.
    """
    report = progress or counter(None, 0)
    entries = {
        slot.name: TensorStorageMetadata(
            TensorProperties(dtype=torch_dtype(content.dtype)), torch.Size(content.shape), []
        )
        for slot, content in layout.items()
    }
    places: dict[MetadataIndex, _StorageInfo] = {}
    empty = io.BytesIO()
    torch.save([None], empty)
    extra_states, size = sorted(_extra_states(layout)), len(empty.getvalue())
    with FinishedFiles() as finished:
        for index, chunks in enumerate(files):
            name, states = f"__{index}_0.distcp", extra_states if index == 0 else []
            places |= {
                MetadataIndex(key): _StorageInfo(name, position * size, size) for position, key in enumerate(states)
            }
            head = empty.getvalue() * len(states)
            note, is_kept = finished.written(
                folder / name, lambda out, head=head, chunks=chunks: _write_file(out, head, chunks, source, report)
            )
            if is_kept:
                report(sum(chunk.num_bytes for chunk in chunks), is_kept=True)
            for chunk, (start, length) in zip(chunks, cast("list[tuple[int, int]]", note), strict=True):
                offsets = torch.Size(chunk.offsets)
                entries[chunk.key].chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.content.shape)))
                places[MetadataIndex(chunk.key, offsets)] = _StorageInfo(name, start, length)
        records = finished.records()
    described = {**entries, **{key: BytesStorageMetadata() for key in extra_states}}
    metadata = Metadata(described, storage_data=places, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION)
    (folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    torch.save({"checkpoint_version": 3.0, "iteration": 0}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(_MEGATRON_METADATA), encoding="utf-8")
    return records


def _write_file(
    file: HashedFile, head: bytes, chunks: Sequence[Chunk], source: BoxSource, report: Report
) -> list[tuple[int, int]]:
    """Writes one data file; returns offset and length of each chunk in it, in bytes."""

    def like(chunk: Chunk) -> tuple[tuple[int, ...], torch.dtype]:
        return chunk.content.shape, torch_dtype(chunk.content.dtype)

    file.write(head)
    places = []
    for tensor in read_ahead(chunks, like, lambda chunk, tensor: fill_from(tensor, chunk.content, source)):
        start = file.tell()
        torch.save(tensor, cast(IO[bytes], file))
        places.append((start, file.tell() - start))
        report(tensor.nbytes)
    return places


def _extra_states(layout: Layout) -> set[str]:
    keys = set()
    for slot, content in layout.items():
        module = slot.name.rpartition(".weight")[0]
        if module.split(".")[-1] in _MODULES_WITH_EXTRA_STATE:
            num_shards = content.shape[0] if is_stacked(content) else 1
            keys |= {f"{module}._extra_state/shard_{index}_{num_shards}" for index in range(num_shards)}
    return keys
