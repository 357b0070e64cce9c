"""The policy loss of GRPO and its metrics, over one packed row. Pure torch functions. T packed tokens of a row.

Every sum is divided by a count over the global batch: rows, micro-batches and ranks add up to the same loss, however the batch is cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mrl.config.schema_algo import LossConfig

# vLLM and Megatron run different kernels, so log-ratios drift; exp(10) is past any honest update.
MAX_LOG_RATIO = 10.0

LOSS = "loss"
MIN_METRICS = ("probs_ratio_min",)
MAX_METRICS = ("probs_ratio_max",)
"""Metrics that rows and ranks combine by minimum or maximum. All others are sums."""


def policy_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    reference_logprobs_T: Tensor | None,
    *,
    untruncated_logprobs_T: Tensor | None = None,
    entropy_T: Tensor | None = None,
    generator_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    config: LossConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one row (scalar with gradient) and its metrics (detached scalars, see `finish_metrics`).

    The clipped surrogate of PPO (arXiv:1707.06347) with separate bounds (arXiv:2503.14476), times the importance weight of the
    generator (arXiv:2410.18252), plus the KL penalty. `weights_T` is what each token counts, see `loss_weights`; what counts nothing has no
    effect, NaN included. The losses of all rows of all dp ranks add up to the loss of the batch, and so do those of the parts of a row.

    Where top-k and top-p truncate the distribution, a logprob of -inf is a token that the trainer's arithmetic rules out and the
    generator's did not: it is masked, and counted in `outside_truncation_fraction`. The KL penalty compares `untruncated_logprobs_T`,
    by default `logprobs_T`, with a reference that is not truncated either. `entropy_T` only becomes a metric.
    """
    is_drawable_T = ~(torch.isneginf(logprobs_T) | torch.isneginf(old_logprobs_T))
    is_valid_T = (weights_T > 0) & is_drawable_T
    compared_T = torch.where(is_valid_T, logprobs_T if untruncated_logprobs_T is None else untruncated_logprobs_T, 0.0)
    logprobs_T = torch.where(is_valid_T, logprobs_T, 0.0)
    old_T = torch.where(is_valid_T, old_logprobs_T, 0.0).detach()
    generator_T = torch.where(is_valid_T, generator_logprobs_T, 0.0)
    advantages_T = torch.where(is_valid_T, advantages_T, 0.0)

    ratio_T = bounded_ratio(logprobs_T, old_T)
    clipped_ratio_T = ratio_T.clamp(1.0 - config.ratio_clip_min, 1.0 + config.ratio_clip_max)
    surrogate_T = -advantages_T * ratio_T
    clipped_surrogate_T = -advantages_T * clipped_ratio_T
    token_loss_T = torch.maximum(surrogate_T, clipped_surrogate_T)
    importance_T = bounded_ratio(old_T, generator_T)
    if config.use_importance_sampling_correction:
        limit = config.truncated_importance_sampling_ratio
        token_loss_T = token_loss_T * (importance_T if limit is None else importance_T.clamp(max=limit))
    kl_T = torch.zeros_like(logprobs_T)
    if reference_logprobs_T is not None and config.reference_policy_kl_penalty > 0:
        kl_T = kl_divergence(
            compared_T,
            torch.where(is_valid_T, reference_logprobs_T, 0.0).detach(),
            kl_type=config.reference_policy_kl_type,
            input_clamp=config.kl_input_clamp_value,
            output_clamp=config.kl_output_clamp_value,
        )
        token_loss_T = token_loss_T + config.reference_policy_kl_penalty * kl_T

    loss = (weights_T * token_loss_T).sum()
    with torch.no_grad():
        metrics = token_metrics(logprobs_T, old_T, generator_T, ratio_T, is_valid_T)
        metrics[LOSS] = loss.detach()
        metrics["outside_truncation_fraction"] = ((weights_T > 0) & ~is_drawable_T).float().sum()
        if entropy_T is not None:
            metrics["entropy"] = entropy_T[is_valid_T].sum()
        metrics["kl_penalty"] = kl_T.detach()[is_valid_T].sum()
        metrics["probs_ratio_clamped"] = clipped_ratio_T.detach()[is_valid_T].sum()
        metrics["clip_fraction"] = (clipped_surrogate_T > surrogate_T)[is_valid_T].float().sum()
    return loss, metrics


