"""Memory of a GPU that a process owns and another process maps on the same GPU, through CUDA IPC.

Epoch, owner and release are kept in a page of host memory, so that an old handle is refused without touching the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from mrl.refit.errors import RefitError
from mrl.refit.host_memory import HostHandle, HostMemory, MappedHostMemory

_IpcHandle = tuple[int, bytes, int, int, bytes, int, bytes, bool]
"""What `UntypedStorage._share_cuda_` gives and `_new_shared_cuda` takes: device index, cudaIpcMemHandle, bytes, offset, and torch's
reference counter and event."""


@dataclass(frozen=True)
class CudaHandle:
    """What another process on the same GPU needs to map a `CudaMemory`. Plain values: it pickles."""

    header: HostHandle
    gpu: str
    """UUID: processes number their devices differently."""
    ipc: _IpcHandle
    num_bytes: int

    @property
    def name(self) -> str:
        """Label of the memory."""
        return self.header.name


class CudaMemory:
    """Bytes of this process on one GPU. The owner keeps them until the processes that map them have stopped pulling."""

    tensor: Tensor
    """uint8 [num_bytes] on the device, zero at first."""

    def __init__(self, num_bytes: int, name: str, device: torch.device) -> None:
        """New zeroed memory on `device`; it stays out of expandable segments, which have no cudaIpcMemHandle."""
        self.num_bytes = num_bytes
        self.name = name
        self._header = HostMemory(0, name)
        with _without_expandable_segments():
            # A storage without bytes has no handle.
            self._storage_bytes = torch.zeros(max(num_bytes, 1), dtype=torch.uint8, device=device)
        self.tensor = self._storage_bytes[:num_bytes]
        self._gpu = gpu_uuid(self.tensor.device)
        torch.cuda.synchronize(self.tensor.device)
        self._ipc: _IpcHandle | None = None

    def handle(self) -> CudaHandle:
        """Handle of the current epoch. From the first one on, the GPU's memory is taken until this process ends."""
        if self._ipc is None:
            # Shared once: each call would add a reference counter that nobody counts down.
            self._ipc = cast(_IpcHandle, self._storage_bytes.untyped_storage()._share_cuda_())
        return CudaHandle(self._header.handle(), self._gpu, self._ipc, self.num_bytes)

    def bump_epoch(self) -> None:
        """Makes every handle and mapping given out so far invalid, because what the bytes mean has changed."""
        self._header.bump_epoch()


class MappedCudaMemory:
    """View of another process's `CudaMemory`. CUDA knows no read-only mappings: a write to it changes the owner's weights."""

    tensor: Tensor
    """uint8 [num_bytes] on this process's device for the owner's GPU."""

    def __init__(self, handle: CudaHandle) -> None:
        """Maps the memory of another process (a process cannot map its own); raises as `check` does.

        Raises:
            RefitError: this process does not see the owner's GPU, or CUDA refuses the handle.
        """
        self.handle = handle
        self._header = MappedHostMemory(handle.header)
        index = device_of(handle.gpu)
        if index is None:
            raise RefitError(
                f"cannot map {self._header}: it lies on GPU {handle.gpu}, which this process does not see; "
                "an engine worker pulls from the trainer rank on its own GPU"
            )
        try:
            storage = torch.UntypedStorage._new_shared_cuda(index, *handle.ipc[1:])
        except RuntimeError as error:
            raise RefitError(f"cannot map {self._header} on GPU {handle.gpu}: {error}") from error
        self.tensor = torch.tensor([], dtype=torch.uint8, device=f"cuda:{index}").set_(storage)[: handle.num_bytes]

    def check(self) -> None:
        """Returns if the owner lives and the handle is of its current epoch.

        Raises:
            RefitError: the owner is gone, or has given its memory another meaning since the handle was made.
        """
        self._header.check()


def gpu_uuid(device: torch.device) -> str:
    """UUID of the GPU behind a device of this process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def device_of(uuid: str) -> int | None:
    """Index in this process of the GPU with a UUID; None if it is not visible here."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return next((device.index for device in devices if gpu_uuid(device) == uuid), None)


@contextmanager
def _without_expandable_segments() -> Iterator[None]:
    """Allocations within it come from segments of their own (cudaMalloc), even where PYTORCH_CUDA_ALLOC_CONF asks for expandable ones."""
    settings = cast(dict[str, dict[str, object]], torch.cuda.memory._snapshot())["allocator_settings"]
    if not settings["expandable_segments"]:
        yield
        return
    # torch resets every option that is not in the string it is handed.
    text = next((str(settings[name]) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if settings.get(name)), "")
    torch._C._accelerator_setAllocatorSettings(with_expandable_segments(text, False))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(with_expandable_segments(text, True))


def with_expandable_segments(settings: str, value: bool) -> str:
    """PYTORCH_ALLOC_CONF's text with this value of one option, the others as they are."""
    others = [option for option in settings.split(",") if option.strip() and option.partition(":")[0].strip() != "expandable_segments"]
    return ",".join([*others, f"expandable_segments:{value}"])
