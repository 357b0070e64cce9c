"""Rollout groups with advantages to a global batch: flat sequences, and the row of the rank where each is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mrl.data.packing import padded_length
from mrl.data.planning import plan_rows
from mrl.types import Batch, RolloutGroup, TrainSequence

if TYPE_CHECKING:
    from mrl.config.schema import RunConfig
    from mrl.config.schema_policy import PolicyConfig


def make_batch(groups: list[RolloutGroup], advantages: list[list[float]], config: RunConfig) -> Batch:
    """The batch of these groups, a pure function of their order. `advantages[i][j]` belongs to rollout j of group i.

    Rollouts without a valid verdict keep their place, with advantage 0, and do not count in the denominators.

    Raises:
        ValueError: a rollout with its prompt is longer than a row.
    """
    sequences = tuple(
        TrainSequence(rollout=rollout, advantage=advantage if verdict.is_valid else 0.0, is_valid=verdict.is_valid)
        for group, group_advantages in zip(groups, advantages, strict=True)
        for rollout, verdict, advantage in zip(group.rollouts, group.verdicts, group_advantages, strict=True)
    )
    valid_lengths = [sequence.rollout.length for sequence in sequences if sequence.is_valid and sequence.rollout.length > 0]
    return Batch(
        sequences=sequences,
        rows=plan_rows(
            [padded_length(sequence.rollout.num_tokens, config.policy.sequence_multiple) for sequence in sequences],
            dp_size=config.data_parallel_size,
            row_tokens=max_row_tokens(config.policy),
        ),
        num_valid_tokens=sum(valid_lengths),
        num_valid_sequences=len(valid_lengths),
    )


def max_row_tokens(config: PolicyConfig) -> int:
    """Tokens of sequences that a row may hold. The same rows serve logprobs and training, and stay within both limits when padded."""
    limit = min(config.sequence_packing.train_mb_tokens, config.sequence_packing.logprob_mb_tokens)
    return limit - limit % config.row_multiple
