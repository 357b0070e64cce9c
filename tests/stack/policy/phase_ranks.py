# SPDX-License-Identifier: Apache-2.0
"""Functions on the ranks of the tests of memory by phase: training through all phases, with storage that is counted."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mrl.config.schema.run import RunConfig
from tests.stack.policy.policy_ranks import open_policy, optimizer_checksum, raw_checksums, set_batch
from tests.stack.policy.save_ranks import save
from tests.stack.ranks import Rank

if TYPE_CHECKING:
    from mrl.phases import Phase
    from mrl.policy.policy import PolicyRank


@dataclass
class Walk:
    """Observations of a walk through the phases on one rank."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    """Metrics of each step; last comes the second one once more, after a load."""
    checksums: list[object] = field(default_factory=list)
    """Checksums of weights and moments, after each step."""
    saved: dict[str, str] = field(default_factory=dict)
    """Digests of this rank's files of the checkpoint after the first step."""
    gradient_bytes: dict[str, int] = field(default_factory=dict)
    device_bytes: dict[str, int] = field(default_factory=dict)
    """Optimizer state on what stands for the device, in each phase after the first step."""
    host_bytes: dict[str, int] = field(default_factory=dict)


def walk(rank: Rank, config: RunConfig, weights_dir: Path) -> Walk:
    """Two steps with all phases between; the second again from the checkpoint. Shared memory stands for the host's."""
    from mrl.policy.host_block import HostBlock
    from mrl.policy.optimizer import TrainingMemory

    shared = HostBlock(
        allocate=lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8).share_memory_(),
        release=lambda block: None,
    )
    result = Walk()
    with open_policy(rank, config) as policy:
        policy._memory = TrainingMemory(policy._state, torch.device("cpu"), shared)
        _enter(policy, "load", result)
        _enter(policy, "refit", result)
        _enter(policy, "generate", result)
        _step(policy, result)
        _enter(policy, "checkpoint", result)
        save(policy, weights_dir)
        _enter(policy, "generate", result)
        _step(policy, result)
        policy.load_checkpoint(weights_dir)
        _step(policy, result)
    folder = weights_dir / "iter_0000000"
    files = folder.glob(f"__{rank.rank}_*.distcp")
    result.saved = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return result


def _step(policy: PolicyRank, result: Walk) -> None:
    # What models beside it do leaves the policy as it is.
    for phase in ("teacher", "value", "train_value"):
        _enter(policy, phase, result)
    _enter(policy, "logprob", result)
    set_batch(policy)
    policy.compute_old_logprobs()
    if policy._reference is not None:
        policy.compute_reference_logprobs()
    _enter(policy, "train", result)
    result.metrics.append(policy.train_step())
    _enter(policy, "refit", result)
    policy.settle()
    result.checksums.append((raw_checksums(policy), optimizer_checksum(policy)))
    _enter(policy, "generate", result)


def _enter(policy: PolicyRank, phase: Phase, result: Walk) -> None:
    from mrl.policy.optimizer import optimizer_tensors

    policy.enter(phase)
    buffers = [
        buffer.grad_data for chunk in policy._chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]
    ]
    main_grads = [
        parameter.main_grad for chunk in policy._chunks for parameter in chunk.parameters() if parameter.requires_grad
    ]
    storages = {buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes() for buffer in buffers}
    assert {gradient.untyped_storage().data_ptr() for gradient in main_grads} == set(storages)
    tensors = optimizer_tensors(policy._state)
    result.gradient_bytes[phase] = sum(storages.values())
    result.host_bytes[phase] = sum(tensor.nbytes for tensor in tensors if tensor.is_shared())
    result.device_bytes[phase] = sum(tensor.nbytes for tensor in tensors if not tensor.is_shared())


def trained_bytes(rank: Rank, config: RunConfig) -> tuple[int, int, int]:
    """Bytes of weights, gradient buffers and optimizer state of a rank after a step."""
    from mrl.policy.optimizer import optimizer_tensors

    result = Walk()
    with open_policy(rank, config) as policy:
        _step(policy, result)
        weights = sum(tensor.nbytes for tensor in policy._tensors.values())
        return (
            weights,
            result.gradient_bytes["train"],
            sum(tensor.nbytes for tensor in optimizer_tensors(policy._state)),
        )


def swapped_reference(rank: Rank, config: RunConfig) -> tuple[bool, bool, bool]:
    """Checks a pass of the reference after a step: host copies become the current weights, the weights become the
    starting ones, and both are back afterwards, in the same memory."""
    with open_policy(rank, config) as policy:
        start = raw_checksums(policy)
        _step(policy, Walk())
        current, addresses = raw_checksums(policy), _addresses(policy)
        with policy._reference_weights():
            assert policy._reference is not None
            copies = {slot: copy.clone() for slot, copy in policy._reference.items()}
            is_start = raw_checksums(policy) == start
        is_current = all(torch.equal(policy._tensors[slot], copy) for slot, copy in copies.items())
        return (
            is_current,
            is_start and start != current,
            raw_checksums(policy) == current and _addresses(policy) == addresses,
        )


def _addresses(policy: PolicyRank) -> list[int]:
    assert policy._reference is not None
    return [tensor.data_ptr() for tensor in [*policy._reference.values(), *policy._tensors.values()]]


def bucket_places(rank: Rank, config: RunConfig) -> list[tuple[str, int, int, int]]:
    """Places of Megatron's parameter buckets: dtype, bytes into its buffer by Megatron's and by real count, address."""
    places = []
    with open_policy(rank, config) as policy:
        for chunk in policy._chunks:
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                for bucket, (start, _) in zip(buffer.buckets, buffer.bucket_indices, strict=True):
                    assert bucket.param_data is not None and buffer.param_data is not None
                    data, base = bucket.param_data, buffer.param_data.data_ptr()
                    places.append(
                        (str(data.dtype), start * data.element_size(), data.data_ptr() - base, data.data_ptr())
                    )
    return places
