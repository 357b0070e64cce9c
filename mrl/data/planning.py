# SPDX-License-Identifier: Apache-2.0
"""Plans: which sequence goes to which row of which data-parallel rank, a pure function of lengths and their cost.

Lengths are those that sequences take up in a row. Every rank gets the same number of rows, at least one; rows at the
end may be empty.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from zlib import crc32

import numpy as np

from conversion.families.registry import family
from conversion.files.hf_folder import read_config
from mrl.config.model import sizes_of
from mrl.types import Rollout, RolloutInfo

RowPlan = tuple[tuple[tuple[int, ...], ...], ...]
"""plan[dp_rank][row_index] = indices of sequences."""

MIN_SAVED_TOKENS = 16
"""Least tokens that sharing a prefix must save: fewer cost more in calls of kernels."""
BALANCED = "balanced"
WITHIN_RANK = "modified_first_fit_decreasing"
"""Packs the sequences of one rank after `BALANCED` has dealt them to the ranks."""
Rows = list[list[int]]
Item = tuple[int, int]
"""Length and minus the index: the last item of a sorted list is the longest, and of equal ones the first."""


@dataclass(frozen=True)
class SequenceCost:
    """Floating-point operations of a forward pass over one sequence; a backward pass takes a multiple of them."""

    per_token: float
    per_token_squared: float
    scan_per_token: float = 0.0
    """Cost of Mamba scans, which `of` leaves out: rows have always been planned without them."""

    def of(self, length: int) -> float:
        """Operations for a sequence of `length` tokens."""
        return self.per_token * length + self.per_token_squared * length**2


@cache
def sequence_cost(model_folder: str, mtp_steps: int = 0) -> SequenceCost:
    """Cost on the model in a Hugging Face folder, as `cost_of_model`. Each process reads the file once."""
    return cost_of_model(read_config(Path(model_folder) / "config.json"), mtp_steps)


def cost_of_model(hf_config: Mapping[str, object], mtp_steps: int = 0) -> SequenceCost:
    """Cost on the model of a config.json; with `mtp_steps`, of so many steps of multi-token prediction, too.

    A token meets every matrix once, of routed experts its top k, with two operations for an element. In an attention
    layer it meets on average half of its sequence, with four operations for each of its query's elements. Mamba layers
    have no quadratic term; their scan takes seven operations for each element of a channel's state. So counts
    Megatron-LM, too (`num_floating_point_operations`).
    """
    found, sizes = family(hf_config), sizes_of(hf_config)
    shapes, mtp = found.canonical(hf_config), found.mtp(hf_config)
    share = mtp_steps / sizes.num_mtp_steps if mtp else 0.0
    elements = queries = scans = 0.0
    for name, shape in shapes.items():
        times = share if name in mtp else 1.0 + mtp_steps * (name == "lm_head.weight")
        if name.endswith(".A_log"):
            scans += 7 * shapes[name.removesuffix("A_log") + "out_proj.weight"][1] * sizes.mamba_state
        # Vectors and convolutions are no matrix products; the embedding is a lookup, unless the output layer is the
        # same matrix.
        if len(shape) != 2 or ("embed" in name and "lm_head.weight" in shapes):
            continue
        elements += times * shape[0] * shape[1] * (sizes.topk / sizes.experts if ".experts." in name else 1.0)
        if name.endswith("q_proj.weight"):
            # A gate beside each head attends to nothing.
            queries += times * shape[0] / (2 if sizes.has_delta_nets else 1)
    return SequenceCost(per_token=2 * elements, per_token_squared=2 * queries, scan_per_token=scans)


def pack(lengths: Sequence[int], *, algorithm: str, row_tokens: int, dp_size: int, cost: SequenceCost) -> RowPlan:
    """Rows of at most `row_tokens` tokens.

    `balanced` deals the sequences to the ranks, costliest first, each to the rank with the least load in tokens and in
    cost so far, and packs each rank's own. The costliest rows come first, so that rows at one place cost about the same
    on all ranks: experts that are spread over ranks make them wait for each other in every layer. The algorithms of
    `PACKERS` pack all sequences, and deal the rows.
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
    """Rows of another size for the same sequences on every rank."""
    _check_fit(lengths, row_tokens)
    members = [sorted(index for row in rows for index in row) for rows in plan]
    return _packed_within(members, lengths, WITHIN_RANK if algorithm == BALANCED else algorithm, row_tokens)


