"""Ratios of probabilities, and estimates of the KL divergence between two policies, from the logprobs of tokens. T tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# vLLM and Megatron run different kernels, so log-ratios drift; exp(10) is past any honest update.
MAX_LOG_RATIO = 10.0


def bounded_ratio(logprobs_T: Tensor, base_logprobs_T: Tensor) -> Tensor:
    """exp(logprobs - base), the log-ratio held within +-MAX_LOG_RATIO."""
    return bounded_exp(logprobs_T - base_logprobs_T)


def bounded_exp(log_ratio_T: Tensor) -> Tensor:
    """exp of log-ratios held within +-MAX_LOG_RATIO."""
    return torch.exp(log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def kl_divergence(
    logprobs_T: Tensor,
    reference_logprobs_T: Tensor,
    *,
    kl_type: Literal["k1", "k2", "k3"],
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
