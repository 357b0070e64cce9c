# SPDX-License-Identifier: Apache-2.0
"""The process group of the refit exchange: trainer ranks, then the workers of dedicated engines.

It does not use torch's default group: in an engine worker that is vLLM's, without the trainer's ranks.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.config.texts import rounded
from mrl.refit import RefitError

_POLL_S = 0.001
_WATCH_S = 0.5
_NEVER_SENT = 1
# Time for the driver to abandon an attempt; if it cannot, each participant's deadline ends the attempt.
_SAY_S = 10.0


def is_file(address: str) -> bool:
    """True if processes meet in a file rather than at a host."""
    return address.startswith("/")


def file_store(path: str, timeout: timedelta) -> dist.FileStore:
    """Opens a store in a file, which the file's permissions protect; a TCPStore has no secret."""
    store = dist.FileStore(path)
    store.set_timeout(timeout)
    return store


@dataclass(frozen=True)
class GroupAddress:
    """Meeting point of a group: the store of the ranks, and a name that no other group of this store has."""

    host: str
    """Host of a running TCPStore; or the path of a file, if all participants are processes of one node."""
    port: int
    """0 of a file."""
    name: str
    members: tuple[int, ...]
    """Numbers of the participants in the schedule, which skips others: engines that are away."""

    def store(self, *, timeout_s: float) -> dist.Store:
        """Connects to the group's part of the store. RuntimeError: the store does not answer in time."""
        limit = timedelta(seconds=timeout_s)
        if is_file(self.host):
            store = file_store(self.host, limit)
        else:
            store = dist.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=limit)
        return dist.PrefixStore(f"refit/{self.name}", store)

    def give_up(self, attempt: int) -> None:
        """Makes all participants leave a refit attempt; by the driver. RuntimeError: the store does not answer."""
        self.store(timeout_s=_SAY_S).set(_given_up(attempt), "")


@dataclass(frozen=True)
class Outgoing:
    """A message for a peer. `pack` fills its buffer and is called just before it leaves."""

    peer: int
    buffer: Tensor
    pack: Callable[[], None]


@dataclass(frozen=True)
class Incoming:
    """Destination of a peer's message."""

    peer: int
    buffer: Tensor


class ExchangeGroup:
    """One participant's end of the group."""

    def __init__(self, address: GroupAddress, rank: int, *, device: torch.device, timeout_s: float) -> None:
        """Joins as member `rank` of `address`, within `timeout_s`. Collective: returns when all have joined."""
        self.rank = rank
        self.device = device
        self._place_of = {member: place for place, member in enumerate(address.members)}
        size, place = len(address.members), self._place_of[rank]
        self._is_closed = False
        # Keeps the buffer alive until its receive ends.
        self._never = torch.zeros(1)
        limit = timedelta(seconds=timeout_s)
        deadline = time.monotonic() + timeout_s
        try:
            self._store = store = address.store(timeout_s=timeout_s)
            # NCCL would wait for ever for a missing participant.
            store.set(f"joined/{rank}", "")
            store.wait([f"joined/{peer}" for peer in address.members], limit)
            # A single participant sends nothing and needs none of NCCL's memory.
            device = device if size > 1 else torch.device("cpu")
            self._group = _process_group(store, place, size, device, limit)
            # NCCL connects at the first call, in which all must take part; in most rounds some have no messages.
            self._wait(self._group.allreduce([torch.zeros(1, device=device)]), deadline)
        except RuntimeError as error:
            raise RefitError(
                f"refit exchange: participant {rank} of {size} could not join {address.name!r} at "
                f"{address.host}:{address.port} within {rounded(timeout_s)} s: {error}"
            ) from error

    @contextmanager
    def watched(self, attempt: int, leave: Callable[[], None]) -> Iterator[None]:
        """Calls `leave` from another thread if the driver gives up in the `with` block; see `GroupAddress.give_up`."""
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(_WATCH_S):
                try:
                    is_given_up = self._store.check([_given_up(attempt)])
                except RuntimeError:
                    is_given_up = True
                if is_given_up and not is_over.is_set():
                    leave()
                    return

        # Not joined: the store of a hanging process would not answer.
        threading.Thread(target=watch, daemon=True).start()
        try:
            yield
        finally:
            is_over.set()

    def run(
        self,
        outgoing: Sequence[Outgoing],
        incoming: Sequence[Incoming],
        *,
        what: str,
        meanwhile: Callable[[], None],
        deadline: float,
    ) -> None:
        """Sends and receives all messages of one round, `what`. Two participants list theirs in the same order.

        One for an absent peer is packed and not sent: later messages use the checksums that packing takes.
        """
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
                f"refit exchange: rank {self.rank} did not finish {what} in time, "
                f"receiving from ranks {senders} and sending to ranks {receivers}: {'; '.join(map(str, faults))}"
            ) from faults[0]

    def close(self) -> None:
        """Leaves the group, even during a run in another thread. Not collective; the group cannot be used after."""
        self._is_closed = True
        if self.device.type == "cuda":
            # Nothing else ends kernels that wait for a dead peer.
            self._group.abort()
        elif len(self._place_of) > 1:
            # Gloo has no abort; but a timed-out receive breaks all its connections, which ends the peers' waits.
            with suppress(RuntimeError):
                following = (self._place_of[self.rank] + 1) % len(self._place_of)
                self._group.recv([self._never], following, _NEVER_SENT).wait(timedelta(milliseconds=1))

    def _post(
        self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], faults: list[RuntimeError]
    ) -> list[dist.Work]:
        works = []
        for message in incoming:
            with _kept(faults):
                works.append(self._group.recv([message.buffer], self._place_of[message.peer], 0))
        for message in outgoing:
            message.pack()
            if message.peer in self._place_of:
                with _kept(faults):
                    works.append(self._group.send([message.buffer], self._place_of[message.peer], 0))
        return works

    def _post_together(
        self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], faults: list[RuntimeError]
    ) -> list[dist.Work]:
        """Posts like `_post`, in one NCCL call: posted one by one, messages could wait for each other in a circle."""
        for message in outgoing:
            message.pack()
        outgoing = [message for message in outgoing if message.peer in self._place_of]
        if not (outgoing or incoming):
            return []
        with _kept(faults):
            self._group._start_coalescing(self.device)
            for message in incoming:
                self._group.recv([message.buffer], self._place_of[message.peer], 0)
            for message in outgoing:
                self._group.send([message.buffer], self._place_of[message.peer], 0)
            return [self._group._end_coalescing(self.device)]
        return []

    def _wait(self, work: dist.Work, deadline: float) -> None:
        if self.device.type == "cuda":
            # If NCCL's own timed wait expires, its watchdog may end the process before the group is closed.
            while not work.is_completed():
                if self._is_closed or time.monotonic() > deadline:
                    raise RuntimeError("given up" if self._is_closed else "timed out")
                time.sleep(_POLL_S)
        work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))


def _given_up(attempt: int) -> str:
    return f"given up/{attempt}"


@contextmanager
def _kept(faults: list[RuntimeError]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        faults.append(error)


def _process_group(
    store: dist.Store, rank: int, size: int, device: torch.device, limit: timedelta
) -> dist.ProcessGroup:
    """A group that torch's global state does not know. NCCL between GPUs, else gloo."""
    group = dist.ProcessGroup(store, rank, size)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        # Our limit expires first: when NCCL's expires, the watchdogs of all groups end their processes.
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
    """NCCL groups within it report a dead peer, others end their process: a refit can repeat, a policy rank cannot."""
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
