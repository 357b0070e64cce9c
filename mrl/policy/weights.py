# SPDX-License-Identifier: Apache-2.0
"""A rank's live weights by slot: finding them, the arena that engines map, the check of equal copies. No Megatron."""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conversion.boxes import Box, Layout, Slot, lengths
from conversion.tensors import box_view, dtype_name
from mrl import spans
from mrl.policy.host_block import block_offsets
from mrl.refit.checksum import Checksums, Summed
from mrl.refit.memory import ArenaHandle, ArenaRow, SharedMemory

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

# Relative change by `perturb`: well above bfloat16's resolution of 2^-8, so that nearly every element changes.
SCALE = 0.02
# Added on top, so that zeros change too (a fresh router bias is all zeros).
OFFSET = 1e-3

# Odd 64-bit constants of splitmix64 (https://prng.di.unimi.it/splitmix64.c), as signed numbers.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = 0xBF58476D1CE4E5B9 - (1 << 64)
_NUM_BITS = 24


def live_tensors(model: nn.Module, chunk: int = 0) -> dict[Slot, Tensor]:
    """Parameters and persistent buffers of a model by slot: the tensors themselves, not copies."""
    state = model.state_dict(keep_vars=True)
    return {
        Slot(table_name(name), chunk): tensor for name, tensor in state.items() if not name.endswith("_extra_state")
    }


def table_name(name: str) -> str:
    """The name in conversion tables and checkpoints of a weight of the live model, with any megatron-core version."""
    # From 0.17 on, the mixer itself holds the tensors of its convolution.
    return name.replace(".mixer.conv1d_", ".mixer.conv1d.")


def rank_tensors(models: Sequence[nn.Module], layout: Layout) -> dict[Slot, Tensor]:
    """Every parameter and persistent buffer of this rank, by slot: the live tensors. `models` are bare of wrappers."""

    def named(slots: Iterable[Slot]) -> str:
        return ", ".join(sorted(map(str, slots))[:10]) or "none"

    tensors: dict[Slot, Tensor] = {}
    for index, model in enumerate(models):
        tensors |= live_tensors(model, index)
    if tensors.keys() != layout.keys():
        unknown, missing = tensors.keys() - layout.keys(), layout.keys() - tensors.keys()
        raise RuntimeError(
            f"weights that the conversion table lacks: {named(unknown)}; that only the table has: {named(missing)}"
        )
    for slot, tensor in tensors.items():
        live = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        table = (layout[slot].shape, layout[slot].dtype)
        if live != table:
            raise RuntimeError(f"{slot.name} is {live} in the model, but {table} in the conversion table")
    return tensors


