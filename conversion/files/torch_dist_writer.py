"""Writes Megatron's torch_dist checkpoints without Megatron: how tensors are cut into chunks and files, and the files.

A file is what torch's FileSystemWriter makes: one torch.save after the other. The writer itself keeps every tensor of a file in memory
until the file is complete, so it cannot write large files.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Iterator, Sequence
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
    subtract,
    volume,
)
from conversion.families.common import Family, HfConfig, MegatronCoords, MegatronParallel
from conversion.files.checkpoint_metadata import METADATA_FILE
from conversion.files.hashed_files import FinishedFiles, HashedFile
from conversion.files.manifest import FileRecord
from conversion.progress import Report, counter
from conversion.tensors import BoxSource, fill_from, torch_dtype

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


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a global tensor that is stored, and later read, as one."""

    key: str
    offsets: tuple[int, ...]
    content: SlotLayout

    @property
    def num_bytes(self) -> int:
        """Size of its content."""
        return math.prod(self.content.shape) * DTYPE_BYTES[self.content.dtype]


ChunkBoxes = dict[str, list[Box]]
"""Boxes of global tensors, by key."""


def restricted(content: SlotLayout, box: Box) -> SlotLayout:
    """What a box of a tensor consists of, as a tensor of its own."""
    pieces = []
    for piece in content.pieces:
        common = intersect(piece.local, box)
        if common is not None:
            extra = len(piece.local) - len(piece.box)
            inside = place(common[extra:], piece.local[extra:], piece.box)
            pieces.append(Piece(piece.name, inside, counted_from(common, box), piece.transform))
    padding = tuple(counted_from(common, box) for hole in content.padding if (common := intersect(hole, box)) is not None)
    return replace(content, shape=lengths(box), pieces=tuple(pieces), padding=padding)


def files_of_size(layout: Layout, max_file_bytes: int, max_bytes: int) -> list[list[Chunk]]:
    """Files of about `max_file_bytes`: a chunk per expert where experts are stacked, else per tensor."""
    boxes = {slot.name: list(_experts(content)) for slot, content in layout.items()}
    files: list[list[Chunk]] = [[]]
    num_bytes = 0
    for chunk in _chunks(layout, boxes, max_bytes):
        if files[-1] and num_bytes + chunk.num_bytes > max_file_bytes:
            files.append([])
            num_bytes = 0
        files[-1].append(chunk)
        num_bytes += chunk.num_bytes
    return files


def files_of_ranks(family: Family, hf_config: HfConfig, parallel: MegatronParallel, layout: Layout, max_bytes: int) -> list[list[Chunk]]:
    """A file for each (tp, pp, ep, etp) rank with the chunks that it reads; what several ranks read lies in the first one's.

    Raises:
        ValueError: the model cannot be cut so.
    """
    holders: dict[str, list[tuple[str, Piece]]] = {}
    for slot, content in layout.items():
        for piece in content.pieces:
            holders.setdefault(piece.name, []).append((slot.name, piece))
    taken: dict[tuple[str, Box], list[Box]] = {}
    files: list[ChunkBoxes] = []
    for coords in _ranks(parallel):
        rank = family.megatron_layout(hf_config, parallel, coords, "float32", "te")
        read = _read_by(rank, holders)
        stacked = {key: is_stacked(layout[Slot(key)]) for key in read}
        files.append({key: _joined_up(_untaken(key, boxes, taken, stacked[key]), stacked=stacked[key]) for key, boxes in read.items()})
    for slot, content in layout.items():
        # Padding has no canonical source, so that no rank's layout has named it. It goes where the last rows of the tensor are.
        last = next(file for file in reversed(files) if file.get(slot.name))
        last[slot.name] += content.padding
    return [_chunks(layout, boxes, max_bytes) for boxes in files]


def _ranks(parallel: MegatronParallel) -> Iterator[MegatronCoords]:
    """The distinct coordinates of the smallest world of these sizes."""
    world_size = parallel.pp * math.lcm(parallel.tp, parallel.ep * parallel.etp)
    sizes = replace(parallel, cp=1)
    yield from dict.fromkeys(sizes.coords_of(rank, world_size) for rank in range(world_size))


