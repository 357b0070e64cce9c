"""Plans: which sequence goes to which row of which data-parallel rank, as a pure function of the ordered list of lengths.

Lengths are those that sequences take up in a row. Every rank gets the same number of rows, at least one; rows at the end may be empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mrl.data.bins import PACKERS, Rows
from mrl.data.cost import SequenceCost

RowPlan = tuple[tuple[tuple[int, ...], ...], ...]
"""plan[dp_rank][row_index] = indices of sequences."""

BALANCED = "balanced"
# Packs the sequences of one rank where ranks were balanced first.
WITHIN_RANK = "modified_first_fit_decreasing"


def pack(lengths: Sequence[int], *, algorithm: str, row_tokens: int, dp_size: int, cost: SequenceCost) -> RowPlan:
    """Rows of at most `row_tokens` tokens.

    `balanced` deals the sequences to the ranks, longest first, each to the rank that is then the least loaded in tokens and in cost, and
    packs each rank's own; the costliest rows come first, so that rows at the same place cost about the same on all ranks (experts that are
    spread over ranks make them wait for each other in every layer). The algorithms of `mrl.data.bins` pack all sequences and deal the rows
    in the same way.

    Raises:
        ValueError: a sequence is longer than `row_tokens`.
    """
    _check_fit(lengths, row_tokens)
    weights = [(float(length), cost.of(length)) for length in lengths]
    if algorithm == BALANCED:
        members = _deal(weights, dp_size, at_most=len(lengths))
        plan = _packed_within(members, lengths, WITHIN_RANK, row_tokens)
        return tuple(tuple(sorted(rows, key=lambda row: -sum(weights[index][1] for index in row))) for rows in plan)
    rows = PACKERS[algorithm](lengths, row_tokens)
    row_weights = [(sum(weights[i][0] for i in row), sum(weights[i][1] for i in row)) for row in rows]
    dealt = _deal(row_weights, dp_size, at_most=-(-len(rows) // dp_size))
    return _even([[rows[row] for row in mine] for mine in dealt])


def repack(plan: RowPlan, lengths: Sequence[int], *, algorithm: str, row_tokens: int) -> RowPlan:
    """Rows of another size for the same sequences on every rank.

    Raises:
        ValueError: a sequence is longer than `row_tokens`.
    """
    _check_fit(lengths, row_tokens)
    members = [sorted(index for row in rows for index in row) for rows in plan]
    return _packed_within(members, lengths, WITHIN_RANK if algorithm == BALANCED else algorithm, row_tokens)


def batch_dynamically(lengths: Sequence[int], *, row_tokens: int, length_multiple: int, dp_size: int) -> RowPlan:
    """Rows of sequences of similar length, as many as would fit into `row_tokens` if all were padded to the longest.

    As NeMo RL's dynamic batching: sorted by length, the sequences are dealt to the ranks in turn, and all ranks begin new rows at the same
    places; the longest counts as rounded up to `length_multiple`.

    Raises:
        ValueError: a sequence, rounded up, is longer than `row_tokens`.
    """
    rounded = [-(-length // length_multiple) * length_multiple for length in lengths]
    _check_fit(rounded, row_tokens)
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    rows: list[list[list[int]]] = []
    for start in range(0, len(order), dp_size):
        of_each_rank = order[start : start + dp_size]
        longest = rounded[of_each_rank[-1]]
        if not rows or (len(rows[-1]) + 1) * longest > row_tokens:
            rows.append([])
        rows[-1].append(of_each_rank)
    return _even([[[ranks[rank] for ranks in row if rank < len(ranks)] for row in rows] for rank in range(dp_size)])


def batch_in_order(num_sequences: int, *, sequences_per_row: int, dp_size: int) -> RowPlan:
    """Rows of a fixed number of sequences; ranks take consecutive parts of the batch."""
    per_rank = -(-num_sequences // dp_size)
    parts = [range(num_sequences)[rank * per_rank : (rank + 1) * per_rank] for rank in range(dp_size)]
    return _even([[list(part[start : start + sequences_per_row]) for start in range(0, len(part), sequences_per_row)] for part in parts])


def largest_first(plan: RowPlan, lengths: Sequence[int]) -> RowPlan:
    """The plan with the rows of every rank in order of their tokens, most first."""
    return tuple(tuple(sorted(rows, key=lambda row: -sum(lengths[index] for index in row))) for rows in plan)


def rank_shares(plan: RowPlan, lengths: Sequence[int], measure: Callable[[int], float]) -> list[float]:
    """Of a measure of lengths, what each rank has as a multiple of the mean over ranks; all 1 where there is nothing."""
    loads = [sum(measure(lengths[index]) for row in rows for index in row) for rows in plan]
    return [load * len(plan) / sum(loads) if sum(loads) else 1.0 for load in loads]


def _check_fit(lengths: Sequence[int], row_tokens: int) -> None:
    too_long = next((index for index, length in enumerate(lengths) if length > row_tokens), None)
    if too_long is not None:
        raise ValueError(
            f"sequence {too_long} has {lengths[too_long]} tokens, more than a packed row holds ({row_tokens}); "
            f"raise train_mb_tokens and logprob_mb_tokens of policy.sequence_packing or policy.dynamic_batching, whichever is enabled, "
            f"or lower policy.max_total_sequence_length"
        )


def _deal(weights: Sequence[tuple[float, float]], num_ranks: int, *, at_most: int) -> list[list[int]]:
    """Items of each rank, at most so many, such that neither sum of weights differs much between ranks; in order of the index."""
    totals = np.array(weights).reshape(-1, 2)
    shares = totals / np.maximum(totals.sum(axis=0), 1.0)
    loads = np.zeros((num_ranks, 2))
    members: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in np.argsort(-shares[:, 1], kind="stable").tolist():
        rank = int(np.argmin((loads + shares[index]).max(axis=1)))
        members[rank].append(index)
        loads[rank] += shares[index]
        if len(members[rank]) == at_most:
            loads[rank] = np.inf
    return [sorted(mine) for mine in members]


def _packed_within(members: Sequence[Sequence[int]], lengths: Sequence[int], algorithm: str, row_tokens: int) -> RowPlan:
    rows_of = [PACKERS[algorithm]([lengths[index] for index in mine], row_tokens) for mine in members]
    return _even([[[mine[i] for i in row] for row in rows] for mine, rows in zip(members, rows_of, strict=True)])


def _even(rows_of: Sequence[Rows]) -> RowPlan:
    num_rows = max(1, max(len(rows) for rows in rows_of))
    return tuple(tuple(tuple(row) for row in rows) + ((),) * (num_rows - len(rows)) for rows in rows_of)
