"""The process group of the refit exchange: trainer ranks, then the workers of dedicated engines.

It is a group of its own, made without torch's default group: an engine worker has a default group already, vLLM's, that knows nothing of
the trainer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.refit.errors import RefitError


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
        """Joins as `rank` of `address.size`. Collective: returns when all have joined.

        Raises:
            RefitError: not all came within `timeout_s`.
        """
        self.rank = rank
        self._timeout_s = timeout_s
        self.device = device
        limit = timedelta(seconds=timeout_s)
        try:
            store = dist.TCPStore(address.host, address.port, is_master=False, timeout=limit)
            self._group = _process_group(dist.PrefixStore(f"refit/{address.name}", store), rank, address.size, device, limit)
        except RuntimeError as error:
            raise RefitError(
                f"refit exchange: participant {rank} of {address.size} could not join {address.name!r} at {address.host}:{address.port} "
                f"within {timeout_s:g} s: {error}"
            ) from error

    def run(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], *, what: str, meanwhile: Callable[[], None]) -> None:
        """Sends and receives all messages of one round, `what`. Between two participants both sides list theirs in the same order.

        `meanwhile` is called when all are packed and on their way.

        Raises:
            RefitError: a peer did not do its part in time.
        """
        deadline = time.monotonic() + self._timeout_s
        try:
            works = self._post(outgoing, incoming)
            meanwhile()
            for work in works:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            sources, units = ({message.peer for message in messages} for messages in (incoming, outgoing))
            raise RefitError(
                f"refit exchange: rank {self.rank} did not finish {what} within {self._timeout_s} s, "
                f"receiving from ranks {sorted(sources)} and sending to ranks {sorted(units)}: {error}"
            ) from error

    def _post(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming]) -> list[dist.Work]:
        # One NCCL call for all messages of a round: one after the other they could wait for each other in a circle.
        is_one_call = self.device.type == "cuda"
        if is_one_call:
            self._group._start_coalescing(self.device)
        works = [self._group.recv([message.buffer], message.peer, 0) for message in incoming]
        for message in outgoing:
            message.pack()
            works.append(self._group.send([message.buffer], message.peer, 0))
        return [self._group._end_coalescing(self.device)] if is_one_call else works


def _process_group(store: dist.Store, rank: int, size: int, device: torch.device, limit: timedelta) -> dist.ProcessGroup:
    """A group that torch's global state does not know. NCCL between GPUs, else gloo."""
    group = dist.ProcessGroup(store, rank, size)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        kind, backend = dist.ProcessGroup.BackendType.NCCL, dist.ProcessGroupNCCL(store, rank, size, options)
    else:
        kind, backend = dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo(store, rank, size, limit)
    group._set_default_backend(kind)
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device(device.type), kind, backend)
    return group
