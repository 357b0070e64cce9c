# SPDX-License-Identifier: Apache-2.0
"""Steps with numbers that are not finite, on every rank of a pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from mrl.config.schema.run import RunConfig
from tests.stack.policy.policy_ranks import message_of, open_policy, optimizer_checksum, raw_checksums, set_batch, train
from tests.stack.policy.save_ranks import save
from tests.stack.ranks import Rank

if TYPE_CHECKING:
    from mrl.policy.policy import PolicyRank


@contextmanager
def ready_policy(rank: Rank, config: RunConfig) -> Iterator[tuple[PolicyRank, tuple[object, object]]]:
    """A policy with a batch ready for its second step, and the checksums of weights and optimizer before it."""
    with open_policy(rank, config) as policy:
        train(policy, 1)
        policy.settle()
        before = raw_checksums(policy), optimizer_checksum(policy)
        set_batch(policy)
        policy.compute_old_logprobs()
        yield policy, before


def step_with_advantage(rank: Rank, config: RunConfig, advantage: float) -> tuple[str, bool, list[dict[str, float]]]:
    """A step with `advantage` as the last rank's advantages: its message, whether no weight or optimizer byte changed.

    Last comes the metrics of a clean step after it.
    """
    with ready_policy(rank, config) as (policy, before):
        if policy.dp_rank == 1:
            for row in policy._batches[0].rows:
                row.advantages_T = torch.full_like(row.advantages_T, advantage)
        message = message_of(policy.train_step)
        policy.settle()
        return message, before == (raw_checksums(policy), optimizer_checksum(policy)), train(policy, 1)


def skipped_step(
    rank: Rank, config: RunConfig
) -> tuple[dict[str, float], bool, list[dict[int, dict[str, np.ndarray]]], list[dict[str, float]]]:
    """A NaN step under policy.not_finite_steps=skip: metrics, whether unchanged, tensors, a clean step's metrics."""
    with ready_policy(rank, config) as (policy, before):
        if policy.dp_rank == 1:
            policy._batches[0].rows[0].advantages_T[:] = torch.nan
        metrics, tensors = policy.train_step(), policy.sequence_tensors()
        policy.settle()
        return metrics, before == (raw_checksums(policy), optimizer_checksum(policy)), tensors, train(policy, 1)


def saved_after_skipping(rank: Rank, config: RunConfig, folder: Path) -> tuple[float, float]:
    """A first step that is skipped, saved, and a clean step, saved: their numbers of skipped updates."""
    with open_policy(rank, config) as policy:
        policy.enter("logprob")
        set_batch(policy)
        policy.compute_old_logprobs()
        policy.enter("train")
        policy._batches[0].rows[0].advantages_T[:] = torch.nan
        skipped = policy.train_step()
        policy.settle()
        save(policy, folder / "first")
        (clean,) = train(policy, 1)
        policy.settle()
        save(policy, folder / "second")
        return skipped["train/num_skipped_updates"], clean["train/num_skipped_updates"]
