# SPDX-License-Identifier: Apache-2.0
"""Functions that run on the ranks of the tests of recomputation: how much a pass keeps for its backward pass."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import torch

from mrl.config.schema.policy import PolicyConfig
from tests.stack.policy import layout_ranks
from tests.stack.ranks import Rank


class SavedBytes:
    """Counts the memory that autograd keeps for backward passes, each storage once, weights left out."""

    def __init__(self, weights: set[int]) -> None:
        self.peak = 0
        self._weights = weights
        self._now = 0
        self._num_holders: Counter[int] = Counter()

    def pack(self, tensor: torch.Tensor) -> _Held:
        return _Held(self, tensor)

    def change(self, storage: torch.UntypedStorage, by: int) -> None:
        address = storage.data_ptr()
        if address in self._weights:
            return
        was_held = self._num_holders[address] > 0
        self._num_holders[address] += by
        if was_held != (self._num_holders[address] > 0):
            self._now += by * storage.nbytes()
        self.peak = max(self.peak, self._now)


class _Held:
    def __init__(self, saved: SavedBytes, tensor: torch.Tensor) -> None:
        self._saved, self.tensor = saved, tensor
        saved.change(tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        self._saved.change(self.tensor.untyped_storage(), -1)


def peak_saved_bytes(rank: Rank, config: PolicyConfig, folder: Path, rows: list[list[list[int]]]) -> int:
    """The most that autograd keeps at any time while this rank computes the gradients of the rows."""
    from mrl.policy import parallel

    chunks, _, tensors = layout_ranks._build(rank, config, folder)
    saved = SavedBytes({tensor.untyped_storage().data_ptr() for tensor in tensors.values()})
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda held: held.tensor):
        layout_ranks._forward_backward(chunks, config, folder, rows)
    parallel.shutdown()
    return saved.peak


def hybrid_gradients_by_group_size(
    rank: Rank, folder: Path, rows: list[list[list[int]]], group_sizes: tuple[int, ...]
) -> list[dict[str, np.ndarray]]:
    """Gradients by parameter, with this many layers recomputed together."""
    from mrl.policy import parallel

    config = layout_ranks.policy_config(activation_checkpointing=True)
    chunks, _, _ = layout_ranks._build(rank, config, folder)
    results = []
    for size in group_sizes:
        chunks[0].config.recompute_num_layers = size
        chunks[0].zero_grad_buffer()
        layout_ranks._forward_backward(chunks, config, folder, rows)
        results.append({name: parameter.main_grad.numpy().copy() for name, parameter in chunks[0].named_parameters()})
    parallel.shutdown()
    return results
