"""Host memory that a process owns and others on the same host map: a memfd. It has no name, so it dies with its last user."""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mrl.refit.errors import RefitError

# One page in front of the bytes: magic, epoch, start time of the owner, number of bytes.
_HEADER = struct.Struct("<8sQQQ")
_HEADER_BYTES = mmap.PAGESIZE
_MAGIC = b"mrl-mem1"

# Epochs of one process never repeat: descriptor numbers are used again, and an old handle must not fit the new memory behind its number.
_EPOCHS = itertools.count(1)
_RELEASED = 0


@dataclass(frozen=True)
class HostHandle:
    """What another process of the host needs to map a `HostMemory`. Plain values: it pickles."""

    pid: int
    fd: int
    num_bytes: int
    epoch: int
    name: str


class HostMemory:
    """Bytes of this process. They stay as long as any tensor or mapping of them; mappings are refused when this object is gone."""

    tensor: Tensor
    """uint8 [num_bytes], zero at first."""

    def __init__(self, num_bytes: int, name: str) -> None:
        """New zeroed memory of this process. `name` labels it in messages and under /proc/<pid>/maps."""
        self.num_bytes = num_bytes
        self.name = name
        self.epoch = next(_EPOCHS)
        self._pid = os.getpid()
        self._fd = os.memfd_create(name)
        os.ftruncate(self._fd, _HEADER_BYTES + num_bytes)
        self._map = mmap.mmap(self._fd, _HEADER_BYTES + num_bytes)
        self._write_header()
        weakref.finalize(self, _release, self._map, self._fd, self._pid)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)[_HEADER_BYTES:]

    def handle(self) -> HostHandle:
        """Handle of the current epoch."""
        return HostHandle(self._pid, self._fd, self.num_bytes, self.epoch, self.name)

    def bump_epoch(self) -> None:
        """Makes every handle and mapping given out so far invalid, because what the bytes mean has changed."""
        self.epoch = next(_EPOCHS)
        self._write_header()

    def _write_header(self) -> None:
        _HEADER.pack_into(self._map, 0, _MAGIC, self.epoch, _start_time(self._pid) or 0, self.num_bytes)


def _release(memory: mmap.mmap, fd: int, owner: int) -> None:
    # A forked child shares the pages, but they are not its own to release.
    if os.getpid() == owner:
        magic, _, start_time, num_bytes = _HEADER.unpack_from(memory, 0)
        _HEADER.pack_into(memory, 0, magic, _RELEASED, start_time, num_bytes)
    os.close(fd)


class MappedHostMemory:
    """Read-only view of another process's `HostMemory`."""

    tensor: Tensor
    """uint8 [num_bytes]. A write to it ends the process: the weights belong to the owner."""

    def __init__(self, handle: HostHandle) -> None:
        """Maps the memory of another process of this host; raises as `check` does."""
        self.handle = handle
        try:
            fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDONLY)
        except OSError as error:
            raise RefitError(f"cannot map {self}: {error}; its owner is gone or runs on another host or as another user") from error
        try:
            if os.fstat(fd).st_size != _HEADER_BYTES + handle.num_bytes:
                raise RefitError(f"cannot map {self}: descriptor {handle.fd} of process {handle.pid} is something else by now")
            self._map = mmap.mmap(fd, _HEADER_BYTES + handle.num_bytes, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        with warnings.catch_warnings():
            # torch warns that the tensor is not writable, which is what we want.
            warnings.simplefilter("ignore", UserWarning)
            self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)[_HEADER_BYTES:]
        self.check()

    def __str__(self) -> str:
        return f"memory {self.handle.name!r} of process {self.handle.pid}"

    def check(self) -> None:
        """Returns if the owner lives and the handle is of its current epoch.

        Raises:
            RefitError: the owner is gone, or has given its memory another meaning since the handle was made.
        """
        magic, epoch, start_time, num_bytes = _HEADER.unpack_from(self._map, 0)
        if magic != _MAGIC or num_bytes != self.handle.num_bytes:
            raise RefitError(f"{self} is not shared memory of ours")
        if _start_time(self.handle.pid) != start_time:
            raise RefitError(f"the owner of {self} is gone; restart it and prepare the refit again")
        if epoch != self.handle.epoch:
            now = "was released" if epoch == _RELEASED else f"is at epoch {epoch}"
            raise RefitError(f"stale handle: {self} {now}, the handle is of epoch {self.handle.epoch}; prepare the refit again")


def _start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None if it does not run. Tells a process from a later one with its id."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command (field 2) may hold spaces and parentheses; the state is field 3, the start time field 22.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
