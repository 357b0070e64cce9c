# SPDX-License-Identifier: Apache-2.0
"""Functions that reference tests run on the ranks: a step whose reference the policy keeps, or a model apart is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mrl.config.schema.run import RunConfig
from mrl.phases import REFERENCE
from tests.stack.policy.critic_ranks import of_all_ranks, rows_of
from tests.stack.policy.policy_ranks import open_models
from tests.stack.ranks import Rank

if TYPE_CHECKING:
    from mrl.policy.policy import PolicyRank


@dataclass
class Compared:
    """Results of a step on one rank."""

    logprobs: list[dict[int, np.ndarray]]
    """The reference's, by batch and sequence, of all ranks."""
    metrics: dict[str, float]
    keeps_reference: bool


def step(rank: Rank, config: RunConfig) -> Compared:
    """A step of a policy that has left its starting weights."""
    apart = [(REFERENCE, config)] if config.has_reference_apart else []
    with open_models(rank, [*apart, ("policy", config)]) as (*reference, policy):
        policy.perturb(1)
        policy.enter("logprob")
        policy.set_batch(rows_of(policy))
        policy.compute_old_logprobs()
        if reference:
            _hand_over(reference[0], policy)
        else:
            policy.compute_reference_logprobs()
        found = [
            {index: tensors["reference_logprobs"] for index, tensors in batch.items()}
            for batch in policy.sequence_tensors()
        ]
        policy.enter("train")
        return Compared(of_all_ranks(found), policy.train_step(), policy._reference is not None)


def _hand_over(reference: PolicyRank, policy: PolicyRank) -> None:
    from mrl.policy import other_models

    reference.enter("teacher")
    reference.set_batch(rows_of(reference))
    other_models.set_reference_logprobs(policy, of_all_ranks(other_models.compute_reference_logprobs(reference)))
