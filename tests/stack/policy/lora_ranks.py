# SPDX-License-Identifier: Apache-2.0
"""Functions that the tests of LoRA run on the ranks: a whole `PolicyRank` with adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from conversion.boxes import Slot
from mrl.config.schema.run import RunConfig
from tests.stack.policy.policy_ranks import (
    kept_by_rows,
    main_shards,
    open_policy,
    packed_rows,
    raw_checksums,
    set_batch,
    train,
)
from tests.stack.policy.save_ranks import save
from tests.stack.ranks import Rank

if TYPE_CHECKING:
    from mrl.policy.policy import PolicyRank


@dataclass(frozen=True)
class LoraRun:
    """Observations of a rank in a run with adapters."""

    starts_as_base: bool
    """True if merged weights are the base's bit for bit before the first step."""
    metrics: list[dict[str, float]]
    changed_base: list[str]
    """Base weights that are not what they were, by name."""
    trained: set[str]
    """Names of what the optimizer updates."""
    reference_error: float
    """Largest difference between reference logprobs after training and logprobs before it."""
    merged_error: float
    """Largest difference between logprobs with adapters, and without adapters on the merged weights."""
    change: float
    """Largest difference that training made to a logprob."""
    following: list[dict[str, float]]
    """Metrics of two steps after the checkpoint."""
    checksums: dict[str, int]
    """Checksums of every live tensor at the end."""


@torch.no_grad()
def write(policy: PolicyRank, values: Mapping[Slot, torch.Tensor]) -> None:
    """Puts other values into live weights."""
    for slot, value in values.items():
        policy._tensors[slot].copy_(value)


def run_lora(rank: Rank, config: RunConfig, weights_dir: Path, num_steps: int) -> LoraRun:
    """Steps, a checkpoint, and two more steps."""
    from megatron.core import parallel_state

    with open_policy(rank, config) as policy:
        assert policy._lora is not None
        rows = packed_rows(policy._section, policy.dp_rank, parallel_state.get_data_parallel_world_size())
        before = policy.logprobs_of_rows(rows)
        base = {slot: policy._tensors[slot].detach().clone() for slot in policy._layout}
        starts_as_base = all(_same_bits(tensor, base[slot]) for slot, tensor in policy.settled_weights().items())
        metrics = train(policy, num_steps)
        changed = [str(slot) for slot, tensor in base.items() if not _same_bits(tensor, policy._tensors[slot])]
        after = policy.logprobs_of_rows(rows)
        set_batch(policy)
        policy.compute_reference_logprobs()
        reference = kept_by_rows(policy, "reference_logprobs_T")
        # The engines' weights are the trainer's own, merged in place.
        assert all(policy._tensors[slot] is tensor for slot, tensor in policy.settled_weights().items())
        merged = {slot: tensor.detach().clone() for slot, tensor in policy.settled_weights().items()}
        policy._lora.unmerge(policy._tensors)
        write(policy, merged)
        with policy._lora.disabled():
            of_merged = policy.logprobs_of_rows(rows)
        write(policy, base)
        save(policy, weights_dir)
        following = train(policy, 2)
        policy.settle()
        return LoraRun(
            starts_as_base,
            metrics,
            changed,
            {name for name, _, _ in main_shards(policy)},
            _largest(before, reference),
            _largest(after, of_merged),
            _largest(before, after),
            following,
            raw_checksums(policy),
        )


def exported_weights(rank: Rank, config: RunConfig, weights_dir: Path) -> dict[str, np.ndarray]:
    """Canonical weights with the adapters of a checkpoint merged, for one rank."""
    from tests.stack.policy.policy_ranks import canonical_weights

    with open_policy(rank, config) as policy:
        policy.load_checkpoint(weights_dir)
        return canonical_weights(policy)


def dropout_logprobs(rank: Rank, config: RunConfig) -> tuple[bool, float]:
    """Compares two logprob passes over trained adapters, and measures a train pass against the logprob pass before."""
    with open_policy(rank, config) as policy:
        metrics = train(policy, 3)
        rows = packed_rows(policy._section, 0, 1)
        first, second = policy.logprobs_of_rows(rows), policy.logprobs_of_rows(rows)
        return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True)), metrics[-1][
            "train/probs_ratio_max"
        ] - 1


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.detach().contiguous().view(torch.uint8), second.detach().contiguous().view(torch.uint8))


def _largest(first: list[np.ndarray], second: list[np.ndarray]) -> float:
    assert len(first) == len(second)
    return max((float(np.abs(a - b).max()) for a, b in zip(first, second, strict=True)), default=0.0)
