"""Ratios of token probabilities, KL estimates and importance weights, all from logprobs. T packed tokens, S sequences of a row.

The generator's probabilities differ from the trainer's. The expectation over its tokens needs the weight old / generator
(arXiv:2410.18252); truncating that weight trades variance for bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mrl.algo.sequences import Segments
    from mrl.config.schema.algo import LossConfig

KlType = Literal["k1", "k2", "k3"]


def ratio(log_ratio_T: Tensor, max_log_ratio: float | None) -> Tensor:
    """exp of log-ratios, clamped to +-`max_log_ratio`, without gradient beyond; without that bound infinite where exp overflows."""
    return torch.exp(log_ratio_T if max_log_ratio is None else log_ratio_T.clamp(-max_log_ratio, max_log_ratio))


def correction_weight(log_ratio_T: Tensor, max_log_ratio: float | None) -> Tensor:
    """As `ratio`, but 0 where it overflows, without gradient."""
    is_lost_T = is_bounded(log_ratio_T, max_log_ratio) & (max_log_ratio is None)
    return torch.where(is_lost_T, 0.0, ratio(log_ratio_T.masked_fill(is_lost_T, 0.0), max_log_ratio))


def is_bounded(log_ratio_T: Tensor, max_log_ratio: float | None) -> Tensor:
    """Where `ratio` is not exp of the log-ratio: clamped, or overflowed."""
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
    """Estimate of KL(policy || reference) from tokens drawn from the policy, per token (http://joschu.net/blog/kl-approx.html).

    `sampling_weights_T` multiplies it before `output_clamp`. With weights whose gradient is that of the policy's probability of the token,
    the gradient is an unbiased estimate of that of the expected value (arXiv:2506.09477); without weights it is that of the value alone,
    which for k1 is 0 in the mean. Where a clamp takes effect, the gradient is 0.

    Raises:
        ValueError: unknown `kl_type`.
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
    """Log of each token's weight, [T], from log(old / generator); with `sequence_level_importance_ratios` the sum over its sequence."""
    return segments.spread(segments.sum(log_ratio_T)) if config.sequence_level_importance_ratios else log_ratio_T


def importance_weights(log_ratio_T: Tensor, segments: Segments, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Weight of each token, and whether it is outside the bounds, both [T]. `log_ratio_T` is log(old / generator), without gradient.

    One weight per token, or with `sequence_level_importance_ratios` one per sequence, the product over its tokens. A weight that
    overflows is 0, unless `max_log_ratio` clamps it.
    """
    weights_T = correction_weight(log_weights(log_ratio_T, segments, config), config.max_log_ratio)
    if config.truncation is None:
        return weights_T, torch.zeros_like(weights_T, dtype=torch.bool)
    assert config.truncated_importance_sampling_ratio is not None
    bounds = (config.truncated_importance_sampling_ratio_min or 0.0, config.truncated_importance_sampling_ratio)
    return _TRUNCATIONS[config.truncation](weights_T, log_ratio_T, segments, bounds)


def _hold(weights_T: Tensor, log_ratio_T: Tensor, segments: Segments, bounds: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling, TIS (https://fengyao.notion.site/off-policy-rl)."""
    return weights_T.clamp(*bounds), _is_outside(weights_T, bounds)


def _leave_out_tokens(weights_T: Tensor, log_ratio_T: Tensor, segments: Segments, bounds: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """IcePop (arXiv:2510.18855, section 3.2)."""
    is_outside_T = _is_outside(weights_T, bounds)
    return weights_T.masked_fill(is_outside_T, 0.0), is_outside_T


def _leave_out_sequences(weights_T: Tensor, log_ratio_T: Tensor, segments: Segments, bounds: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Masks sequences by the geometric mean of their weights; the others keep their weights."""
    is_outside_T = segments.spread(_is_outside(ratio(segments.mean(log_ratio_T), None), bounds))
    return weights_T.masked_fill(is_outside_T, 0.0), is_outside_T


_TRUNCATIONS: dict[str, Callable[[Tensor, Tensor, Segments, tuple[float, float]], tuple[Tensor, Tensor]]] = {
    "tis": _hold,
    "icepop": _leave_out_tokens,
    "seq-mask-tis": _leave_out_sequences,
}


def _is_outside(weights: Tensor, bounds: tuple[float, float]) -> Tensor:
    return (weights < bounds[0]) | (weights > bounds[1])
