# SPDX-License-Identifier: Apache-2.0
"""Expert balance of a train step: metrics, and the direction in which each expert's bias should move.

Shape suffixes: L layers of the whole model, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LOSS_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Metric of each auxiliary loss, as Megatron names it."""


@dataclass(frozen=True)
class Routing:
    """The routers' choices in a step, the same on every rank: tokens of the global batch by expert (int64; none in
    layers without experts), and each auxiliary loss before its coefficient (float64 [L])."""

    tokens_LE: Tensor
    losses: dict[str, Tensor]


def bias_directions(tokens_LE: Tensor) -> Tensor:
    """1 for every expert with fewer tokens than its layer's mean, -1 for one with more, else 0 (arXiv:2408.15664)."""
    return torch.sign(tokens_LE.sum(dim=1, keepdim=True) - tokens_LE * tokens_LE.shape[1])


def balance_metrics(routing: Routing, *, per_layer: bool) -> dict[str, float]:
    """Measures how evenly a step used the experts; empty for a model without experts.

    By layer, over the global batch: `moe/max_violation`, tokens of the busiest expert above the mean, in means (MaxVio
    of arXiv:2408.15664); `moe/load_entropy` of the experts' shares (1 = balance); `moe/unused_experts`, a share; and
    the auxiliary loss, if any. Each is the mean over the layers with experts; the first three also the worst, as
    `_worst`; with `per_layer` each layer's, as `_layer_N` from 0.
    """
    layers = routing.tokens_LE.any(dim=1).nonzero().flatten().tolist()
    if not layers:
        return {}
    shares_LE = routing.tokens_LE[layers].double()
    shares_LE = shares_LE / shares_LE.sum(dim=1, keepdim=True)
    num_experts = shares_LE.shape[1]
    entropies_L = -torch.xlogy(shares_LE, shares_LE).sum(dim=1) / math.log(max(2, num_experts))
    by_layer = {
        "max_violation": shares_LE.amax(dim=1) * num_experts - 1,
        "load_entropy": entropies_L,
        "unused_experts": (shares_LE == 0).double().mean(dim=1),
    }
    metrics = {
        f"moe/{name}_worst": float(values.min() if name == "load_entropy" else values.max())
        for name, values in by_layer.items()
    }
    by_layer |= {LOSS_NAMES[kind]: loss[layers] for kind, loss in routing.losses.items()}
    metrics |= {f"moe/{name}": float(values.mean()) for name, values in by_layer.items()}
    if per_layer:
        for name, values in by_layer.items():
            metrics |= {
                f"moe/{name}_layer_{layer}": value for layer, value in zip(layers, values.tolist(), strict=True)
            }
    return metrics
