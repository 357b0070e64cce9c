"""Plans: which sequence goes to which row of which data-parallel rank, as a pure function of the ordered list of lengths."""

from __future__ import annotations

RowPlan = tuple[tuple[tuple[int, ...], ...], ...]
"""plan[dp_rank][row_index] = indices of sequences."""


def plan_rows(lengths: list[int], *, dp_size: int, row_tokens: int) -> RowPlan:
    """Which sequences share a row: `plan[dp_rank][row_index]` = indices into `lengths`, the same number of rows on every rank.

    Longest first, each sequence goes to the rank with the fewest tokens so far (so that ranks differ by one sequence at most), and there
    into the first row with room. Equal lengths keep their order, so the plan is a pure function of the ordered lengths. Rows may be empty.

    Raises:
        ValueError: a sequence is longer than `row_tokens`.
    """
    too_long = [index for index, length in enumerate(lengths) if length > row_tokens]
    if too_long:
        raise ValueError(
            f"sequence {too_long[0]} has {lengths[too_long[0]]} tokens, more than a packed row holds ({row_tokens}); "
            f"raise policy.sequence_packing.train_mb_tokens and logprob_mb_tokens, or lower policy.max_total_sequence_length"
        )
    rank_tokens = [0] * dp_size
    rank_rows: list[list[list[int]]] = [[] for _ in range(dp_size)]
    rank_room: list[list[int]] = [[] for _ in range(dp_size)]
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        rank = rank_tokens.index(min(rank_tokens))
        rank_tokens[rank] += lengths[index]
        row = next((row for row, room in enumerate(rank_room[rank]) if room >= lengths[index]), len(rank_room[rank]))
        if row == len(rank_room[rank]):
            rank_rows[rank].append([])
            rank_room[rank].append(row_tokens)
        rank_rows[rank][row].append(index)
        rank_room[rank][row] -= lengths[index]
    num_rows = max(1, max(len(rows) for rows in rank_rows))
    return tuple(tuple(tuple(row) for row in rows) + ((),) * (num_rows - len(rows)) for rows in rank_rows)
