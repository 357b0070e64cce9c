# SPDX-License-Identifier: Apache-2.0
"""Host memory for tensors that leave the device: one block for all of them, pinned on GPU hosts.

Torch's own pinned memory rounds each tensor up to a power of two: 20 MB take 34.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ALIGNMENT = 256
"""Bytes to which every tensor in a block is aligned, as CUDA aligns its allocations. Megatron starts its buckets at
multiples of them, too: with less, cuBLAS may pick an algorithm that does not fit the address
(megatron/core/distributed/param_and_grad_buffer.py)."""


def _pageable(num_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def pinned(num_bytes: int) -> Tensor:
    """Allocates a block of page-locked memory, uint8; `unpin` it before freeing it."""
    block, runtime = _pageable(num_bytes), torch.cuda.cudart()
    assert runtime is not None
    torch.cuda.check_error(runtime.cudaHostRegister(block.data_ptr(), num_bytes, 0))
    return block


def unpin(block: Tensor) -> None:
    """Unlocks a block of `pinned` memory without tensors."""
    # No copy may be running when the pages are unlocked.
    torch.cuda.synchronize()
    runtime = torch.cuda.cudart()
    assert runtime is not None
    torch.cuda.check_error(runtime.cudaHostUnregister(block.data_ptr()))


class HostBlock:
    """The block of host memory that a set of tensors shares while it is off the device."""

    def __init__(self, allocate: Callable[[int], Tensor] = pinned, release: Callable[[Tensor], object] = unpin) -> None:
        """`allocate` makes a block of the given size, uint8; `release` takes back a block without tensors."""
        self._allocate, self._release = allocate, release
        self._block: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._block is None else self._block.nbytes

    def holds(self, tensor: Tensor) -> bool:
        return (
            self._block is not None and tensor.untyped_storage().data_ptr() == self._block.untyped_storage().data_ptr()
        )

    @torch.no_grad()
    def take_in(self, tensors: Sequence[Tensor]) -> None:
        """Moves the tensors into the block, which then holds nothing else; keeps values and tensor objects."""
        held = [self.holds(tensor) for tensor in tensors]
        if all(held):
            return
        offsets, num_bytes = block_offsets([tensor.nbytes for tensor in tensors])
        old = None
        if self._block is None or self._block.nbytes < num_bytes or any(held):
            old, self._block = self._block, None
            if old is not None and not any(held):
                self._release(old)
                old = None
            self._block = self._allocate(num_bytes)
        for tensor, home in zip(tensors, _views(self._block, tensors, offsets), strict=True):
            tensor.data = home.copy_(tensor, non_blocking=True)
        if old is not None:
            self._release(old)

    def give_back(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """Moves the tensors in the block to `device`; keeps values and tensor objects."""
        for tensor in filter(self.holds, tensors):
            # Keeps the tensor object, which parameter groups, state and Megatron's lists of shards hold.
            tensor.data = torch.empty_like(tensor, device=device).copy_(tensor.detach(), non_blocking=True)


class HostStorages:
    """Moves the memory of tensors off the device and back, by storage: tensors that share one stay views of it.

    Without the memory, reading a tensor fails. The host's block is kept for the next move.
    """

    def __init__(
        self, tensors: Sequence[Tensor], *, is_constant: bool, allocate: Callable[[int], Tensor] = pinned
    ) -> None:
        """`is_constant` tensors are copied to the host once, and later just dropped from the device."""
        self._storages = list(
            {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}.values()
        )
        self._on_device = [
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage) for storage in self._storages
        ]
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._is_constant, self._allocate = is_constant, allocate
        self._on_host: list[Tensor] | None = None
        self._is_on_device = True

    @torch.no_grad()
    def place(self, *, is_on_device: bool) -> None:
        """Moves all storages to the device or to the host, unless they are there; keeps values."""
        if is_on_device == self._is_on_device:
            return
        is_first = self._on_host is None
        if self._on_host is None:
            offsets, num_bytes = block_offsets(self._sizes)
            self._on_host = _views(self._allocate(num_bytes), self._on_device, offsets)
        if not is_on_device and (is_first or not self._is_constant):
            for home, tensor in zip(self._on_host, self._on_device, strict=True):
                home.copy_(tensor)
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size if is_on_device else 0)
        if is_on_device:
            for home, tensor in zip(self._on_host, self._on_device, strict=True):
                tensor.copy_(home, non_blocking=True)
        self._is_on_device = is_on_device
        if any(tensor.is_cuda for tensor in self._on_device):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


@torch.no_grad()
def host_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in one block of host memory, pinned where tensors are on a GPU. The block lives as long as the process."""
    if not tensors:
        return []
    offsets, num_bytes = block_offsets([tensor.nbytes for tensor in tensors])
    block = (pinned if any(tensor.is_cuda for tensor in tensors) else _pageable)(num_bytes)
    return [home.copy_(tensor) for tensor, home in zip(tensors, _views(block, tensors, offsets), strict=True)]


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each tensor into its target, and waits for copies to or from a GPU."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
    if any(tensor.is_cuda for tensor in (*targets[:1], *sources[:1])):
        torch.cuda.synchronize()


@torch.no_grad()
def swap(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Exchanges the values of each pair of tensors, bit for bit, with memory for one more tensor."""
    for left, right in pairs:
        kept = left.detach().clone()
        left.copy_(right)
        right.copy_(kept)


def block_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Places tensors of these sizes in a block: returns their offsets in order, and the bytes of the block."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _views(block: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]) -> list[Tensor]:
    parts = [block[offset : offset + tensor.nbytes] for tensor, offset in zip(tensors, offsets, strict=True)]
    return [part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
