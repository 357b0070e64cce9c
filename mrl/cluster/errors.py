# SPDX-License-Identifier: Apache-2.0
"""Errors of the driver when a process of the run fails, and advice on errors of libraries. Needs no Ray."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from mrl.shortage import WAY_OUT, is_shortage

OUT_OF_MEMORY = (
    "; lower policy.generation.vllm_cfg.gpu_memory_utilization, which engines take of a GPU, or "
    "policy.generation.vllm_cfg.max_num_seqs; in training lower policy.sequence_packing.train_mb_tokens or "
    "policy.train_micro_batch_size, or set policy.megatron_cfg.activation_checkpointing=true"
)
BROKEN_NETWORK = (
    "; the ranks do not reach each other: python -m mrl.doctor looks at every node's interfaces and fabric "
    "(NCCL_SOCKET_IFNAME, FI_PROVIDER), NCCL_DEBUG=INFO says which is taken; "
    "EFA needs a security group whose rules for incoming and outgoing traffic name the group itself"
)
MEMORY_MESSAGES = ("CUDA out of memory", "No available memory for the cache blocks", "Free memory on device")


class NoCluster(RuntimeError):
    """No Ray cluster can be joined, or it has died; the message says where the driver looked and what to do."""


class DeadlineExceeded(RuntimeError):
    """A wait ran past its deadline; the message names what the driver waited for and who did not answer."""

    def __init__(self, message: str, silent: Collection[object] = ()) -> None:
        """`silent` are the caller's names of those."""
        super().__init__(message)
        self.silent = tuple(silent)


@dataclass(frozen=True)
class ActorName:
    """One of several actors of a kind; messages call it `engine 3`."""

    kind: str
    index: int

    def __str__(self) -> str:
        return f"{self.kind} {self.index}"


class ActorLost(RuntimeError):
    """An actor process died. `actor` is the caller's name for it, `what` that of the call."""

    def __init__(self, actor: object, what: str, reason: str) -> None:
        super().__init__(f"{actor} died during {what}: {reason}")
        self.actor, self.what = actor, what


class Aftermath(RuntimeError):
    """An actor failed only because another one did."""


def way_out(error: Exception) -> str:
    """Advice to append to the message of an error that a run's process failed with; "" if the message needs none."""
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError" or any(message in text for message in MEMORY_MESSAGES):
        return OUT_OF_MEMORY
    if "NCCL" in text or "DistBackendError" in type(error).__name__:
        return BROKEN_NETWORK
    return f"; {WAY_OUT}" if is_shortage(error) and WAY_OUT not in text else ""
