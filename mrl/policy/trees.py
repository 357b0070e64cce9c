# SPDX-License-Identifier: Apache-2.0
"""Attention along the paths of prefix trees, and Mamba states that go on into continuations. No Megatron.

U tokens of a tree (`mrl.data.prefixes`), P tokens of paths, C channels, H heads, G groups of heads, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.policy.packed import Bucket, PackedLayout

if TYPE_CHECKING:
    from mrl.data.packing import PrefixTree
    from mrl.policy.mamba_torch import Mixer


def tree_mix(mixer: Mixer, xbcdt_UC: Tensor, tree: PrefixTree) -> Tensor:
    """Convolution and scan of a tree, [U, H * P]: the state at a node's end is where its continuations begin."""
    lengths = torch.tensor(tree.lengths, device=xbcdt_UC.device)
    levels = xbcdt_UC.split([sum(tree.lengths[node] for node in level) for level in tree.levels])
    has_children = set(tree.parents)
    outputs, ends = [], {}
    for number, (level, xbcdt) in enumerate(zip(tree.levels, levels, strict=True)):
        start, above = None, tree.parents[level[0]]
        if above >= 0:
            of = next(index for index, nodes in enumerate(tree.levels) if above in nodes)
            parents = torch.tensor([tree.parents[node] - tree.levels[of][0] for node in level], device=lengths.device)
            start = ends[of].of(parents)
        needs_end = not has_children.isdisjoint(level)
        output, ends[number] = mixer.mix(xbcdt, lengths[level[0] : level[-1] + 1], start, needs_end=needs_end)
        outputs.append(output)
    return torch.cat(outputs)


def tree_layout(tree: PrefixTree, device: torch.device) -> tuple[PackedLayout, list[int]]:
    """Buckets of nodes of the same parent and padded length, and these parents; -1 for none."""
    padded = [-(-length // 16) * 16 if length <= 64 else -(-length // 64) * 64 for length in tree.lengths]
    members: dict[tuple[int, int], list[int]] = {}
    for node, (parent, length) in enumerate(zip(tree.parents, padded, strict=True)):
        members.setdefault((parent, length), []).append(node)
    starts, slots, num_slots = tree.starts, torch.empty(sum(tree.lengths), dtype=torch.int64), 0
    buckets = []
    for (_, length), nodes in members.items():
        buckets.append(Bucket(num_slots, len(nodes), length, torch.tensor(nodes)))
        for node in nodes:
            slots[starts[node] : starts[node + 1]] = torch.arange(num_slots, num_slots + tree.lengths[node])
            num_slots += length
    return PackedLayout(slots.to(device), num_slots, tuple(buckets)), [parent for parent, _ in members]


def tree_attention(
    query_UHD: Tensor, key_UGD: Tensor, value_UGD: Tensor, tree: PrefixTree, *, scale: float | None
) -> Tensor:
    """Causal attention of each token over its path, [U, H, D]."""
    layout, parents = tree_layout(tree, query_UHD.device)
    paths = {parent: tree.path_tokens(parent) for parent in parents if parent >= 0}
    tokens_P = torch.cat([torch.arange(0), *paths.values()]).to(query_UHD.device)
    lengths = [len(path) for path in paths.values()]
    above = dict(
        zip(
            paths,
            zip(*(t.index_select(0, tokens_P).split(lengths) for t in (key_UGD, value_UGD)), strict=True),
            strict=True,
        )
    )
    outputs = []
    for parent, batches in zip(
        parents, zip(*map(layout.unpack, (query_UHD, key_UGD, value_UGD)), strict=True), strict=True
    ):
        q, k, v = (t.transpose(1, 2) for t in batches)
        mask = None
        if parent >= 0:
            # Padding follows a node's tokens, so the causal mask hides it.
            keys, values = (t.transpose(0, 1).expand(len(q), -1, -1, -1) for t in above[parent])
            mask = torch.ones(q.shape[2], keys.shape[2] + q.shape[2], dtype=torch.bool, device=q.device)
            mask.tril_(keys.shape[2])
            k, v = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
        output = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        outputs.append(output.transpose(1, 2))
    return layout.pack(outputs)
