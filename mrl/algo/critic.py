# SPDX-License-Identifier: Apache-2.0
"""PPO's use of a critic's values: advantages of tokens, returns that values are trained on (GAE), and the value loss.

Pure torch functions over the rows of one data-parallel rank. T packed tokens of a row, N of them valid, S sequences of
a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mrl.algo.advantages import normalize_over_tokens
from mrl.algo.losses import LOSS
from mrl.algo.ratios import Segments, extremes

if TYPE_CHECKING:
    from mrl.config.schema.ppo import GaeConfig, ValueLossConfig

# NeMo RL adds this to the variance of advantages, and uses it as the least variance of returns.
_EPSILON = 1e-8


@dataclass(frozen=True)
class ValuedRow:
    """A row with a critic's values. As in `PackedRow`, t stands for the token it predicts, with the value before it."""

    values_T: Tensor
    rewards_S: Tensor
    """Rewards by `cu_seqlens`; each belongs to the last valid token."""
    loss_mask_T: Tensor
    cu_seqlens: Tensor
    kl_T: Tensor | None = None
    """KL penalty to subtract from the reward of each token; None = there is none."""


def token_advantages_and_returns(row: ValuedRow, config: GaeConfig) -> tuple[Tensor, Tensor]:
    """Unnormalised advantages and returns of a row's tokens, float64 [T] both, 0 outside the mask (arXiv:1506.02438).

    Tokens outside the mask are no steps: a valid token leads to the next valid one of its sequence. The last one is
    terminal, also in a rollout that was cut off. Advantages and returns may have different lambdas (arXiv:2504.05118).
    """
    is_valid_T = row.loss_mask_T > 0
    segments = Segments.of(row.cu_seqlens, is_valid_T.double())
    index_N, values_N = segments.index_T[is_valid_T], row.values_T[is_valid_T].double()
    is_last_N = torch.ones_like(index_N, dtype=torch.bool)
    is_last_N[:-1] = index_N[1:] != index_N[:-1]
    rewards_N = torch.where(is_last_N, row.rewards_S.double()[index_N], 0.0)
    if row.kl_T is not None:
        rewards_N = rewards_N - row.kl_T[is_valid_T].double()
    next_values_N = torch.where(is_last_N, 0.0, values_N.roll(-1))
    errors_N = rewards_N + config.gae_gamma * next_values_N - values_N

    def gae(lambda_N: Tensor | float) -> Tensor:
        return discounted_sums(
            errors_N, torch.where(is_last_N, 0.0, config.gae_gamma * torch.as_tensor(lambda_N).double())
        )

    advantages_N = gae(_policy_lambda(config, segments.spread(segments.counts_S)[is_valid_T]))
    value_lambda = config.gae_lambda if config.gae_lambda_value is None else config.gae_lambda_value
    returns_N = gae(value_lambda) + values_N
    advantages_T, returns_T = torch.zeros(2, *row.loss_mask_T.shape, dtype=torch.float64)
    advantages_T[is_valid_T], returns_T[is_valid_T] = advantages_N, returns_N
    return advantages_T, returns_T


def _policy_lambda(config: GaeConfig, lengths_N: Tensor) -> Tensor | float:
    if config.length_adaptive_alpha > 0:
        return 1.0 - 1.0 / (config.length_adaptive_alpha * lengths_N).clamp(min=1.0)
    return config.gae_lambda if config.gae_lambda_policy is None else config.gae_lambda_policy


def discounted_sums(values_N: Tensor, decay_N: Tensor) -> Tensor:
    """x with x[t] = values[t] + decay[t] * x[t + 1], and 0 after the end; in log2(N) passes."""
    sums_N, decay_N, reach = values_N.clone(), decay_N.clone(), 1
    while reach < len(sums_N):
        sums_N[:-reach] += decay_N[:-reach] * sums_N[reach:].clone()
        decay_N = torch.cat([decay_N[:-reach] * decay_N[reach:], decay_N.new_zeros(reach)])
        reach *= 2
    return sums_N


def gae_of_rows(
    rows: Sequence[ValuedRow], config: GaeConfig, add_over_ranks: Callable[[Tensor], Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Advantages and returns of a step's rows, float32 [T]; advantages normalised over valid tokens if configured."""
    advantages, returns = (
        list(part) for part in zip(*(token_advantages_and_returns(row, config) for row in rows), strict=True)
    )
    if config.normalize_advantages:
        advantages = normalize_over_tokens(
            advantages, [row.loss_mask_T for row in rows], add_over_ranks, added_to_variance=_EPSILON
        )
    return [advantages_T.float() for advantages_T in advantages], [returns_T.float() for returns_T in returns]


def value_loss(
    values_T: Tensor,
    old_values_T: Tensor,
    returns_T: Tensor,
    loss_mask_T: Tensor,
    config: ValueLossConfig,
    *,
    num_tokens: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of a row's values (scalar, gradient by `values_T`), and its metrics, which `finish_value_metrics` completes.

    Half the squared distance from the returns. With `cliprange`, the larger of this and the loss of values clipped to
    that range around the old ones (arXiv:2005.12729). `num_tokens` counts the masks of the global batch. Tokens outside
    the mask have no effect.
    """
    is_valid_T = loss_mask_T > 0
    values_N, old_values_N, returns_N = values_T[is_valid_T], old_values_T[is_valid_T], returns_T[is_valid_T]
    error_N, is_clipped_N = (values_N - returns_N).square(), torch.zeros_like(values_N, dtype=torch.bool)
    plain_N = error_N.detach()
    if config.cliprange:
        near_N = values_N.clamp(old_values_N - config.cliprange, old_values_N + config.cliprange)
        near_error_N = (near_N - returns_N).square()
        error_N, is_clipped_N = torch.maximum(error_N, near_error_N), near_error_N > error_N
    per_token = 1.0 / max(num_tokens, 1.0)
    loss = 0.5 * config.scale * error_N.sum() * per_token
    with torch.no_grad():
        means = {
            "vf_clipfrac": is_clipped_N.float(),
            "returns_mean": returns_N,
            "values_mean": values_N,
            "returns_sq_mean": returns_N.square(),
            "residual_sq_mean": plain_N,
        }
        metrics = {name: values.sum() * per_token for name, values in means.items()}
        metrics |= extremes("values_{}", values_N)
    return loss, {LOSS: loss.detach(), **metrics}


def finish_value_metrics(sums: dict[str, float]) -> dict[str, float]:
    """Metrics of the global batch from the sums of its rows. The extremes of no values are 0."""
    return {
        name: value if math.isfinite(value) or not name.startswith("values_m") else 0.0 for name, value in sums.items()
    }


def explained_variance(updates: Sequence[Mapping[str, float]]) -> float:
    """The share of the returns' variance that the values explain: at most 1; 0 if there are no tokens."""
    num_tokens = sum(update["num_valid_tokens"] for update in updates)

    def mean(name: str) -> float:
        return sum(update["num_valid_tokens"] * update[name] for update in updates) / num_tokens

    if num_tokens == 0:
        return 0.0
    returns_variance = mean("returns_sq_mean") - mean("returns_mean") ** 2
    residual_variance = mean("residual_sq_mean") - (mean("returns_mean") - mean("values_mean")) ** 2
    return 1.0 - residual_variance / max(returns_variance, _EPSILON)
