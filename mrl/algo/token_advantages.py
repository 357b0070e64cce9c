# SPDX-License-Identifier: Apache-2.0
"""Computations that need logprobs: every token's advantage, and masks of sequences where policy and generator disagree.

Pure torch functions over the rows of one data-parallel rank. T packed tokens of a row, S sequences of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mrl.algo.advantages import normalize_over_tokens
from mrl.algo.ratios import Segments, extremes, kl_divergence

if TYPE_CHECKING:
    from mrl.config.schema.algo import GrpoConfig, LossConfig


def sequence_errors(
    old_logprobs_T: Tensor, generator_logprobs_T: Tensor, loss_mask_T: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Mean over each sequence's valid tokens of exp(|old - generator|), [S]; NaN for sequences without a valid token.

    Leaves out tokens of logprob -inf, as the loss does: they are outside of the trainer's top_p or top_k.
    """
    is_valid_T = (loss_mask_T > 0) & ~old_logprobs_T.isneginf()
    error_T = torch.where(is_valid_T, (old_logprobs_T - generator_logprobs_T).abs().exp(), 0.0)
    segments = Segments.of(cu_seqlens, is_valid_T.to(loss_mask_T))
    return segments.mean(error_T).masked_fill(Segments.of(cu_seqlens, loss_mask_T).sum(loss_mask_T) == 0, torch.nan)


def error_metrics(errors: Tensor, is_kept: Tensor, rewards: Tensor) -> dict[str, Tensor]:
    """Sums and extremes of the errors of this rank's valid sequences, before and after masking, to combine over ranks.

    All arguments have shape [sequences of the rank]. `finish_error_metrics` takes the combined values. A reward of 1 is
    a right answer.
    """
    metrics = {"num_masked_correct": (rewards[~is_kept] == 1).sum()}
    for suffix, values in (("", errors), ("_after_mask", errors[is_kept])):
        metrics |= {
            f"sum_seq_mult_prob_error{suffix}": values.sum(),
            f"num_seqs{suffix}": values.new_tensor(len(values)),
        }
        metrics |= extremes(f"{{}}_seq_mult_prob_error{suffix}", values)
    return metrics


def finish_error_metrics(totals: dict[str, float]) -> dict[str, float]:
    """Metrics of the batch, under NeMo RL's names; 0 where there is no sequence."""
    metrics = {}
    for suffix in ("", "_after_mask"):
        count = totals[f"num_seqs{suffix}"]
        metrics[f"mean_seq_mult_prob_error{suffix}"] = totals[f"sum_seq_mult_prob_error{suffix}"] / max(count, 1.0)
        for extreme in ("min", "max"):
            name = f"{extreme}_seq_mult_prob_error{suffix}"
            metrics[name] = totals[name] if count else 0.0
    num_masked = totals["num_seqs"] - totals["num_seqs_after_mask"]
    metrics["num_masked_seqs_by_logprob_error"] = num_masked
    metrics["masked_correct_pct"] = totals["num_masked_correct"] / max(num_masked, 1.0)
    return metrics


def token_advantages(
    advantages: Sequence[Tensor],
    fixed: Sequence[Tensor],
    masks: Sequence[Tensor],
    penalties: Sequence[Tensor] | None,
    config: GrpoConfig,
    add_over_ranks: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """The advantage of every token of the rows, float32 [T] each, 0 outside the masks.

    Subtracts each token's penalty: a KL penalty, or the policy's logprob minus the teacher's. For reinforce_plus_plus,
    normalises over all rows of the step (see `normalize_over_tokens`). Then sets the `fixed` values (NaN: none), and
    last applies the config's bounds.
    """
    values = [
        torch.where(mask_T > 0, advantages_T, 0.0) for advantages_T, mask_T in zip(advantages, masks, strict=True)
    ]
    if penalties is not None:
        values = [advantages_T - penalty_T for advantages_T, penalty_T in zip(values, penalties, strict=True)]
    if config.adv_estimator.name == "reinforce_plus_plus":
        values = normalize_over_tokens(values, list(masks), add_over_ranks)
    values = [
        torch.where(fixed_T.isnan(), advantages_T, fixed_T) for advantages_T, fixed_T in zip(values, fixed, strict=True)
    ]
    if config.advantage_clip_low is not None or config.advantage_clip_high is not None:
        values = [advantages_T.clamp(config.advantage_clip_low, config.advantage_clip_high) for advantages_T in values]
    return [torch.where(mask_T > 0, advantages_T, 0.0) for advantages_T, mask_T in zip(values, masks, strict=True)]


def kl_penalty(old_logprobs_T: Tensor, reference_logprobs_T: Tensor, loss_mask_T: Tensor, config: LossConfig) -> Tensor:
    """The KL penalty that `use_kl_in_reward` subtracts from each token's reward, [T]; 0 outside the mask."""
    is_valid_T = loss_mask_T > 0
    kl_T = kl_divergence(
        torch.where(is_valid_T, old_logprobs_T, 0.0),
        torch.where(is_valid_T, reference_logprobs_T, 0.0),
        kl_type=config.reference_policy_kl_type,
        input_clamp=config.kl_input_clamp_value,
        output_clamp=config.kl_output_clamp_value,
    )
    return config.reference_policy_kl_penalty * kl_T


def teacher_gap(teacher_logprobs_T: Tensor, old_logprobs_T: Tensor, loss_mask_T: Tensor) -> Tensor:
    """log(teacher's probability / policy's) per token [T], its advantage in on-policy distillation; 0 outside the mask.

    arXiv:2601.02780, eq. 8, without the importance weights, which are part of the loss.
    """
    return torch.where(loss_mask_T > 0, teacher_logprobs_T - old_logprobs_T, 0.0)
