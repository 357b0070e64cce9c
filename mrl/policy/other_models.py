# SPDX-License-Identifier: Apache-2.0
"""Passes for models other than the policy: scores of teachers and reference, a critic's values, its returns.

Collective over all ranks. Each function takes the rank of one model, and makes that current.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mrl.policy import step
from mrl.policy.batch import as_row, sequences_of

if TYPE_CHECKING:
    import numpy as np

    from mrl.policy.policy import PolicyRank
    from mrl.types import TeacherTokens


def teach(teacher: PolicyRank, k: int) -> dict[int, TeacherTokens]:
    """Returns the teacher's k likeliest tokens at each generated token, by sequence index, on the rank that reports it.

    With k = 0 the logprob of the generated token itself, never truncated. Empty on all other ranks.
    """
    teacher.make_current()
    rows = teacher.batches()[0].logprob_rows
    if k:
        return teacher.computed(step.compute_top_logits, rows, teacher.distribution, k)
    return teacher.computed(step.compute_drawn_logprobs, rows, teacher.distribution.untruncated)


def compute_reference_logprobs(reference: PolicyRank) -> list[dict[int, np.ndarray]]:
    """Computes logprobs of the batches' tokens, never truncated. Returns them by sequence, as `compute_values` does."""
    reference.make_current()
    distribution = reference.distribution.untruncated
    found = []
    for batch in reference.batches():
        logprobs = reference.computed(step.compute_logprobs, batch.logprob_rows, distribution)
        found.append(list(batch.with_values(logprobs[: len(batch.logprob_rows)])))
    return sequences_of(found)


def set_reference_logprobs(policy: PolicyRank, logprobs: list[dict[int, np.ndarray]]) -> None:
    """Sets the reference's logprobs of batches, by sequence."""
    policy.make_current()
    for batch, found in zip(policy.batches(), logprobs, strict=True):
        for row in batch.rows:
            row.reference_logprobs_T = as_row(row, found)


def compute_values(critic: PolicyRank) -> list[dict[int, np.ndarray]]:
    """Computes the critic's values of the batches before any update. Returns those of each batch's sequences, by index.

    Only one rank of each dp rank answers; the others return empty mappings.
    """
    critic.make_current()
    for batch in critic.batches():
        values = critic.computed(step.compute_values, batch.logprob_rows)
        for row, values_T in batch.with_values(values[: len(batch.logprob_rows)]):
            row.values_T = values_T
    return sequences_of([[(row, row.values_T) for row in batch.rows] for batch in critic.batches()])


def compute_advantages(policy: PolicyRank, values: list[dict[int, np.ndarray]]) -> list[dict[int, np.ndarray]]:
    """Computes policy advantages from a critic's values of batches; returns the critic's targets, in the same form."""
    policy.make_current()
    for batch, found in zip(policy.batches(), values, strict=True):
        for row in batch.rows:
            row.values_T = as_row(row, found)
    policy.finish_batches()
    return sequences_of([[(row, row.returns_T) for row in batch.rows] for batch in policy.batches()])


def set_returns(critic: PolicyRank, returns: list[dict[int, np.ndarray]]) -> None:
    """Sets the critic's targets by sequence; tokens whose target is NaN do not count."""
    critic.make_current()
    for batch, found in zip(critic.batches(), returns, strict=True):
        batch.take_returns(found)


ON_TOKENS = {
    "compute_reference_logprobs": compute_reference_logprobs,
    "set_reference_logprobs": set_reference_logprobs,
    "compute_values": compute_values,
    "compute_advantages": compute_advantages,
    "set_returns": set_returns,
}
"""The functions that take or return arrays of sequences, by name."""
