"""The share of a checkpoint that one rank writes and reads, straight from and into live memory.

Replicas of a weight take turns: each handles some of the weights that all of them hold. Of the optimizer's state a rank handles its own
shards. A shard is a range of a parameter's elements, so a few boxes of the global tensor. The files hold Megatron's `fully_reshardable`
format: tensors of the model's shapes, which any layout can load, by Megatron's loader too.

Megatron's own writer gathers the state of all replicas on each of them. Up to megatron-core 0.16.1 it also gives parameters the state of
their neighbours where a gradient bucket before theirs ends in padding (distrib_optimizer.py, "issue #504").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import DistributedOptimizer
from torch import Tensor

from conversion.boxes import Box, full, intersect, lengths, place, range_boxes, volume
from conversion.files.torch_dist import TorchDistFolder
from conversion.tensors import box_view

SHARDING_TYPE = "fully_reshardable"
"""Megatron's name of the format."""
_KINDS = ("param", "exp_avg", "exp_avg_sq")

Entry: TypeAlias = ShardedTensor | ShardedTensorFactory
Entries = dict[str, Entry]
"""Of a rank's weights, by their name in the live model; the data of each is the live tensor."""


@dataclass(frozen=True)
class _Turn:
    """Which replica of a weight handles it."""

    group: dist.ProcessGroup
    rank: int
    """In the group."""

    @property
    def is_mine(self) -> bool:
        return self.group.rank() == self.rank


def written_here(entries: Entries) -> Entries:
    """The entries, marked so that this rank writes those whose turn it has. The same on all ranks, so that each weight is written once."""
    turns = _turns(entries)
    return {name: replace(entry, replica_id=_replica_id(entry, int(not turns[name].is_mine))) for name, entry in entries.items()}


def read_weights(source: TorchDistFolder, entries: Entries) -> None:
    """Fills the live weights: each replica reads those whose turn it has, and sends them to the others. Collective over all ranks."""
    turns = _turns(entries)
    read_tensors(source, [part for name, entry in entries.items() if turns[name].is_mine for part in _parts(entry)])
    for name, turn in turns.items():
        if turn.group.size() > 1:
            dist.broadcast(entries[name].data.detach(), group=turn.group, group_src=turn.rank)


def read_tensors(source: TorchDistFolder, parts: Iterable[ShardedTensor]) -> None:
    """Fills the data of each part, in place, with its box of the stored tensor of its key. Not collective.

    Megatron's loader would do the same through pickles that can run code. Where the shapes may differ, as those of padded vocabularies,
    what is not stored becomes zero.

    Raises:
        ValueError: the checkpoint lacks a tensor, or has it in another shape; or a file is missing or damaged.
    """
    for part in parts:
        assert part.data is not None, f"{part.key} has no memory to read into"
        stored, wanted = source.shape(part.key), tuple(part.global_shape)
        size = (1,) * part.prepend_axis_num + tuple(part.local_shape)
        box: Box = tuple((start, start + length) for start, length in zip(part.global_offset, size, strict=True))
        target = part.data.detach()[(None,) * part.prepend_axis_num]
        if stored != wanted:
            if not part.allow_shape_mismatch or len(stored) != len(wanted):
                raise ValueError(f"{source.folder}: {part.key} has shape {stored}, this model needs {wanted}; name its own checkpoint")
            target.zero_()
            common = intersect(box, full(stored))
            if common is None:
                continue
            box, target = common, box_view(target, place(common, box, full(size)))
        source.read_into(part.key, box, target)


def optimizer_state(optimizer: DistributedOptimizer, entries: Entries) -> ShardedStateDict:
    """What a checkpoint holds of one of Megatron's optimizers, from the state itself. Not collective."""
    shards = {str(index): dict(shard.entries()) for index, shard in enumerate(_shards(optimizer, entries))}
    return {**optimizer.state_dict(), "param_state": shards, "param_state_sharding_type": SHARDING_TYPE}


@torch.no_grad()
def read_optimizer_state(source: TorchDistFolder, optimizers: list[DistributedOptimizer], entries: Entries) -> None:
    """Fills the shards of all optimizers, whose steps and groups of parameters are loaded already. Collective over all ranks."""
    shards = [(optimizer, shard) for optimizer in optimizers for shard in _shards(optimizer, entries)]
    read_tensors(source, [part for _, shard in shards for _, parts in shard.entries() for part in parts])
    for optimizer, shard in shards:
        # Nothing more to do, unless the optimizer keeps its state in another form than that in which it shows it.
        optimizer._set_main_param_and_optimizer_states(shard.parameter, dict(shard.state))


