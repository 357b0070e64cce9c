# SPDX-License-Identifier: Apache-2.0
"""Fill of rows, balance of data-parallel ranks and planning time of each packing algorithm: docs/data/packing.json.

Usage: python -m scripts.bench.packing [--no-record]

The batch of a 256-GPU run: 2,048 rollouts on TP2 PP2 CP4, so 16 data-parallel ranks. Lengths are lognormal, cut off at
49,152 tokens, from five seeds. The lower bound of rows is the fewest that any packing needs, rounded up to the same
number on every rank. Balance is the busiest rank over the mean, the worst of the seeds.
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import numpy as np

from mrl.data.planning import BALANCED, PACKERS, RowPlan, SequenceCost, cost_of_model, pack, rank_shares
from scripts.bench.shapes import NANO
from scripts.bench.turns import bench_parser, report
from tests.long.record import Row

ROW_TOKENS = 49_152
DP_SIZE = 16
SEQUENCE_MULTIPLE = 8  # 2 * CP
SEEDS = range(5)
MEDIANS = {2048: (4_000, 12_000), 16_384: (4_000,)}
"""Median length of the batches by their number of sequences."""
DEALT_IN_TURN = "modified_first_fit_decreasing, rows dealt in turn"

Planner = Callable[..., RowPlan]
"""Called with lengths, and `cost` by name."""


def main() -> None:
    """Measures, prints a JSON line per row, and records."""
    options = bench_parser(__doc__).parse_args()
    rows = (measure(name, num, median) for num, medians in MEDIANS.items() for median in medians for name in planners())
    report("packing", rows, options)


def planners() -> dict[str, Planner]:
    """Every algorithm, and modified first fit decreasing as NeMo RL deals its rows to the ranks."""
    names = (BALANCED, *reversed(PACKERS))
    return {name: partial(pack, algorithm=name, row_tokens=ROW_TOKENS, dp_size=DP_SIZE) for name in names} | {
        DEALT_IN_TURN: dealt_in_turn
    }


def dealt_in_turn(lengths: list[int], cost: SequenceCost) -> RowPlan:
    """Row i goes to rank i modulo the number of ranks; what is missing to a full turn are empty rows."""
    rows = [tuple(row) for row in PACKERS["modified_first_fit_decreasing"](lengths, ROW_TOKENS)]
    rows += [()] * (-len(rows) % DP_SIZE)
    return tuple(tuple(rows[rank::DP_SIZE]) for rank in range(DP_SIZE))


def fewest_rows(lengths: Sequence[int], row_tokens: int) -> int:
    """A lower bound of the rows any packing needs (L2 of Martello and Toth, Discrete Applied Mathematics 28, 1990).

    For every k up to half a row: sequences longer than row - k share a row with none of at least k, those above half a
    row not with each other; what is at least k then fills the room that the latter leave.
    """
    items = sorted(lengths)
    total = [0, *accumulate(items)]
    above_half = bisect_right(items, row_tokens // 2)
    bound = math.ceil(total[-1] / row_tokens)
    for shortest in range(above_half):
        alone = bisect_right(items, row_tokens - items[shortest])
        num_open = alone - above_half
        room = num_open * row_tokens - (total[alone] - total[above_half])
        overflow = total[above_half] - total[shortest] - room
        bound = max(bound, len(items) - above_half + max(0, math.ceil(overflow / row_tokens)))
    return max(bound, len(items) - above_half)


def long_tailed(num_sequences: int, median: int, seed: int) -> list[int]:
    """Lengths, as padded for context parallelism."""
    draws = np.random.default_rng(seed).lognormal(math.log(median), 1.0, num_sequences).clip(64, ROW_TOKENS)
    return (np.ceil(draws / SEQUENCE_MULTIPLE) * SEQUENCE_MULTIPLE).astype(int).tolist()


def measure(name: str, num_sequences: int, median: int) -> Row:
    """One algorithm on the batches of all seeds."""
    cost, plan_rows = cost_of_model(json.loads(NANO.read_text(encoding="utf-8"))), planners()[name]
    num_rows = num_bound = 0
    seconds, tokens_balance, cost_balance = [], [], []
    for seed in SEEDS:
        lengths = long_tailed(num_sequences, median, seed)
        started = time.perf_counter()
        plan = plan_rows(lengths, cost=cost)
        seconds.append(time.perf_counter() - started)
        num_rows += DP_SIZE * len(plan[0])
        num_bound += DP_SIZE * math.ceil(fewest_rows(lengths, ROW_TOKENS) / DP_SIZE)
        tokens_balance.append(max(rank_shares(plan, lengths, float)))
        cost_balance.append(max(rank_shares(plan, lengths, cost.of)))
    return {
        "algorithm": name,
        "sequences": num_sequences,
        "median_tokens": median,
        "rows": num_rows // len(SEEDS),
        "rows / lower bound": round(num_rows / num_bound, 4),
        "tokens max/mean": round(max(tokens_balance), 4),
        "cost max/mean": round(max(cost_balance), 4),
        "planning s": round(max(seconds), 3),
    }


if __name__ == "__main__":
    main()