@dataclass(frozen=True)
class Unit:
    """Sequences that stay together in a row."""

    indices: tuple[int, ...]
    num_tokens: int
    """Tokens that they take up: a prompt that they share counts once."""


def summaries(rollouts: Sequence[Rollout]) -> list[RolloutInfo]:
    """The driver's view of the sequences of an agent's rollout, in order, with the tokens in which they begin alike."""
    prompts = [np.array(one.request.token_ids, dtype=np.int32) for one in rollouts]
    whole = [np.concatenate([prompt, one.token_ids]) for prompt, one in zip(prompts, rollouts, strict=True)]
    return [
        replace(
            RolloutInfo.of(rollout),
            common=tuple(num_common(whole[place], before) for before in whole[:place]),
            prompt_checksum=crc32(prompts[place].tobytes()),
        )
        for place, rollout in enumerate(rollouts)
    ]


def num_common(left: np.ndarray, right: np.ndarray) -> int:
    """Number of equal elements before the first unequal one."""
    size = min(len(left), len(right))
    differs = left[:size] != right[:size]
    return int(differs.argmax()) if differs.any() else size


def prompt_units(rollouts: Sequence[RolloutInfo], *, row_tokens: int, dp_size: int, least_shared: int) -> list[Unit]:
    """The sequences of each prompt's rollouts, in as few units as fit a row; none exceeds a rank's share of all.

    A prompt counts once in a unit, and so do tokens that a further sequence of a rollout has in common with another one
    of the unit; fewer than `least_shared` count in each sequence.
    """
    _check_fit([info.num_tokens for info in rollouts], row_tokens)
    groups: dict[tuple[object, ...], list[int]] = {}
    key: tuple[object, ...] = ()
    for index, info in enumerate(rollouts):
        if not info.is_further:
            key = (info.key, info.prompt_length, info.prompt_checksum)
        # The sequences of an agent are beside its first one, if they are known to begin alike.
        own = (index,) if info.is_further and not info.common else ()
        groups.setdefault((*key, *own), []).append(index)

    def added(index: int, present: Sequence[int]) -> int:
        """Tokens that a sequence adds to those of others of its group in a row."""
        info, found = rollouts[index], 0
        if info.common:
            first = index - info.place
            of_rollout = takewhile(lambda other: other >= first, reversed(present))
            # A branch of fewer tokens is no node of its own.
            found = max((info.common[other - first] for other in of_rollout), default=0) - least_shared + 1
        elif info.prompt_length >= least_shared and any(not rollouts[other].is_further for other in present):
            found = info.prompt_length
        return info.num_tokens - max(0, found)

    total = sum(added(index, group[:at]) for group in groups.values() for at, index in enumerate(group))
    limit = min(row_tokens, -(-total // dp_size))
    units: list[Unit] = []
    for group in groups.values():
        indices, tokens = list[int](), 0
        for index in group:
            more = added(index, indices)
            if indices and tokens + more > limit:
                units.append(Unit(tuple(indices), tokens))
                indices, tokens, more = [], 0, rollouts[index].num_tokens
            indices.append(index)
            tokens += more
        units.append(Unit(tuple(indices), tokens))
    return units


def batch_dynamically(lengths: Sequence[int], *, row_tokens: int, length_multiple: int, dp_size: int) -> RowPlan:
    """Rows of similar-length sequences, as many as fit `row_tokens` padded to the longest (NeMo RL's dynamic batching).

    Ranks take turns at the sequences, sorted by length, and all begin new rows at the same places; the longest sequence
    counts as rounded up to `length_multiple`.
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
    return _even(
        [
            [list(part[start : start + sequences_per_row]) for start in range(0, len(part), sequences_per_row)]
            for part in parts
        ]
    )


def largest_first(plan: RowPlan, lengths: Sequence[int]) -> RowPlan:
    """The plan with the rows of every rank in order of their tokens, most first."""
    return tuple(tuple(sorted(rows, key=lambda row: -sum(lengths[index] for index in row))) for rows in plan)


def rank_shares(plan: RowPlan, lengths: Sequence[int], measure: Callable[[int], float]) -> list[float]:
    """Load of each rank, the sum of `measure(length)`, over the mean load of all ranks; all 1 where there is none."""
    loads = [sum(measure(lengths[index]) for row in rows for index in row) for rows in plan]
    return [load * len(plan) / sum(loads) if sum(loads) else 1.0 for load in loads]


def _check_fit(lengths: Sequence[int], row_tokens: int) -> None:
    too_long = next((index for index, length in enumerate(lengths) if length > row_tokens), None)
    if too_long is not None:
        raise ValueError(
            f"sequence {too_long} has {lengths[too_long]} tokens, more than a packed row holds ({row_tokens}); "
            "raise train_mb_tokens and logprob_mb_tokens of policy.sequence_packing or policy.dynamic_batching, "
            f"whichever is enabled, or lower policy.max_total_sequence_length"
        )


def _deal(weights: Sequence[tuple[float, float]], num_ranks: int, *, at_most: int) -> list[list[int]]:
    """Indices of each rank's items, at most `at_most`, with both weight sums alike between ranks; in rising order."""
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


def _packed_within(
    members: Sequence[Sequence[int]], lengths: Sequence[int], algorithm: str, row_tokens: int
) -> RowPlan:
    rows_of = [PACKERS[algorithm]([lengths[index] for index in mine], row_tokens) for mine in members]
    return _even([[[mine[i] for i in row] for row in rows] for mine, rows in zip(members, rows_of, strict=True)])


def _even(rows_of: Sequence[Rows]) -> RowPlan:
    num_rows = max(1, max(len(rows) for rows in rows_of))
    return tuple(tuple(tuple(row) for row in rows) + ((),) * (num_rows - len(rows)) for rows in rows_of)


def concatenative(lengths: Sequence[int], row_tokens: int) -> Rows:
    """The sequences in order, a new row wherever the next one does not fit."""
    rows: Rows = []
    room = 0
    for index, length in enumerate(lengths):
        if not rows or length > room:
            rows.append([])
            room = row_tokens
        rows[-1].append(index)
        room -= length
    return rows


def first_fit_shuffle(lengths: Sequence[int], row_tokens: int) -> Rows:
    """The sequences in a random order, whose seed is the lengths, each into the first row with room."""
    order = list(range(len(lengths)))
    random.Random(repr(list(lengths))).shuffle(order)
    rows: Rows = [[] for _ in lengths]
    room = np.full(len(lengths), row_tokens)
    for index in order:
        row = int(np.argmax(room >= lengths[index]))
        rows[row].append(index)
        room[row] -= lengths[index]
    return [row for row in rows if row]


def first_fit_decreasing(lengths: Sequence[int], row_tokens: int) -> Rows:
    """The longest first, each into the first row with room. At most 11/9 of the fewest rows, and one more."""
    return _filled([], _sorted(lengths), row_tokens)


def modified_first_fit_decreasing(lengths: Sequence[int], row_tokens: int) -> Rows:
    """Rows of Johnson and Garey (J. Complexity 1, 1985), at most 71/60 of the fewest and one more.

    Every sequence above half a row opens one. Each of these rows, fullest first, takes the longest of those above a
    third that fits; then, emptiest first, a row without one takes two of those above a sixth: the shortest, and the
    longest beside it. The rest as in first fit decreasing.
    """
    items = _sorted(lengths)
    above = [bisect_right(items, (row_tokens // parts, math.inf)) for parts in (2, 3, 6)]
    large = items[above[0] :]
    medium = items[above[1] : above[0]]
    small = items[above[2] : above[1]]
    tiny = items[: above[2]]
    rows = [[item] for item in reversed(large)]
    for row in rows:
        row += _take_longest(medium, row_tokens - row[0][0])
    for row in reversed(rows):
        room = row_tokens - row[0][0]
        if len(row) == 1 and len(small) >= 2 and small[0][0] + small[1][0] <= room:
            row.append(small.pop(0))
            row += _take_longest(small, room - row[1][0])
    return _filled(rows, sorted(medium + small + tiny), row_tokens)


PACKERS: dict[str, Callable[[Sequence[int], int], Rows]] = {
    packer.__name__: packer
    for packer in (concatenative, first_fit_shuffle, first_fit_decreasing, modified_first_fit_decreasing)
}
"""Keys by NeMo RL's name of the algorithm."""


def _sorted(lengths: Sequence[int]) -> list[Item]:
    return sorted((length, -index) for index, length in enumerate(lengths))


def _take_longest(items: list[Item], room: int) -> list[Item]:
    position = bisect_right(items, (room, math.inf))
    return [items.pop(position - 1)] if position else []


def _filled(rows: list[list[Item]], items: list[Item], row_tokens: int) -> Rows:
    filled = []
    opened = iter(rows)
    while (row := next(opened, [])) or items:
        room = row_tokens - sum(length for length, _ in row)
        while taken := _take_longest(items, room):
            row = row + taken
            room -= taken[0][0]
        filled.append([-index for _, index in row])
    return filled