@dataclass(frozen=True)
class _Shard:
    """What an optimizer keeps of one parameter on this rank."""

    parameter: Tensor
    entry: Entry
    start: int
    """The first of its elements, counted in the rank's whole parameter."""
    state: Mapping[str, Tensor]
    replica_id: tuple[int, ...]

    def entries(self) -> Iterator[tuple[str, list[ShardedTensor]]]:
        """Main parameter and moments, each as boxes of a global tensor."""
        for kind in _KINDS:
            values = self.state[kind].detach()
            assert values.dtype == torch.float32, f"{kind} of {self.entry.key} is {values.dtype}"
            yield kind, [self._boxed(kind, part, run, box) for part in _parts(self.entry) for run, box in self._common(part, values)]

    def _common(self, part: ShardedTensor, values: Tensor) -> Iterator[tuple[Tensor, Box]]:
        """Elements of the shard that an entry of the parameter has too, and their box in it."""
        held, start = _box_in(part.data, self.parameter), 0
        for run in range_boxes(self.parameter.shape, self.start, self.start + values.numel()):
            piece = values[start : start + volume(run)].view(lengths(run))
            start += volume(run)
            common = intersect(run, held)
            if common is not None:
                yield box_view(piece, place(common, run, full(lengths(run)))), place(common, held, full(part.local_shape))

    def _boxed(self, kind: str, part: ShardedTensor, values: Tensor, box: Box) -> ShardedTensor:
        # Megatron takes prepended axes of length 1 only from tensors of a regular grid.
        extra = part.prepend_axis_num
        offset = (*part.global_offset[:extra], *(base + low for base, (low, _) in zip(part.global_offset[extra:], box, strict=True)))
        data = values[(None,) * extra]
        return ShardedTensor(
            f"optimizer.state.{kind}.{part.key}",
            data,
            data.dtype,
            tuple(data.shape),
            part.global_shape,
            offset,
            None,
            self.replica_id,
            allow_shape_mismatch=part.allow_shape_mismatch,
        )


def _shards(optimizer: DistributedOptimizer, entries: Entries) -> Iterator[_Shard]:
    by_parameter = {id(entry.data): entry for entry in entries.values()}
    for parameter in optimizer.model_param_gbuf_map:
        entry = by_parameter[id(parameter)]
        start = optimizer._get_model_param_range_map(parameter)["param"].start
        state = optimizer._get_main_param_and_optimizer_states(parameter)
        yield _Shard(parameter, entry, start, state, _replica_id(entry, optimizer.distributed_optimizer_instance_id))


def _turns(entries: Entries) -> dict[str, _Turn]:
    """Each replica's turns have about the same size. The same answer on all replicas."""
    dense = parallel_state.get_data_parallel_group(with_context_parallel=True)
    experts = parallel_state.get_expert_data_parallel_group()
    num_bytes = {group: [0] * group.size() for group in (dense, experts)}
    turns = {}
    for name, entry in sorted(entries.items(), key=lambda item: -item[1].data.nbytes):
        # Megatron's mark on parameters that are replicated like experts.
        group = dense if getattr(entry.data, "allreduce", True) else experts
        rank = min(range(group.size()), key=num_bytes[group].__getitem__)
        num_bytes[group][rank] += entry.data.nbytes
        turns[name] = _Turn(group, rank)
    return turns


def _replica_id(entry: Entry, replica: int) -> tuple[int, ...]:
    """The entry's id with another number of the replica; Megatron's (stage, tp rank, replica) is zeros for what is written."""
    assert isinstance(entry.replica_id, tuple) and len(entry.replica_id) == 3, f"{entry.key} has replica id {entry.replica_id}"
    return (*entry.replica_id[:2], replica)


def _parts(entry: Entry) -> list[ShardedTensor]:
    return list(nested_values(entry.build())) if isinstance(entry, ShardedTensorFactory) else [entry]


def _box_in(view: Tensor, tensor: Tensor) -> Box:
    """Where a view with the tensor's strides lies in it. What an entry gives in its place would not be live memory."""
    offset, starts = view.storage_offset() - tensor.storage_offset(), []
    assert view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() and view.stride() == tensor.stride()
    for stride in tensor.stride():
        starts.append(offset // stride)
        offset %= stride
    return tuple((start, start + size) for start, size in zip(starts, view.shape, strict=True))
