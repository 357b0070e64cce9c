# SPDX-License-Identifier: Apache-2.0
"""Entries of a checkpoint: the boxes of global tensors that one rank writes from live memory and reads into it.

Replicas share the weights that all of them hold: each handles some. A rank handles its own shards of the optimizer's
state, each a range of a parameter's elements, so a few boxes of the global tensor. The files have Megatron's
`fully_reshardable` format: tensors of the model's shapes, which any layout can load, also by Megatron's loader.

Megatron's own writer gathers the state of all replicas on each of them. Up to megatron-core 0.16.1 it also gives
parameters the state of their neighbours where an earlier gradient bucket ends in padding (distrib_optimizer.py, "issue
#504").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import DistributedOptimizer
from torch import Tensor

from conversion.boxes import Box, Layout, Piece, Slot, SlotLayout, full, intersect, lengths, place, range_boxes, volume
from conversion.files.torch_dist import TorchDistFolder
from conversion.tensors import box_view

SHARDING_TYPE = "fully_reshardable"
_KINDS = ("param", "exp_avg", "exp_avg_sq")
_PREFIX, _SUFFIX = "optimizer.state.", ".weight"

WeightEntry: TypeAlias = ShardedTensor | ShardedTensorFactory
"""Checkpoint entry of one weight of this rank; its data is the live tensor."""
WeightEntries = dict[str, WeightEntry]


def written_here(entries: WeightEntries) -> WeightEntries:
    """The entries, marked so that this rank writes its share: over all ranks, each weight once."""
    turns = _turns(entries)
    return {
        name: replace(entry, replica_id=_replica_id(entry, int(not turns[name][2]))) for name, entry in entries.items()
    }


def read_weights(source: TorchDistFolder, entries: WeightEntries) -> None:
    """Fills the live weights: each replica reads its share, and sends it to the others. Collective over all ranks."""
    turns = _turns(entries)
    read_tensors(source, [part for name, entry in entries.items() if turns[name][2] for part in _parts(entry)])
    for name, (group, rank, _) in turns.items():
        if group.size() > 1:
            dist.broadcast(entries[name].data.detach(), group=group, group_src=rank)


def read_tensors(source: TorchDistFolder, parts: Iterable[ShardedTensor]) -> None:
    """Fills the data of each part, in place, with its box of the stored tensor of its key. Not collective.

    Where shapes may differ, as with padded vocabularies, missing elements become zero.
    """
    for part in parts:
        assert part.data is not None, f"{part.key} has no memory to read into"
        stored, wanted = source.shape(part.key), tuple(part.global_shape)
        size = (1,) * part.prepend_axis_num + tuple(part.local_shape)
        box: Box = tuple((start, start + length) for start, length in zip(part.global_offset, size, strict=True))
        target = part.data.detach()[(None,) * part.prepend_axis_num]
        if stored != wanted:
            if not part.allow_shape_mismatch or len(stored) != len(wanted):
                raise ValueError(
                    f"{source.folder}: {part.key} has shape {stored}, this model needs {wanted}; name its own "
                    "checkpoint"
                )
            target.zero_()
            common = intersect(box, full(stored))
            if common is None:
                continue
            box, target = common, box_view(target, place(common, box, full(size)))
        source.read_into(part.key, box, target)


def optimizer_state(optimizer: DistributedOptimizer, entries: WeightEntries) -> ShardedStateDict:
    """The checkpoint entries of a Megatron optimizer; their tensors are views of live state. Not collective."""
    shards = {str(index): parts for index, (_, _, parts) in enumerate(_shards(optimizer, entries))}
    return {**optimizer.state_dict(), "param_state": shards, "param_state_sharding_type": SHARDING_TYPE}


@torch.no_grad()
def read_optimizer_state(
    source: TorchDistFolder, optimizers: list[DistributedOptimizer], entries: WeightEntries
) -> None:
    """Fills the shards of all optimizers; steps and parameter groups are loaded already. Collective over all ranks."""
    shards = [(optimizer, *shard) for optimizer in optimizers for shard in _shards(optimizer, entries)]
    wanted = [part for *_, by_kind in shards for parts in by_kind.values() for part in parts]
    if missing := sorted({part.key.removeprefix(f"{_PREFIX}param.") for part in wanted if part.key not in source.keys}):
        raise ValueError(
            f"{source.folder} has no optimizer state of {missing[0]} (tensors without: {len(missing)}), which was "
            "not trained when this was saved; leave it as it is (policy.megatron_cfg.freeze_config, "
            "freeze_moe_router, mtp_num_layers), or start a run from what `python -m mrl.convert mcore-to-hf` "
            "makes of it"
        )
    read_tensors(source, wanted)
    for optimizer, parameter, state, _ in shards:
        optimizer._set_main_param_and_optimizer_states(parameter, dict(state))


def _shards(
    optimizer: DistributedOptimizer, entries: WeightEntries
) -> Iterator[tuple[Tensor, dict[str, Tensor], dict[str, list[ShardedTensor]]]]:
    """Parameters that the optimizer shards on this rank, with its main values and moments: whole, and by boxes."""
    by_parameter = {id(entry.data): entry for entry in entries.values()}
    for parameter in optimizer.model_param_gbuf_map:
        entry = by_parameter[id(parameter)]
        start = optimizer._get_model_param_range_map(parameter)["param"].start
        state = optimizer._get_main_param_and_optimizer_states(parameter)
        replica_id = _replica_id(entry, optimizer.distributed_optimizer_instance_id)
        boxes: dict[str, list[ShardedTensor]] = {}
        for kind in _KINDS:
            values = state[kind].detach()
            assert values.dtype == torch.float32, f"{kind} of {entry.key} is {values.dtype}"
            boxes[kind] = [
                box for part in _parts(entry) for box in _boxes(kind, part, values, parameter, start, replica_id)
            ]
        yield parameter, state, boxes


def _boxes(
    kind: str, part: ShardedTensor, values: Tensor, parameter: Tensor, start: int, replica_id: tuple[int, ...]
) -> Iterator[ShardedTensor]:
    """Yields entries like a parameter's for `values`, which belong to the parameter's elements from `start` on."""
    data, extra, first = part.data, part.prepend_axis_num, 0
    assert (
        data.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
        and data.stride() == parameter.stride()
    )
    offset, starts = data.storage_offset() - parameter.storage_offset(), []
    for stride in parameter.stride():
        starts.append(offset // stride)
        offset %= stride
    held: Box = tuple((low, low + size) for low, size in zip(starts, data.shape, strict=True))
    for run in range_boxes(parameter.shape, start, start + values.numel()):
        piece = values[first : first + volume(run)].view(lengths(run))
        first += volume(run)
        common = intersect(run, held)
        if common is None:
            continue
        shown = box_view(piece, place(common, run, full(lengths(run))))[(None,) * extra]
        box = place(common, held, full(part.local_shape))
        lows = (base + low for base, (low, _) in zip(part.global_offset[extra:], box, strict=True))
        yield ShardedTensor(
            f"{_PREFIX}{kind}.{part.key}",
            shown,
            shown.dtype,
            tuple(shown.shape),
            part.global_shape,
            (*part.global_offset[:extra], *lows),
            None,
            replica_id,
            allow_shape_mismatch=part.allow_shape_mismatch,
        )


def _turns(entries: WeightEntries) -> dict[str, tuple[dist.ProcessGroup, int, bool]]:
    """Assigns each weight to one of its replicas, in about equal shares: replicas, chosen rank, whether it is this."""
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    experts = parallel_state.get_expert_data_parallel_group()
    num_bytes = {group: [0] * group.size() for group in (dense, experts)}
    turns = {}
    for name, entry in sorted(entries.items(), key=lambda item: -item[1].data.nbytes):
        # Megatron's mark on parameters that are replicated like experts.
        group = dense if getattr(entry.data, "allreduce", True) else experts
        rank = min(range(group.size()), key=num_bytes[group].__getitem__)
        num_bytes[group][rank] += entry.data.nbytes
        turns[name] = group, rank, group.rank() == rank
    return turns


def _replica_id(entry: WeightEntry, replica: int) -> tuple[int, ...]:
    """The entry's id, (stage, tp rank, replica), with another replica; Megatron writes entries whose id is zeros."""
    assert isinstance(entry.replica_id, tuple) and len(entry.replica_id) == 3, (
        f"{entry.key} has replica id {entry.replica_id}"
    )
    return (*entry.replica_id[:2], replica)


