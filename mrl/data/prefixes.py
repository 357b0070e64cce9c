# SPDX-License-Identifier: Apache-2.0
"""Prefix trees of packed rows: sequences that begin alike have the tokens of their beginning once.

T tokens of a row, U tokens of its tree, which has them level by level.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
import torch

from mrl.data.packing import PackedRow, PrefixTree, padded_length
from mrl.data.planning import MIN_SAVED_TOKENS, num_common


def add_trees(rows: Iterable[PackedRow], *, divisible_by: int) -> None:
    """Gives rows without a tree theirs; see `prefix_tree`."""
    for row in rows:
        row.tree = row.tree or prefix_tree(row, divisible_by=divisible_by)


def prefix_tree(row: PackedRow, *, divisible_by: int) -> PrefixTree | None:
    """The tree of a row, padded to a multiple of `divisible_by` tokens; None if no sequences share a beginning.

    Tokens are shared only where their routes are the same, too: two engines may have chosen other experts for a prompt.
    """
    keys, width = _keys(row)
    order = sorted(range(len(keys)), key=keys.__getitem__)
    ordered = [np.frombuffer(keys[index], dtype=np.uint8) for index in order]
    # Tokens that each sequence has in common with the one before it.
    common = [0, *[num_common(ordered[i - 1], ordered[i]) // width for i in range(1, len(order))]]
    bounds = row.cu_seqlens.tolist()
    tokens_T, num_tokens = np.zeros(len(row.token_ids_T), dtype=np.int64), 0
    positions: list[np.ndarray] = []
    parents: list[int] = []
    counts: list[int] = []
    depths: list[int] = []
    # Part [low, high) of the order, tokens that its sequences have above, node and level there.
    waiting = deque([(0, len(order), 0, -1, 0)] if order else [])
    while waiting:
        low, high, start, parent, level = waiting.popleft()
        stop = min(common[low + 1 : high], default=row.lengths[order[low]])
        is_node = high - low == 1 or (stop - start) * (high - low - 1) >= MIN_SAVED_TOKENS
        if is_node:
            if stop > start:
                for index in order[low:high]:
                    first = bounds[index]
                    tokens_T[first + start : first + stop] = np.arange(num_tokens, num_tokens + stop - start)
                positions.append(np.arange(bounds[order[low]] + start, bounds[order[low]] + stop))
                parents.append(parent)
                counts.append(high - low)
                depths.append(level)
                num_tokens, parent, level = num_tokens + stop - start, len(parents) - 1, level + 1
            start = stop
        if high - low > 1:
            cuts = [low, *[i for i in range(low + 1, high) if common[i] == stop], high]
            parts = [(a, b, start, parent, level) for a, b in zip(cuts, cuts[1:], strict=False)]
            # Levels stay in order: parts of the same level come next.
            waiting.extend(parts) if is_node else waiting.extendleft(reversed(parts))
    if num_tokens == sum(row.lengths):
        return None
    padding = padded_length(num_tokens, divisible_by) - num_tokens
    if padding:
        positions.append(np.zeros(padding, dtype=np.int64))
        parents.append(-1)
        counts.append(0)
        depths.append(max(depths) + 1)
    edges = [0, *[i for i in range(1, len(depths)) if depths[i] != depths[i - 1]], len(depths)]
    return PrefixTree(
        positions_U=torch.from_numpy(np.concatenate(positions)),
        tokens_T=torch.from_numpy(tokens_T),
        lengths=tuple(map(len, positions)),
        parents=tuple(parents),
        counts=tuple(counts),
        levels=tuple(range(a, b) for a, b in zip(edges, edges[1:], strict=False)),
    )


def _keys(row: PackedRow) -> tuple[list[bytes], int]:
    """The tokens of each sequence as bytes in an order that keeps prefixes together, routes included; bytes a token."""
    columns = [row.token_ids_T.numpy().astype(">u4").view(np.uint8).reshape(-1, 4)]
    if row.routes is not None:
        ids_TLK = row.routes.expert_ids_TLK.numpy()
        columns += [
            row.routes.is_known_T.numpy().astype(np.uint8)[:, None],
            np.ascontiguousarray(ids_TLK).view(np.uint8).reshape(len(ids_TLK), -1),
        ]
    whole = np.concatenate(columns, axis=1)
    starts = row.cu_seqlens.tolist()
    return [
        whole[start : start + length].tobytes() for start, length in zip(starts, row.lengths, strict=False)
    ], whole.shape[1]
