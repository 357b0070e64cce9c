"""Ratios of probabilities, and estimates of the KL divergence between two policies, from the logprobs of tokens. T tokens."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

KlType = Literal["k1", "k2", "k3"]


def ratio(log_ratio_T: Tensor, max_log_ratio: float | None) -> Tensor:
    """exp of log-ratios, held within +-`max_log_ratio` without gradient beyond it; infinite where it overflows and nothing holds it."""
    return torch.exp(log_ratio_T if max_log_ratio is None else log_ratio_T.clamp(-max_log_ratio, max_log_ratio))


def correction_weight(log_ratio_T: Tensor, max_log_ratio: float | None) -> Tensor:
    """As `ratio`, but 0 where it overflows, without gradient."""
    is_lost_T = is_bounded(log_ratio_T, max_log_ratio) & (max_log_ratio is None)
    return torch.where(is_lost_T, 0.0, ratio(log_ratio_T.masked_fill(is_lost_T, 0.0), max_log_ratio))


def is_bounded(log_ratio_T: Tensor, max_log_ratio: float | None) -> Tensor:
    """Where `ratio` is not exp of the log-ratio: held, or overflowed."""
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
    which for k1 is 0 in the mean. Where a clamp holds the gradient is 0.

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