def buffer_views(chunks: Sequence[DistributedDataParallel]) -> list[Tensor]:
    """The contiguous parameter buffers of Megatron's DDP and their buckets; none without the distributed optimizer."""
    buffers = [buffer for chunk in chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    views = [buffer.param_data for buffer in buffers] + [
        bucket.param_data for buffer in buffers for bucket in buffer.buckets
    ]
    return [view for view in views if view is not None]


class Arena:
    """Owns a rank's weight memory, which its GPU's engine workers can map. Create after DDP, before the optimizer."""

    @torch.no_grad()
    def __init__(self, slots: Mapping[Slot, Tensor], views: Iterable[Tensor] = (), *, name: str) -> None:
        """Moves the storage of every tensor into shared memory, values unchanged; the tensors stay the same objects.

        Tensors that share a storage still share it. `views` must therefore name every other tensor in use on these
        storages (Megatron's buffers and buckets); a forgotten one loses its memory on a GPU.

        The weights are never there twice: those of a GPU wait on the host until the arena has its memory, and on the
        host each storage goes once it is copied.
        """
        strided = [str(slot) for slot, tensor in slots.items() if not tensor.is_contiguous()]
        if strided:
            raise ValueError(
                f"weights must be contiguous to be shared with the engine; these are not: {', '.join(strided)}"
            )
        devices = {tensor.device: slot for slot, tensor in slots.items()}
        if len(devices) != 1:
            found = ", ".join(f"{slot} on {device}" for device, slot in devices.items())
            raise ValueError(
                f"all weights of a rank lie on one device to be shared with the engine; found {found or 'no weights'}"
            )
        # Tied slots are one tensor under two names, which moves once. Buffers without slots, such as those of adapters,
        # stay.
        storages = {tensor.untyped_storage().data_ptr() for tensor in slots.values()}
        views = [view for view in views if view.untyped_storage().data_ptr() in storages]
        sharing: dict[int, list[Tensor]] = defaultdict(list)
        for tensor in {id(tensor): tensor for tensor in [*slots.values(), *views]}.values():
            sharing[tensor.untyped_storage().data_ptr()].append(tensor)
        (device,) = devices
        waiting = [(_off_device(tensors[0]), tensors) for tensors in sharing.values()]
        del sharing, views
        offsets, num_bytes = block_offsets([values.nbytes for values, _ in waiting])
        self._slots = dict(slots)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        self._memory = SharedMemory(num_bytes, name, device)
        memory = self._memory.tensor
        for offset in reversed(offsets):
            values, tensors = waiting.pop()
            memory[offset : offset + values.nbytes].copy_(values)
            for tensor in tensors:
                start = memory.storage_offset() + offset + tensor.storage_offset() * tensor.element_size()
                home = torch.tensor([], dtype=tensor.dtype, device=device)
                home.set_(memory.untyped_storage(), start // tensor.element_size(), tensor.shape, tensor.stride())
                # Assigning .data keeps the tensor object, which model and buffers hold, and its gradient accumulator
                # with DDP's hooks; set_ on the tensor itself would create a new accumulator, and no gradient would
                # reach DDP.
                tensor.data = home
            del values, tensors, tensor
        self._table = {
            slot: ArenaRow(tensor.data_ptr() - memory.data_ptr(), tuple(tensor.shape), dtype_name(tensor.dtype))
            for slot, tensor in slots.items()
        }

    def handle(self) -> ArenaHandle:
        return ArenaHandle(self._memory.handle(), self._table)

    def tensors(self) -> dict[Slot, Tensor]:
        """The weights by slot: the live tensors, not copies."""
        return dict(self._slots)

    def check(self, live: Mapping[Slot, Tensor]) -> None:
        """Checks that `live`, the model's present weights, are still the ones in the arena."""
        base = self._memory.tensor.data_ptr()
        moved = [
            str(slot)
            for slot, row in self._table.items()
            if slot not in live or live[slot].data_ptr() != base + row.offset
        ]
        added = [str(slot) for slot in live if slot not in self._table]
        if moved or added:
            raise RuntimeError(f"weights outside of the arena, which a refit would miss: {', '.join(moved + added)}")


def _off_device(tensor: Tensor) -> Tensor:
    """Bytes of a tensor's storage in host memory; those of a GPU are copied there, and freed on it."""
    storage = tensor.untyped_storage()
    values = torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage)
    if not tensor.is_cuda:
        return values
    values = values.cpu()
    storage.resize_(0)
    return values


class CopyCheck:
    """Compares all copies of every box of canonical tensors, on any rank: dp replicas, tp duplicates, tied weights."""

    def __init__(self, tensors: Mapping[Slot, Tensor], layout: Layout) -> None:
        """Collective over all ranks."""
        own = [(slot, piece) for slot, content in layout.items() for piece in content.pieces]
        self._views = [box_view(tensors[slot], piece.local) for slot, piece in own]
        self._addresses: list[int] = []
        everyone: list[list[tuple[str, str, Box]]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everyone, [(slot.name, piece.name, piece.box) for slot, piece in own])
        self._max_pieces = max(len(pieces) for pieces in everyone)
        copies: dict[tuple[str, Box], list[tuple[str, int, int]]] = defaultdict(list)
        for rank, pieces in enumerate(everyone):
            for index, (slot_name, name, box) in enumerate(pieces):
                copies[name, box].append((slot_name, rank, index))
        self._shared = {key: held for key, held in copies.items() if len(held) > 1}

    def run(self) -> None:
        """Checks the current bytes. Collective over all ranks."""
        start = time.monotonic()
        # Weights of teachers and critics return to the device at other addresses.
        if (addresses := [view.data_ptr() for view in self._views]) != self._addresses:
            self._checksums, self._addresses = Checksums([Summed(view) for view in self._views]), addresses
        sums = torch.full((self._max_pieces,), -1, dtype=torch.int64)
        sums[: len(self._views)] = self._checksums.take()
        gathered = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, sums)
        table = torch.stack(gathered).tolist()
        errors = []
        for (name, box), copies in self._shared.items():
            ranks_by_sum: dict[int, list[int]] = defaultdict(list)
            for _, rank, index in copies:
                ranks_by_sum[table[rank][index]].append(rank)
            if len(ranks_by_sum) > 1:
                errors.append(f"{copies[0][0]} ({name} {box}): ranks {' / '.join(map(str, ranks_by_sum.values()))}")
        if errors:
            raise RuntimeError(f"copies of weights differ between ranks ({len(errors)}): {'; '.join(errors[:10])}")
        spans.add("compare copies", start, weights=len(self._shared), copies=sum(map(len, self._shared.values())))


@torch.no_grad()
def perturb(tensors: Mapping[Slot, Tensor], layout: Layout, *, seed: int) -> None:
    """Changes every element of the tensors that comes from a canonical one, in place; padding stays zero."""
    for slot, content in layout.items():
        for piece in content.pieces:
            view = box_view(tensors[slot], piece.local)
            noise = canonical_noise(piece.name, piece.box, seed=seed).view(view.shape).to(view.device)
            view.copy_(view.float() * (1 + SCALE * noise) + OFFSET * noise)


def name_seed(seed: int, name: str) -> int:
    """A 64-bit seed for each canonical tensor, independent of the layout."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big", signed=True)


def canonical_noise(name: str, box: Box, *, seed: int) -> Tensor:
    """float32 numbers in [-1, 1) of the box's shape: a function of seed, canonical name and position in the tensor."""
    state = torch.tensor(name_seed(seed, name))
    for start, stop in box:
        # Mixed dimension by dimension, so that no two positions of a tensor coincide. Shifts that keep the sign do no
        # harm.
        state = state[..., None] + torch.arange(start, stop) * _STEP
        state = (state ^ (state >> 30)) * _MIX
        state = state ^ (state >> 27)
    uniform = (state.view(lengths(box)) & ((1 << _NUM_BITS) - 1)).float() / (1 << _NUM_BITS)
    return 2 * uniform - 1
