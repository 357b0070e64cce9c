# SPDX-License-Identifier: Apache-2.0
"""Functions that run on the ranks of the router replay tests: a whole `Policy` on rollouts that carry routes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mrl.config.schema.run import RunConfig
from mrl.data.packing import PackedRow, pack_row
from mrl.types import Rollout
from tests.rollouts import pulled
from tests.stack.policy.policy_ranks import PAD_TOKEN_ID, kept_by_rows, open_policy
from tests.stack.ranks import Rank


@dataclass(frozen=True)
class Mismatch:
    """Logprobs of the generated tokens of all rollouts, in order, and how often routers would have chosen otherwise."""

    replayed: np.ndarray
    unreplayed: np.ndarray
    metrics: dict[str, float]


def mismatch(rank: Rank, config: RunConfig, rollouts: Sequence[Rollout], rollouts_per_row: int) -> Mismatch | None:
    """Mismatch with the model folder's weights; None on all but the last pipeline stage. Ranks compute all rows."""
    rows = [
        pack_row(
            {
                index: pulled(rollout, 1.0, True)
                for index, rollout in enumerate(rollouts[start : start + rollouts_per_row])
            },
            divisible_by=config.policy.row_multiple,
            pad_token_id=PAD_TOKEN_ID,
        )
        for start in range(0, len(rollouts), rollouts_per_row)
    ]
    with open_policy(rank, config) as policy:
        policy.set_batch(rows)
        assert policy._replay is not None
        with policy._replay.counting():
            replayed = policy.logprobs_of_rows(rows)
        unreplayed = policy.logprobs_of_rows([dataclasses.replace(row, routes=None) for row in rows])
        metrics = policy._replay.take_metrics()
    if not replayed:
        return None
    return Mismatch(_generated(rows, replayed), _generated(rows, unreplayed), metrics)


def _generated(rows: list[PackedRow], logprobs: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(
        [logprobs_T[row.generated_mask_T.bool().numpy()] for row, logprobs_T in zip(rows, logprobs, strict=True)]
    )


def training(rank: Rank, config: RunConfig, rollouts: Sequence[Rollout]) -> tuple[dict[str, float], list[np.ndarray]]:
    """A step's metrics on these rollouts, one row per rank, reference logprobs before it on the last pipeline stage."""
    with open_policy(rank, config) as policy:
        mine = list(enumerate(rollouts))[policy.dp_rank :: config.data_parallel_size]
        row = pack_row(
            {index: pulled(rollout, 1.0, True) for index, rollout in mine}, divisible_by=2, pad_token_id=PAD_TOKEN_ID
        )
        policy.set_batch([row])
        policy.compute_old_logprobs()
        policy.compute_reference_logprobs()
        references = kept_by_rows(policy, "reference_logprobs_T")
        policy.enter("train")
        return policy.train_step(), references


def generator_error(logprobs: np.ndarray, rollouts: Sequence[Rollout]) -> float:
    """token_mult_prob_error of these log-probabilities against those of the engine."""
    generator = np.concatenate([rollout.generator_logprobs for rollout in rollouts])
    return float(np.exp(np.abs(logprobs - generator)).mean())


def with_routes(rollout: Rollout, routes: np.ndarray) -> Rollout:
    """The rollout as if an engine had chosen these routes."""
    return dataclasses.replace(rollout, routes=routes)


def tokens_of(rollout: Rollout) -> list[int]:
    """Prompt and generated tokens."""
    return [*rollout.request.token_ids, *rollout.token_ids.tolist()]
