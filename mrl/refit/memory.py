# SPDX-License-Identifier: Apache-2.0
"""Memory that a process owns and others map: of the host, or of a GPU through CUDA IPC, from the same GPU only.

Host memory is a memfd: it has no name, so it dies with its last user. Its first page holds the epoch and the owner, so
that an old handle is refused without touching the GPU. For memory of a GPU, the memfd is only that page.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from conversion.boxes import Slot
from conversion.files.owners import start_of
from mrl.env import with_expandable_segments
from mrl.refit import RefitError

# The page: magic, epoch, start time of the owner, number of bytes behind it.
_HEADER = struct.Struct("<8sQQQ")
_HEADER_BYTES = mmap.PAGESIZE
_MAGIC = b"mrl-mem1"

# Epochs never repeat in a process: descriptor numbers are reused, and an old handle must not fit the new memory.
_EPOCHS = itertools.count(1)
_RELEASED = 0

_IpcHandle = tuple[int, bytes, int, int, bytes, int, bytes, bool]
"""Result of `UntypedStorage._share_cuda_`, which `_new_shared_cuda` takes."""


@dataclass(frozen=True)
class GpuBytes:
    """Place of a memory's bytes on a GPU."""

    uuid: str
    ipc: _IpcHandle


@dataclass(frozen=True)
class MemoryHandle:
    """All that another process needs to map a `SharedMemory`. Plain values: it pickles."""

    pid: int
    fd: int
    num_bytes: int
    epoch: int
    name: str
    gpu: GpuBytes | None
    """None: the bytes are in host memory, behind the page."""

    @property
    def mapped_bytes(self) -> int:
        return _HEADER_BYTES + (0 if self.gpu else self.num_bytes)


