"""Checkpoint entries that follow from conversion tables, for parameters of modules that are not Megatron's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensor, ShardedTensorFactory
from torch import Tensor

from conversion.boxes import Box, Layout, Piece, Slot, SlotLayout, intersect, lengths, place
from conversion.tensors import box_view

_SUFFIX = ".weight"


@dataclass(frozen=True)
class _Part:
    """A box of a rank's tensor, and where a tensor of the checkpoint has it."""

    key: str
    shape: tuple[int, ...]
    box: Box
    local: Box


class CheckpointEntries:
    """Makes the entries of a rank's parameters. Keys of the checkpoint end in .weight, or go on with the name of a section."""

    def __init__(self, layout: Layout, checkpoint: Layout) -> None:
        """`layout` is the rank's; `checkpoint` has the global tensors of all ranks."""
        self._layout = layout
        self._holders: dict[str, list[tuple[Slot, SlotLayout, Piece]]] = {}
        for slot, content in checkpoint.items():
            for piece in content.pieces:
                self._holders.setdefault(piece.name, []).append((slot, content, piece))

    def entry(self, slot: Slot, parameter: Tensor, replica_id: ReplicaId) -> ShardedTensorFactory:
        """The entry of one parameter; exactly one of the ranks with the same part has a `replica_id` of zeros."""
        parts = self._parts(slot)
        end = parts[0].key.index(_SUFFIX) + len(_SUFFIX)

        def build(key: str, tensor: Tensor, replica_id: ReplicaId, flattened_range: slice | None) -> list[ShardedTensor]:
            assert flattened_range is None
            return [_sharded(key + part.key[end:], part, tensor, replica_id) for part in parts]

        @torch.no_grad()
        def merge(tensors: list[Tensor]) -> Tensor:
            whole = torch.empty(self._layout[slot].shape, dtype=tensors[0].dtype, device=tensors[0].device)
            for part, tensor in zip(parts, tensors, strict=True):
                box_view(whole, part.local).copy_(tensor)
            return whole

        return ShardedTensorFactory(parts[0].key[:end], parameter, build, merge, replica_id)

    def _parts(self, slot: Slot) -> list[_Part]:
        parts: list[_Part] = []
        for piece in self._layout[slot].pieces:
            for holder, content, held in self._holders[piece.name]:
                common = intersect(piece.box, held.box)
                if common is not None:
                    box, local = place(common, held.box, held.local), place(common, piece.box, piece.local)
                    parts.append(_Part(holder.name, content.shape, box, local))
        return _joined(parts)


def _joined(parts: list[_Part]) -> list[_Part]:
    """With parts in one where rows follow each other in both tensors: query, key and value of a rank are one block of the checkpoint."""
    joined: list[_Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        dim = len(part.box) - len(part.local)
        if last is not None and last.key == part.key and last.box[:dim] == part.box[:dim]:
            if last.box[dim][1] == part.box[dim][0] and last.local[0][1] == part.local[0][0]:
                box = (*last.box[:dim], (last.box[dim][0], part.box[dim][1]), *last.box[dim + 1 :])
                joined[-1] = _Part(last.key, last.shape, box, ((last.local[0][0], part.local[0][1]), *last.local[1:]))
                continue
        joined.append(part)
    return joined


def _sharded(key: str, part: _Part, tensor: Tensor, replica_id: ReplicaId) -> ShardedTensor:
    data, sizes = box_view(tensor, part.local), lengths(part.box)
    return ShardedTensor(
        key,
        data,
        data.dtype,
        tuple(data.shape),
        part.shape,
        tuple(start for start, _ in part.box),
        tuple(total // size for total, size in zip(part.shape, sizes, strict=True)),
        replica_id,
        len(part.box) - data.ndim,
    )
