"""Memory that a process owns and another process of the same unit maps: of the host, or of the GPU that both use.

What kind it is, is decided here and nowhere else; the rest of refit uses `SharedMemory`, `MemoryHandle` and `open_handle`.
"""

from __future__ import annotations

import torch

from mrl.refit.cuda_memory import CudaHandle, CudaMemory, MappedCudaMemory
from mrl.refit.host_memory import HostHandle, HostMemory, MappedHostMemory

SharedMemory = HostMemory | CudaMemory
MemoryHandle = HostHandle | CudaHandle
MappedMemory = MappedHostMemory | MappedCudaMemory


def create_memory(num_bytes: int, name: str, device: torch.device) -> SharedMemory:
    """New zeroed memory of this process on `device`, whose bytes other processes can map. `name` labels it in messages.

    Raises:
        ValueError: memory of such a device cannot be shared.
    """
    if device.type == "cpu":
        return HostMemory(num_bytes, name)
    if device.type == "cuda":
        return CudaMemory(num_bytes, name, device)
    raise ValueError(f"memory {name!r} on device {device}: only cpu and cuda memory can be shared with an engine")


def open_handle(handle: MemoryHandle) -> MappedMemory:
    """Maps the memory of another process of this host: of the host read-only, of a GPU only from the same GPU.

    Raises:
        RefitError: the owner is gone, the epoch of the handle is not the memory's, or this process does not see the GPU.
    """
    return MappedHostMemory(handle) if isinstance(handle, HostHandle) else MappedCudaMemory(handle)
