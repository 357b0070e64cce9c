"""Weights that correct for tokens which the generator drew and the trainer's policy did not. T packed tokens, S sequences.

For tokens drawn by a generator whose probabilities differ from the trainer's, expectations need the weight old / generator
(arXiv:2410.18252); truncating it trades variance for bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mrl.algo.kl import correction_weight, ratio

if TYPE_CHECKING:
    from mrl.algo.sequences import Segments
    from mrl.config.schema.algo import LossConfig


def log_weights(log_ratio_T: Tensor, segments: Segments, config: LossConfig) -> Tensor:
    """Log of each token's weight, [T], from log(old / generator); with `sequence_level_importance_ratios` the sum over its sequence."""
    return segments.spread(segments.sum(log_ratio_T)) if config.sequence_level_importance_ratios else log_ratio_T


def importance_weights(log_ratio_T: Tensor, segments: Segments, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Weight of each token, and whether it was outside the bounds, both [T]. `log_ratio_T` is log(old / generator), without gradient.

    One weight per token, or with `sequence_level_importance_ratios` one per sequence, the product over its tokens. A weight that
    overflows is 0, unless `max_log_ratio` holds it.
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
    """Sequence masks by the geometric mean; what is kept keeps its weights."""
    is_outside_T = segments.spread(_is_outside(ratio(segments.mean(log_ratio_T), None), bounds))
    return weights_T.masked_fill(is_outside_T, 0.0), is_outside_T


_TRUNCATIONS: dict[str, Callable[[Tensor, Tensor, Segments, tuple[float, float]], tuple[Tensor, Tensor]]] = {
    "tis": _hold,
    "icepop": _leave_out_tokens,
    "seq-mask-tis": _leave_out_sequences,
}


def _is_outside(weights: Tensor, bounds: tuple[float, float]) -> Tensor:
    return (weights < bounds[0]) | (weights > bounds[1])
