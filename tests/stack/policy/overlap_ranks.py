# SPDX-License-Identifier: Apache-2.0
"""Functions that the test of Megatron's overlapped communication runs on the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from mrl.config.schema.run import RunConfig
from tests.stack.policy.policy_ranks import open_policy, raw_checksums, train
from tests.stack.ranks import Rank

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

Event = tuple[str, int]
"""Event of a chunk of the model, with its index: "backward" (the gradient of a parameter is there), "reduce" (the
reduction of a bucket of gradients starts), "finish" (its end is waited for)."""


def events_of_step(rank: Rank, config: RunConfig) -> tuple[list[Event], int, list[dict[str, float]], dict[str, int]]:
    """Events of the third step, the number of buckets, metrics of three steps, checksums of the weights after them."""
    events: list[Event] = []
    with open_policy(rank, config) as policy, pytest.MonkeyPatch.context() as patch:
        # In the first step Megatron only counts which gradients there are.
        metrics = train(policy, 2)
        for index, chunk in enumerate(policy._chunks):
            record(events, index, chunk, patch)
        metrics += train(policy, 1)
        policy.settle()
        num_buckets = sum(len(chunk.bucket_groups + chunk.expert_parallel_bucket_groups) for chunk in policy._chunks)
        return events, num_buckets, metrics, raw_checksums(policy)


def record(events: list[Event], index: int, chunk: DistributedDataParallel, patch: pytest.MonkeyPatch) -> None:
    """Notes what happens to a chunk; what happens is what would have happened."""

    def before(owner: object, method: str, event: str) -> None:
        call = getattr(owner, method)

        def noted(*arguments, **options):
            events.append((event, index))
            return call(*arguments, **options)

        patch.setattr(owner, method, noted)

    for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
        before(group, "start_grad_sync", "reduce")
    before(chunk, "finish_grad_sync", "finish")
    for parameter in chunk.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: note(events, index, gradient))


def note(events: list[Event], index: int, gradient: torch.Tensor) -> torch.Tensor:
    events.append(("backward", index))
    return gradient
