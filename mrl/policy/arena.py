"""The weight arena: all parameters and persistent buffers of a rank in one memory that the engine workers of its GPU can map."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from conversion.boxes import Slot
from conversion.tensors import dtype_name
from mrl.policy.host_block import block_offsets
from mrl.refit.memory import ArenaHandle, ArenaRow, SharedMemory

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel


class Arena:
    """Owns the memory of a rank's weights.

    Make it after wrapping in DDP, which lays trainable parameters out in contiguous buffers, and before the optimizer, which keeps views
    into those buffers.
    """

    def __init__(self, slots: Mapping[Slot, Tensor], views: Iterable[Tensor] = (), *, name: str) -> None:
        """Moves the storage of every tensor into shared memory, values unchanged; the tensors stay the same objects.

        Tensors that share a storage move together and go on sharing it. So `views` must name every other tensor into these storages that
        is still used (Megatron's buffers and buckets); a forgotten one keeps the old memory.

        Raises:
            ValueError: a slot is not contiguous, or slots lie on several devices.
        """
        strided = [str(slot) for slot, tensor in slots.items() if not tensor.is_contiguous()]
        if strided:
            raise ValueError(f"weights must be contiguous to be shared with the engine; these are not: {', '.join(strided)}")
        self._slots = dict(slots)
        # Tied slots are one tensor under two names; it moves once.
        storages = {tensor.untyped_storage().data_ptr() for tensor in slots.values()}
        # Buffers of parameters that are no slots, such as adapters, stay where they are.
        views = [view for view in views if view.untyped_storage().data_ptr() in storages]
        tensors = {id(tensor): tensor for tensor in [*slots.values(), *views]}.values()
        old = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        places, num_bytes = block_offsets([storage.nbytes() for storage in old.values()])
        offsets = dict(zip(old, places, strict=True))
        self._memory = SharedMemory(num_bytes, name, _device(slots))
        for address, storage in old.items():
            values = torch.tensor([], dtype=torch.uint8, device=storage.device).set_(storage)
            self._memory.tensor[offsets[address] : offsets[address] + storage.nbytes()].copy_(values)
        for tensor in tensors:
            _rehome(tensor, self._memory.tensor, offsets[tensor.untyped_storage().data_ptr()])
        self._table = {slot: self._row(tensor) for slot, tensor in self._slots.items()}
        if self._memory.tensor.device.type == "cuda":
            # The engine on this GPU needs the memory that the weights have left.
            torch.cuda.empty_cache()

    def handle(self) -> ArenaHandle:
        """The arena as the engine workers of this GPU see it."""
        return ArenaHandle(self._memory.handle(), self._table)

    def tensors(self) -> dict[Slot, Tensor]:
        """The weights by slot: the live tensors, not copies."""
        return dict(self._slots)

    def check(self, live: Mapping[Slot, Tensor]) -> None:
        """Checks that `live`, the weights as the model holds them now, are still the ones in the arena.

        Raises:
            RuntimeError: names the slots that have other memory, are new or are lost since the arena was made.
        """
        base = self._memory.tensor.data_ptr()
        moved = [str(slot) for slot, row in self._table.items() if slot not in live or live[slot].data_ptr() != base + row.offset]
        added = [str(slot) for slot in live if slot not in self._table]
        if moved or added:
            raise RuntimeError(f"weights outside of the arena, which a refit would miss: {', '.join(moved + added)}")

    def _row(self, tensor: Tensor) -> ArenaRow:
        return ArenaRow(tensor.data_ptr() - self._memory.tensor.data_ptr(), tuple(tensor.shape), dtype_name(tensor.dtype))


def live_tensors(model: nn.Module, chunk: int = 0) -> dict[Slot, Tensor]:
    """Parameters and persistent buffers of a model by slot: the tensors themselves, not copies."""
    # Transformer Engine adds `_extra_state` entries, which are not weights.
    state = model.state_dict(keep_vars=True)
    return {Slot(name, chunk): tensor for name, tensor in state.items() if not name.endswith("_extra_state")}


def buffer_views(chunks: Sequence[DistributedDataParallel]) -> list[Tensor]:
    """The contiguous parameter buffers of Megatron's DDP and their buckets; none without the distributed optimizer."""
    buffers = [buffer for chunk in chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    views = [buffer.param_data for buffer in buffers] + [bucket.param_data for buffer in buffers for bucket in buffer.buckets]
    return [view for view in views if view is not None]


def _device(slots: Mapping[Slot, Tensor]) -> torch.device:
    devices = {tensor.device: slot for slot, tensor in slots.items()}
    if len(devices) != 1:
        found = ", ".join(f"{slot} on {device}" for device, slot in devices.items())
        raise ValueError(f"all weights of a rank lie on one device to be shared with the engine; found {found or 'no weights'}")
    return next(iter(devices))


@torch.no_grad()
def _rehome(tensor: Tensor, memory: Tensor, offset: int) -> None:
    start = memory.storage_offset() + offset + tensor.storage_offset() * tensor.element_size()
    home = torch.tensor([], dtype=tensor.dtype, device=memory.device)
    home.set_(memory.untyped_storage(), start // tensor.element_size(), tensor.shape, tensor.stride())
    # Assigning .data keeps the tensor object, which model and buffers know, and its gradient accumulator, on which DDP's hooks hang;
    # set_ on the tensor itself would give it a new accumulator, and no gradient would ever reach DDP.
    tensor.data = home
