# SPDX-License-Identifier: Apache-2.0
"""Functions that the tests of Muon run on the ranks."""

from __future__ import annotations

import numpy as np

from mrl.config.schema.run import RunConfig
from tests.stack.policy.policy_ranks import open_policy, raw_checksums, train
from tests.stack.ranks import Rank


def two_steps(rank: Rank, config: RunConfig) -> dict[str, tuple[bool, list[np.ndarray], list[np.ndarray]]]:
    """Parameters: whether each is a matrix of a layer, its values before and after two steps, and the gradients.

    For one rank.
    """
    from mrl.policy.optimizer import main_gradient

    with open_policy(rank, config) as policy:
        named = [pair for chunk in policy._state.chunks for pair in chunk.module.named_parameters()]
        found = {
            name: (
                parameter.dim() == 2 and not getattr(parameter, "is_embedding_or_output_parameter", False),
                [parameter.detach().clone().numpy()],
                list[np.ndarray](),
            )
            for name, parameter in named
        }
        for _ in range(2):
            train(policy, 1)
            for name, parameter in named:
                found[name][1].append(parameter.detach().clone().numpy())
                found[name][2].append(main_gradient(parameter).clone().numpy())
        return found


def steps(rank: Rank, config: RunConfig, num_steps: int) -> tuple[list[dict[str, float]], dict[str, int]]:
    """Metrics of steps, and checksums of the weights after them."""
    with open_policy(rank, config) as policy:
        metrics = train(policy, num_steps)
        policy.settle()
        return metrics, raw_checksums(policy)