def bounded_ratio(logprobs_T: Tensor, base_logprobs_T: Tensor) -> Tensor:
    """exp(logprobs - base), the log-ratio held within +-MAX_LOG_RATIO."""
    return torch.exp((logprobs_T - base_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def kl_divergence(
    logprobs_T: Tensor,
    reference_logprobs_T: Tensor,
    *,
    kl_type: Literal["k1", "k2", "k3"],
    input_clamp: float | None = None,
    output_clamp: float | None = None,
) -> Tensor:
    """Estimate of KL(policy || reference) from tokens drawn from the policy, per token (http://joschu.net/blog/kl-approx.html).

    The gradient is that of the value: 0 where a clamp holds, and for k1 a constant, whose mean over the policy's own tokens is 0.

    Raises:
        ValueError: unknown `kl_type`.
    """
    log_ratio_T = reference_logprobs_T - logprobs_T
    if input_clamp is not None:
        log_ratio_T = log_ratio_T.clamp(-input_clamp, input_clamp)
    match kl_type:
        case "k1":
            kl_T = -log_ratio_T
        case "k2":
            kl_T = log_ratio_T.square() / 2
        case "k3":
            kl_T = torch.expm1(log_ratio_T) - log_ratio_T
        case _:
            raise ValueError(f"loss_fn.reference_policy_kl_type={kl_type} is not known; use k1, k2 or k3")
    return kl_T if output_clamp is None else kl_T.clamp(-output_clamp, output_clamp)


def loss_weights(
    loss_mask_T: Tensor, cu_seqlens: Tensor, *, token_level: bool, num_valid_tokens: float, num_valid_sequences: float
) -> Tensor:
    """What each token of a whole row counts in the loss of the global batch, over which the numbers count; shape [T], 0 outside the mask.

    With `token_level` every token counts the same, else every sequence.
    """
    if token_level:
        return loss_mask_T / max(num_valid_tokens, 1.0)
    return sequence_mean_weights(loss_mask_T, cu_seqlens) / max(num_valid_sequences, 1.0)


def sequence_mean_weights(loss_mask_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Weight of each token such that a weighted sum adds up the mean over tokens of every sequence, shape [T]."""
    lengths = cu_seqlens.diff().long()
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    counts = loss_mask_T.new_zeros(len(lengths)).index_add_(0, sequence_T, loss_mask_T)
    return loss_mask_T / counts.clamp(min=1.0)[sequence_T]


def token_metrics(logprobs_T: Tensor, old_T: Tensor, generator_T: Tensor, ratio_T: Tensor, is_valid_T: Tensor) -> dict[str, Tensor]:
    """Sums (and extremes) over the valid tokens of a row, under NeMo RL's names where it has one."""
    drift = (old_T - generator_T)[is_valid_T]
    ratio = ratio_T[is_valid_T]
    update = (logprobs_T - old_T)[is_valid_T]
    infinity = ratio_T.new_tensor(torch.inf)
    return {
        "gen_kl_error": kl_divergence(generator_T, old_T, kl_type="k3", input_clamp=MAX_LOG_RATIO)[is_valid_T].sum(),
        "token_mult_prob_error": drift.abs().clamp(max=MAX_LOG_RATIO).exp().sum(),
        "abs_dlogp": drift.abs().sum(),
        "sampling_importance_ratio": bounded_ratio(old_T, generator_T)[is_valid_T].sum(),
        "probs_ratio": ratio.sum(),
        "probs_ratio_min": torch.cat([ratio, infinity[None]]).min(),
        "probs_ratio_max": torch.cat([ratio, -infinity[None]]).max(),
        "bounded_fraction": (torch.maximum(drift.abs(), update.abs()) > MAX_LOG_RATIO).float().sum(),
        "approx_entropy": -(bounded_ratio(logprobs_T, generator_T) * logprobs_T)[is_valid_T].sum(),
    }


def finish_metrics(metrics: dict[str, float], *, num_valid_tokens: float) -> dict[str, float]:
    """Metrics of the global batch from those of all its rows: sums become means over valid tokens; loss, minima and maxima stay."""
    whole = (LOSS, *MIN_METRICS, *MAX_METRICS)
    return {name: value if name in whole else value / max(num_valid_tokens, 1.0) for name, value in metrics.items()}