def _read_by(rank: Layout, holders: dict[str, list[tuple[str, Piece]]]) -> ChunkBoxes:
    """The boxes of global tensors that a rank's tensors are made of."""
    boxes: ChunkBoxes = {}
    for content in rank.values():
        for piece in content.pieces:
            for key, held in holders[piece.name]:
                common = intersect(piece.box, held.box)
                if common is not None:
                    boxes.setdefault(key, []).append(place(common, held.box, held.local))
    return boxes


def _untaken(key: str, boxes: list[Box], taken: dict[tuple[str, Box], list[Box]], stacked: bool) -> list[Box]:
    """What no rank before has taken."""
    found = []
    for box in boxes:
        # Experts do not overlap each other; looking at one at a time keeps this linear in their number.
        others = taken.setdefault((key, box[:1] if stacked else ()), [])
        rest = [box]
        for other in others:
            rest = [left for part in rest for left in subtract(part, other)]
        others += rest
        found += rest
    return found


def _joined_up(boxes: list[Box], *, stacked: bool) -> list[Box]:
    """The same elements in fewer boxes: those that follow each other along one dimension become one. Experts stay apart."""
    found: list[Box] = []
    for box in sorted(boxes):
        joined = _joined(found[-1], box) if found and not (stacked and found[-1][0] != box[0]) else None
        found[-1:] = [joined] if joined else [*found[-1:], box]
    return found


def _joined(first: Box, second: Box) -> Box | None:
    different = [dim for dim, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if len(different) != 1 or first[different[0]][1] != second[different[0]][0]:
        return None
    (dim,) = different
    return (*first[:dim], (first[dim][0], second[dim][1]), *first[dim + 1 :])


def _chunks(layout: Layout, boxes: ChunkBoxes, max_bytes: int) -> list[Chunk]:
    chunks = []
    # In the order of the layout: that of the source, which is then read front to back.
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


def _experts(content: SlotLayout) -> Iterator[Box]:
    if not is_stacked(content):
        yield full(content.shape)
        return
    for index in range(content.shape[0]):
        yield ((index, index + 1), *full(content.shape[1:]))


def is_stacked(content: SlotLayout) -> bool:
    """Whether the first dimension of a global tensor counts experts."""
    return any(len(piece.local) > len(piece.box) for piece in content.pieces)


def write_torch_dist(
    folder: Path, layout: Layout, files: Sequence[Sequence[Chunk]], source: BoxSource, *, progress: Report | None = None
) -> dict[str, FileRecord]:
    """Writes a checkpoint of weights that megatron.core.dist_checkpointing loads at any parallel layout; checksums of its data files.

    `files` holds the chunks of each file, which together are the layout's tensors. What an interrupted call has written of them is kept
    if it is still right. `progress` gets numbers of bytes as they are done.
    """
    report = progress or counter(None, 0)
    metadata = Metadata(
        {
            slot.name: TensorStorageMetadata(TensorProperties(dtype=torch_dtype(content.dtype)), torch.Size(content.shape), [])
            for slot, content in layout.items()
        },
        storage_data={},
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )
    with FinishedFiles() as finished:
        for index, chunks in enumerate(files):
            path = folder / f"__{index}_0.distcp"
            extra_states = sorted(_extra_states(layout)) if index == 0 else []
            note, is_kept = finished.written(
                path, lambda out, states=extra_states, chunks=chunks: _write_file(out, states, chunks, source, report)
            )
            if is_kept:
                report(sum(chunk.num_bytes for chunk in chunks), is_kept=True)
            _describe(metadata, path.name, extra_states, chunks, cast("list[Place]", note))
        records = finished.records()
    (folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    torch.save({"checkpoint_version": 3.0, "iteration": 0}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(_MEGATRON_METADATA), encoding="utf-8")
    return records


def _write_file(file: HashedFile, extra_states: Sequence[str], chunks: Sequence[Chunk], source: BoxSource, report: Report) -> list[Place]:
    file.write(_EMPTY_STATE * len(extra_states))
    places = []
    for chunk in chunks:
        tensor = torch.empty(chunk.content.shape, dtype=torch_dtype(chunk.content.dtype))
        fill_from(tensor, chunk.content, source)
        start = file.tell()
        torch.save(tensor, cast(IO[bytes], file))
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