@dataclass(frozen=True)
class ArenaRow:
    """Place of one slot in an arena: contiguous, `offset` in bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ArenaHandle:
    """The weights of a trainer rank (`mrl.policy.weights`) as another process sees them."""

    memory: MemoryHandle
    table: Mapping[Slot, ArenaRow]


class SharedMemory:
    """Bytes of this process.

    Host memory lives as long as any tensor or mapping of it; new mappings are refused once this object is gone. On a
    GPU the owner keeps the object until no process reads it.
    """

    tensor: Tensor
    """uint8 [num_bytes] on the device, zero at first."""

    def __init__(self, num_bytes: int, name: str, device: torch.device) -> None:
        """New zeroed memory. `name` labels it in messages and under /proc/<pid>/maps."""
        if device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"memory {name!r} on device {device}: only cpu and cuda memory can be shared with an engine"
            )
        self.num_bytes = num_bytes
        self.name = name
        self._pid = os.getpid()
        self._fd = os.memfd_create(name)
        self._mapped_bytes = _HEADER_BYTES + (num_bytes if device.type == "cpu" else 0)
        os.ftruncate(self._fd, self._mapped_bytes)
        self._map = mmap.mmap(self._fd, self._mapped_bytes)
        weakref.finalize(self, _release, self._map, self._fd, self._pid)
        self.bump_epoch()
        self._gpu: GpuBytes | None = None
        if device.type == "cpu":
            self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)[_HEADER_BYTES:]
            return
        with _without_expandable_segments():
            # A storage without bytes has no handle.
            self._storage = torch.zeros(max(num_bytes, 1), dtype=torch.uint8, device=device)
        self.tensor = self._storage[:num_bytes]
        torch.cuda.synchronize(self.tensor.device)

    def handle(self) -> MemoryHandle:
        """Handle of the current epoch. After the first call, GPU memory stays allocated until this process ends."""
        if self.tensor.device.type == "cuda" and self._gpu is None:
            # Shared once: each call would add a reference counter that nobody counts down.
            ipc = cast(_IpcHandle, self._storage.untyped_storage()._share_cuda_())
            self._gpu = GpuBytes(_gpu_uuid(self.tensor.device), ipc)
        return MemoryHandle(self._pid, self._fd, self.num_bytes, self._epoch, self.name, self._gpu)

    def bump_epoch(self) -> None:
        """Invalidates all earlier handles and mappings, because the bytes have a new meaning."""
        self._epoch = next(_EPOCHS)
        _HEADER.pack_into(
            self._map, 0, _MAGIC, self._epoch, start_of(self._pid) or 0, self._mapped_bytes - _HEADER_BYTES
        )


def _release(memory: mmap.mmap, fd: int, owner: int) -> None:
    # A forked child shares the pages, but they are not its own to release.
    if os.getpid() == owner:
        magic, _, start_time, num_bytes = _HEADER.unpack_from(memory, 0)
        _HEADER.pack_into(memory, 0, magic, _RELEASED, start_time, num_bytes)
    os.close(fd)


class MappedMemory:
    """View of another process's `SharedMemory`."""

    tensor: Tensor
    """uint8 [num_bytes]. Weights are mapped read only, they belong to the owner: a write to host memory ends the
    process; CUDA has no such guard."""

    def __init__(self, handle: MemoryHandle, *, is_writable: bool = False) -> None:
        """Maps the memory; on a GPU, of another process only (a process cannot map its own)."""
        self.handle = handle
        try:
            fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR if is_writable else os.O_RDONLY)
        except OSError as error:
            raise RefitError(
                f"cannot map {self}: {error}; its owner is gone or runs on another host or as another user"
            ) from error
        try:
            if os.fstat(fd).st_size != handle.mapped_bytes:
                raise RefitError(
                    f"cannot map {self}: descriptor {handle.fd} of process {handle.pid} is something else by now"
                )
            self._map = mmap.mmap(
                fd, handle.mapped_bytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
            )
        finally:
            os.close(fd)
        self.check()
        if handle.gpu is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)[_HEADER_BYTES:]
            return
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        device = next((device for device in devices if _gpu_uuid(device) == handle.gpu.uuid), None)
        if device is None:
            raise RefitError(
                f"cannot map {self}: it is on GPU {handle.gpu.uuid}, which this process does not see; "
                "an engine worker pulls from the trainer rank on its own GPU"
            )
        try:
            storage = torch.UntypedStorage._new_shared_cuda(device.index, *handle.gpu.ipc[1:])
        except RuntimeError as error:
            raise RefitError(f"cannot map {self} on GPU {handle.gpu.uuid}: {error}") from error
        self.tensor = torch.tensor([], dtype=torch.uint8, device=device).set_(storage)[: handle.num_bytes]

    def __str__(self) -> str:
        return f"memory {self.handle.name!r} of process {self.handle.pid}"

    def check(self) -> None:
        """Raises RefitError unless the owner lives and the handle is of its current epoch."""
        magic, epoch, start_time, num_bytes = _HEADER.unpack_from(self._map, 0)
        if magic != _MAGIC or num_bytes != self.handle.mapped_bytes - _HEADER_BYTES:
            raise RefitError(f"{self} is not shared memory of ours")
        if start_of(self.handle.pid) != start_time:
            raise RefitError(f"the owner of {self} is gone; restart it and prepare the refit again")
        if epoch != self.handle.epoch:
            now = "was released" if epoch == _RELEASED else f"is at epoch {epoch}"
            raise RefitError(
                f"stale handle: {self} {now}, the handle is of epoch {self.handle.epoch}; prepare the refit again"
            )


def bytes_as(memory: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor inside uint8 `memory` at byte `offset`, as a view."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return memory[offset : offset + num_bytes].view(dtype).view(shape)


def wait_for(device: torch.device) -> None:
    """Waits for this thread's work on its stream of a GPU, because another process reads the memory next."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _gpu_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


@contextmanager
def _without_expandable_segments() -> Iterator[None]:
    """Allocations within it come from cudaMalloc and have a cudaIpcMemHandle, whatever PYTORCH_CUDA_ALLOC_CONF says."""
    settings = cast(dict[str, dict[str, object]], torch.cuda.memory._snapshot())["allocator_settings"]
    if not settings["expandable_segments"]:
        yield
        return
    # torch resets every option that is missing from the string.
    text = next(
        (str(settings[name]) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if settings.get(name)), ""
    )
    torch._C._accelerator_setAllocatorSettings(with_expandable_segments(text, False))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(with_expandable_segments(text, True))
