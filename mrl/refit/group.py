# SPDX-License-Identifier: Apache-2.0
"""The process group of the refit exchange: trainer ranks, then the workers of dedicated engines.

It is a group of its own, made without torch's default group: an engine worker has a default group already, vLLM's, that knows nothing of
the trainer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.refit import RefitError

# Pause between two looks at the work of a GPU.
_POLL_S = 0.001


@dataclass(frozen=True)
class GroupAddress:
    """Where a group meets: a TCPStore that runs already, and a name that no other group of this store has."""

    host: str
    port: int
    name: str
    size: int


@dataclass(frozen=True)
class Outgoing:
    """A message for a peer. `pack` fills its buffer and is called just before it leaves."""

    peer: int
    buffer: Tensor
    pack: Callable[[], None]


@dataclass(frozen=True)
class Incoming:
    """Where the message of a peer goes."""

    peer: int
    buffer: Tensor


class ExchangeGroup:
    """One participant's end of the group."""

    def __init__(self, address: GroupAddress, rank: int, *, device: torch.device, timeout_s: float) -> None:
        """Joins as `rank` of `address.size`. Collective: returns when all have joined."""
        self.rank = rank
        self._timeout_s = timeout_s
        self.device = device
        limit = timedelta(seconds=timeout_s)
        deadline = time.monotonic() + timeout_s
        try:
            store = dist.PrefixStore(f"refit/{address.name}", dist.TCPStore(address.host, address.port, is_master=False, timeout=limit))
            # NCCL would wait without end for one that does not come.
            store.set(f"joined/{rank}", "")
            store.wait([f"joined/{peer}" for peer in range(address.size)], limit)
            self._group = _process_group(store, rank, address.size, device, limit)
            # NCCL connects at the first call, in which all must take part; in most rounds some have no messages.
            self._wait(self._group.allreduce([torch.zeros(1, device=device)]), deadline)
        except RuntimeError as error:
            raise RefitError(
                f"refit exchange: participant {rank} of {address.size} could not join {address.name!r} at {address.host}:{address.port} "
                f"within {timeout_s:g} s: {error}"
            ) from error

    def run(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], *, what: str, meanwhile: Callable[[], None]) -> None:
        """Sends and receives all messages of one round, `what`. Between two participants both sides list theirs in the same order.

        `meanwhile` is called when all are packed and on their way. On the host, messages of other peers arrive although one is dead.
        """
        deadline = time.monotonic() + self._timeout_s
        post = self._post_together if self.device.type == "cuda" else self._post
        faults: list[RuntimeError] = []
        works = post(outgoing, incoming, faults)
        meanwhile()
        for work in works:
            with _kept(faults):
                self._wait(work, deadline)
        if faults:
            with _kept(faults):
                self.close()
            senders, receivers = (sorted({message.peer for message in messages}) for messages in (incoming, outgoing))
            raise RefitError(
                f"refit exchange: rank {self.rank} did not finish {what} within {self._timeout_s} s, "
                f"receiving from ranks {senders} and sending to ranks {receivers}: {'; '.join(map(str, faults))}"
            ) from faults[0]

    def close(self) -> None:
        """Leaves the group, whatever is under way. Not collective; the group cannot be used afterwards."""
        if self.device.type == "cuda":
            # Kernels that wait for a dead peer end only so. Gloo's connections go with the object.
            self._group.abort()

    def _post(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], faults: list[RuntimeError]) -> list[dist.Work]:
        works = []
        for message in incoming:
            with _kept(faults):
                works.append(self._group.recv([message.buffer], message.peer, 0))
        for message in outgoing:
            message.pack()
            with _kept(faults):
                works.append(self._group.send([message.buffer], message.peer, 0))
        return works

    def _post_together(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], faults: list[RuntimeError]) -> list[dist.Work]:
        """As `_post`, in one NCCL call: one after the other, messages could wait for each other in a circle."""
        for message in outgoing:
            message.pack()
        with _kept(faults):
            self._group._start_coalescing(self.device)
            for message in incoming:
                self._group.recv([message.buffer], message.peer, 0)
            for message in outgoing:
                self._group.send([message.buffer], message.peer, 0)
            return [self._group._end_coalescing(self.device)]
        return []

    def _wait(self, work: dist.Work, deadline: float) -> None:
        if self.device.type == "cuda":
            # When NCCL's own wait with a limit expires, its watchdog may end the process before the group is closed.
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"timed out after {self._timeout_s:g} s")
                time.sleep(_POLL_S)
        work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))


@contextmanager
def _kept(faults: list[RuntimeError]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        faults.append(error)


def _process_group(store: dist.Store, rank: int, size: int, device: torch.device, limit: timedelta) -> dist.ProcessGroup:
    """A group that torch's global state does not know. NCCL between GPUs, else gloo."""
    group = dist.ProcessGroup(store, rank, size)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        # Ours comes first: when theirs expires, the watchdogs of all groups end their processes.
        options._timeout = 2 * limit
        with _without_watchdog():
            kind, backend = dist.ProcessGroup.BackendType.NCCL, dist.ProcessGroupNCCL(store, rank, size, options)
    else:
        kind, backend = dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo(store, rank, size, limit)
    group._set_default_backend(kind)
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device(device.type), kind, backend)
    return group


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """NCCL groups made within it report a dead peer, where others end their process: a refit can be repeated, a policy rank cannot."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
