"""Routes of packed rows: the experts that the engine sent each token through.

T tokens of a row, L layers with experts (in the order of the model), K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class PackedRoutes:
    """The routes of one row."""

    expert_ids_TLK: torch.Tensor
    """uint8 as the engine gave them, int16 above 256 experts. 0 where no route is known."""
    is_known_T: torch.Tensor
    """bool, False at tokens that the engine never saw: the last one of each sequence, and padding. The router chooses for them."""


def pack_routes(sequences: Sequence[np.ndarray | None], starts: Sequence[int], num_tokens: int) -> PackedRoutes | None:
    """The routes of a row of `num_tokens` tokens, from the `Rollout.routes` of the sequences that begin at `starts`; None if none has any.

    Raises:
        ValueError: some rollouts have routes and some do not, or they differ in layers or experts per token.
    """
    routes = [array for array in sequences if array is not None]
    if not routes:
        return None
    shapes = {array.shape[1:] for array in routes}
    if len(routes) < len(sequences) or len(shapes) > 1:
        raise ValueError(f"{len(routes)} of {len(sequences)} rollouts of a packed row have routes, of shapes {sorted(shapes)} per token")
    # Rows and slices of them are indexed, which torch does not do with uint16.
    dtype = np.uint8 if routes[0].dtype == np.uint8 else np.int16
    expert_ids = np.zeros((num_tokens, *routes[0].shape[1:]), dtype=dtype)
    is_known = np.zeros(num_tokens, dtype=np.bool_)
    for array, start in zip(routes, starts, strict=True):
        expert_ids[start : start + len(array)] = array
        is_known[start : start + len(array)] = True
    return PackedRoutes(torch.from_numpy(expert_ids), torch.from_numpy(is_known))
