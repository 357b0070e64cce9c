# SPDX-License-Identifier: Apache-2.0
"""Ratios, KL estimates, importance weights from logprobs, and sums over sequences. T packed tokens, S sequences a row.

The generator's probabilities differ from the trainer's. The expectation over its tokens needs the weight old /
generator (arXiv:2410.18252); truncating that weight trades variance for bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mrl.config.schema.algo import LossConfig

KlType = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class Segments:
    """Sequence of each row token (int64), a mask of tokens that count (1), their number per sequence (at least 1)."""

    index_T: Tensor
    mask_T: Tensor
    counts_S: Tensor

    @staticmethod
    def of(cu_seqlens: Tensor, mask_T: Tensor) -> Segments:
        """The segments of a whole row; bounds as in `PackedRow.cu_seqlens`."""
        lengths = cu_seqlens.diff().long()
        index_T = torch.repeat_interleave(
            torch.arange(len(lengths), device=lengths.device), lengths, output_size=len(mask_T)
        )
        counts_S = mask_T.new_zeros(len(lengths)).index_add_(0, index_T, mask_T)
        return Segments(index_T, mask_T, counts_S.clamp(min=1.0))

    def sum(self, values_T: Tensor) -> Tensor:
        """Sum over each sequence, [S]; `values_T` must be finite outside the mask too."""
        values_T = values_T * self.mask_T
        return values_T.new_zeros(len(self.counts_S)).index_add(0, self.index_T, values_T)

    def mean(self, values_T: Tensor) -> Tensor:
        """Mean over each sequence, [S]; 0 where none of its tokens counts."""
        return self.sum(values_T) / self.counts_S

    def spread(self, values_S: Tensor) -> Tensor:
        """The value of each token's sequence, [T]."""
        return values_S[self.index_T]

    @property
    def weights_T(self) -> Tensor:
        """Token weights that turn a sum into the sum of the sequences' means."""
        return self.mask_T / self.spread(self.counts_S)


def ratio(log_ratio_T: Tensor, max_log_ratio: float | None) -> Tensor:
    """exp of log-ratios, clamped to +-`max_log_ratio`, no gradient beyond; unbounded, infinite where exp overflows."""
    return torch.exp(log_ratio_T if max_log_ratio is None else log_ratio_T.clamp(-max_log_ratio, max_log_ratio))


def correction_weight(log_ratio_T: Tensor, max_log_ratio: float | None) -> Tensor:
    """Returns `ratio`, but 0 where it overflows, without gradient."""
    is_lost_T = is_bounded(log_ratio_T, max_log_ratio) & (max_log_ratio is None)
    return torch.where(is_lost_T, 0.0, ratio(log_ratio_T.masked_fill(is_lost_T, 0.0), max_log_ratio))


def is_bounded(log_ratio_T: Tensor, max_log_ratio: float | None) -> Tensor:
    """Marks places where `ratio` is not exp of the log-ratio: clamped, or overflowed."""
    if max_log_ratio is None:
        return log_ratio_T > math.log(torch.finfo(log_ratio_T.dtype).max)
    return log_ratio_T.abs() > max_log_ratio


def kl_divergence(
    logprobs_T: Tensor,
    reference_logprobs_T: Tensor,
    *,
    kl_type: KlType,
    input_clamp: float | None = None,
    output_clamp: float | None = None,
    sampling_weights_T: Tensor | None = None,
) -> Tensor:
    """Estimate of KL(policy || reference) from the policy's tokens, per token (http://joschu.net/blog/kl-approx.html).

    `sampling_weights_T` multiplies it before `output_clamp`. With weights whose gradient is that of the policy's
    probability of the token, the gradient is an unbiased estimate of that of the expected value (arXiv:2506.09477);
    without weights it is that of the value alone, which for k1 is 0 in the mean. Where a clamp takes effect, the
    gradient is 0.
    """
    log_ratio_T = reference_logprobs_T - logprobs_T
    if input_clamp is not None:
        is_held_T = log_ratio_T.abs() > input_clamp
        log_ratio_T = log_ratio_T.clamp(-input_clamp, input_clamp)
        if sampling_weights_T is not None:
            sampling_weights_T = torch.where(is_held_T, sampling_weights_T.detach(), sampling_weights_T)
    match kl_type:
        case "k1":
            kl_T = -log_ratio_T
        case "k2":
            kl_T = log_ratio_T.square() / 2
        case "k3":
            kl_T = torch.expm1(log_ratio_T) - log_ratio_T
        case _:
            raise ValueError(f"loss_fn.reference_policy_kl_type={kl_type} is not known; use k1, k2 or k3")
    if sampling_weights_T is not None:
        kl_T = sampling_weights_T * kl_T
    return kl_T if output_clamp is None else kl_T.clamp(-output_clamp, output_clamp)


def log_weights(log_ratio_T: Tensor, segments: Segments, config: LossConfig) -> Tensor:
    """Tokens' log weights [T] from log(old / generator); with `sequence_level_importance_ratios` the sequence's sum."""
    return segments.spread(segments.sum(log_ratio_T)) if config.sequence_level_importance_ratios else log_ratio_T


def importance_weights(log_ratio_T: Tensor, segments: Segments, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Weight of each token, and whether it is out of bounds, [T]. `log_ratio_T` is log(old / generator), no gradient.

    One weight per token, or with `sequence_level_importance_ratios` one per sequence, the product over its tokens. A
    weight that overflows is 0, unless `max_log_ratio` clamps it.
    """
    weights_T = correction_weight(log_weights(log_ratio_T, segments, config), config.max_log_ratio)
    if config.truncation is None:
        return weights_T, torch.zeros_like(weights_T, dtype=torch.bool)
    low, high = config.truncated_importance_sampling_ratio_min or 0.0, config.truncated_importance_sampling_ratio
    assert high is not None
    if (
        config.truncation == "seq-mask-tis"
    ):  # masks sequences by the geometric mean of their weights; the others keep their weights
        mean_S = ratio(segments.mean(log_ratio_T), None)
        is_outside_T = segments.spread((mean_S < low) | (mean_S > high))
    else:
        is_outside_T = (weights_T < low) | (weights_T > high)
    if config.truncation == "tis":  # truncated importance sampling (https://fengyao.notion.site/off-policy-rl)
        return weights_T.clamp(low, high), is_outside_T
    return weights_T.masked_fill(is_outside_T, 0.0), is_outside_T  # as IcePop (arXiv:2510.18855, section 3.2)


def extremes(pattern: str, values: Tensor) -> dict[str, Tensor]:
    """The smallest and the largest value, named by `pattern` with min and max in it; infinite without values."""
    infinity = values.new_tensor([torch.inf])
    return {
        pattern.format("min"): torch.cat([values, infinity]).min(),
        pattern.format("max"): torch.cat([values, -infinity]).max(),
    }
