# SPDX-License-Identifier: Apache-2.0
"""Prefix trees of packed rows: sequences that begin alike have the tokens of their beginning once.

T tokens of a row, U tokens of its tree, which has them level by level.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from mrl.data.packing import PackedRow, padded_length

if TYPE_CHECKING:
    pass

# A shorter prefix costs more in calls of kernels than it saves in tokens.
MIN_SAVED_TOKENS = 16


@dataclass(frozen=True)
class PrefixTree:
    """The tokens of a row without repetition. A node is a run of tokens that all its sequences have after its parent's.

    A path is the tokens of a node and of all nodes above it, from the first of a sequence.
    """

    positions_U: torch.Tensor
    """int64, position in the row of each token, in the first of its sequences; 0 for padding."""
    tokens_T: torch.Tensor
    """int64, the tree's token at each position of the row; 0 for padding."""
    lengths: tuple[int, ...]
    """Tokens of each node, level by level; padding is the last node, a level of its own."""
    parents: tuple[int, ...]
    """Node above each node; -1 without one."""
    counts: tuple[int, ...]
    """Sequences that have each node; 0 for padding."""
    levels: tuple[range, ...]
    """Nodes of each level. Parents are in earlier levels; nodes of a level have all a parent, or none has."""

    @property
    def counts_U(self) -> torch.Tensor:
        """How many tokens of the row each is, int64."""
        return torch.tensor(self.counts).repeat_interleave(torch.tensor(self.lengths))

    @property
    def starts(self) -> list[int]:
        """The first token of each node, and at last U."""
        return [0, *np.cumsum(self.lengths).tolist()]

    def path(self, node: int) -> list[int]:
        """The nodes from the root to this one, or none for -1."""
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def path_tokens(self, node: int) -> torch.Tensor:
        """The tokens of a path, int64, those of the node included; empty for -1."""
        starts, nodes = self.starts, self.path(node)
        return torch.cat([torch.arange(0), *[torch.arange(starts[index], starts[index + 1]) for index in nodes]])


def prefix_tree(row: PackedRow, *, divisible_by: int) -> PrefixTree | None:
    """The tree of a row, padded to a multiple of `divisible_by` tokens; None if no sequences share a beginning.

    Tokens are shared only where their routes are the same, too: two engines may have chosen other experts for a prompt.
    """
    keys, width = _keys(row)
    order = sorted(range(len(keys)), key=keys.__getitem__)
    ordered = [np.frombuffer(keys[index], dtype=np.uint8) for index in order]
    # Tokens that each sequence has in common with the one before it.
    common = [0, *[_num_equal(ordered[i - 1], ordered[i]) // width for i in range(1, len(order))]]
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


def _num_equal(left: np.ndarray, right: np.ndarray) -> int:
    """Number of equal elements before the first unequal one."""
    size = min(len(left), len(right))
    differs = left[:size] != right[:size]
    return int(differs.argmax()) if differs.any() else size