def _parts(entry: WeightEntry) -> list[ShardedTensor]:
    return list(nested_values(entry.build())) if isinstance(entry, ShardedTensorFactory) else [entry]


@dataclass(frozen=True)
class _TablePart:
    """A box of a rank's tensor, and the box of a checkpoint's tensor that holds it."""

    key: str
    shape: tuple[int, ...]
    box: Box
    local: Box


class LayoutEntries:
    """Makes entries of a rank's parameters from tables. Only keys with .weight may have a suffix, a section's name."""

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
        suffix = parts[0].key.find(_SUFFIX)
        end = len(parts[0].key) if suffix < 0 else suffix + len(_SUFFIX)

        def build(
            key: str, tensor: Tensor, replica_id: ReplicaId, flattened_range: slice | None
        ) -> list[ShardedTensor]:
            assert flattened_range is None
            entries = []
            for part in parts:
                data = box_view(tensor, part.local)
                start = tuple(low for low, _ in part.box)
                grid = tuple(total // size for total, size in zip(part.shape, lengths(part.box), strict=True))
                extra = len(part.box) - data.ndim
                entries.append(
                    ShardedTensor(
                        key + part.key[end:],
                        data,
                        data.dtype,
                        tuple(data.shape),
                        part.shape,
                        start,
                        grid,
                        replica_id,
                        extra,
                    )
                )
            return entries

        @torch.no_grad()
        def merge(tensors: list[Tensor]) -> Tensor:
            whole = torch.empty(self._layout[slot].shape, dtype=tensors[0].dtype, device=tensors[0].device)
            for part, tensor in zip(parts, tensors, strict=True):
                box_view(whole, part.local).copy_(tensor)
            return whole

        return ShardedTensorFactory(parts[0].key[:end], parameter, build, merge, replica_id)

    def _parts(self, slot: Slot) -> list[_TablePart]:
        """Joins parts with adjacent rows in both tensors: query, key and value of a rank are one checkpoint block."""
        joined: list[_TablePart] = []
        for piece in self._layout[slot].pieces:
            for holder, content, held in self._holders[piece.name]:
                common = intersect(piece.box, held.box)
                if common is None:
                    continue
                box, local = place(common, held.box, held.local), place(common, piece.box, piece.local)
                last, dim = joined[-1] if joined else None, len(box) - len(local)
                if last is not None and last.key == holder.name and last.box[:dim] == box[:dim]:
                    if last.box[dim][1] == box[dim][0] and last.local[0][1] == local[0][0]:
                        box = (*last.box[:dim], (last.box[dim][0], box[dim][1]), *last.box[dim + 1 :])
                        local = ((last.local[0][0], local[0][1]), *last.local[1:])
                        joined.pop()
                joined.append(_TablePart(holder.name, content.shape, box, local))
        return joined
