"""Host memory for tensors that leave the device: one block for all of them.

Torch's own pinned memory rounds each tensor up to a power of two: 20 MB take 34.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# As CUDA aligns its own allocations.
ALIGNMENT = 256


@dataclass(frozen=True)
class HostMemory:
    """Where a process keeps tensors on the host."""

    allocate: Callable[[int], Tensor]
    """A block of this many bytes, uint8."""
    release: Callable[[Tensor], object]
    """Takes back a block in which no tensor lies any more."""
    holds: Callable[[Tensor], bool]


class Slab:
    """The block of host memory that a set of tensors shares."""

    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory
        self._block: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the block; 0 before the first tensor came."""
        return 0 if self._block is None else self._block.nbytes

    @torch.no_grad()
    def take_in(self, tensors: Sequence[Tensor]) -> None:
        """Moves the tensors into the block, which they have for themselves; values stay, and so do the tensor objects.

        The block is made anew if it is too small, or if some of the tensors are on the host already.
        """
        held = [self.memory.holds(tensor) for tensor in tensors]
        if all(held):
            return
        offsets, num_bytes = slab_offsets([tensor.nbytes for tensor in tensors])
        old = None
        if self._block is None or self._block.nbytes < num_bytes or any(held):
            old, self._block = self._block, None
            if old is not None and not any(held):
                # Before the new one is made, so that there is memory for it.
                self.memory.release(old)
                old = None
            self._block = self.memory.allocate(num_bytes)
        for tensor, home in zip(tensors, views(self._block, tensors, offsets), strict=True):
            tensor.data = home.copy_(tensor, non_blocking=True)
        if old is not None:
            self.memory.release(old)


def slab_offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where tensors of these bytes lie in their block, in order, and the bytes of the block."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


def views(block: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]) -> list[Tensor]:
    """Parts of a block, one with the shape and type of each tensor."""
    parts = [block[offset : offset + tensor.nbytes] for tensor, offset in zip(tensors, offsets, strict=True)]
    return [part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


@torch.no_grad()
def host_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies in one block of host memory, pinned where the tensors are on a GPU. The block lives as long as the process."""
    offsets, num_bytes = slab_offsets([tensor.nbytes for tensor in tensors])
    allocate = PINNED.allocate if any(tensor.is_cuda for tensor in tensors) else _pageable
    return [home.copy_(tensor) for tensor, home in zip(tensors, views(allocate(num_bytes), tensors, offsets), strict=True)]


def _pageable(num_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def _pinned(num_bytes: int) -> Tensor:
    block = _pageable(num_bytes)
    runtime = torch.cuda.cudart()
    assert runtime is not None
    torch.cuda.check_error(runtime.cudaHostRegister(block.data_ptr(), num_bytes, 0))
    return block


def _unpin(block: Tensor) -> None:
    # No copy may be under way when the pages are given back.
    torch.cuda.synchronize()
    runtime = torch.cuda.cudart()
    assert runtime is not None
    torch.cuda.check_error(runtime.cudaHostUnregister(block.data_ptr()))


PINNED = HostMemory(allocate=_pinned, release=_unpin, holds=lambda tensor: tensor.device.type == "cpu")
