# SPDX-License-Identifier: Apache-2.0
"""The policy loss of GRPO and its family, over one packed row. Pure torch functions. T packed tokens of a row.

Every sum is divided by a count over the global batch: rows, micro-batches and ranks add up to the same loss, however
the batch is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from mrl.algo.ratios import (
    KlType,
    Segments,
    correction_weight,
    extremes,
    importance_weights,
    is_bounded,
    kl_divergence,
    log_weights,
    ratio,
)
from mrl.config import own

if TYPE_CHECKING:
    from mrl.config.schema.algo import LossConfig

LOSS = "loss"


@dataclass(frozen=True)
class BatchSize:
    """Divisors of the losses of a global batch."""

    num_valid_tokens: float
    num_valid_sequences: float
    num_positive_tokens: float
    num_tokens: float = 0
    num_sequences: float = 0
    num_valid_rollouts: float | None = None
    """None: each sequence is a rollout."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of a whole row, [T] float32. Logprobs and advantages are 0 at ignored tokens."""

    logprobs_T: Tensor
    untruncated_logprobs_T: Tensor
    old_logprobs_T: Tensor
    generator_logprobs_T: Tensor
    advantages_T: Tensor
    is_valid_T: Tensor
    segments: Segments
    reference_logprobs_T: Tensor | None
    """Logprobs of the reference; None where the loss has no KL term."""
    loss_mask_T: Tensor
    """1 at tokens that count, unless their logprob is -inf."""
    positive_mask_T: Tensor
    """1 on the tokens of the mask whose rollout has a reward above 0."""
    cu_seqlens: Tensor
    rollout_tokens_S: Tensor | None = None
    """[S], tokens that count of the rollout of each sequence, in the whole batch; None: each sequence is a rollout."""

    @classmethod
    def of(
        cls,
        logprobs_T: Tensor,
        *,
        untruncated_logprobs_T: Tensor | None = None,
        old_logprobs_T: Tensor | None,
        generator_logprobs_T: Tensor,
        reference_logprobs_T: Tensor | None,
        advantages_T: Tensor,
        loss_mask_T: Tensor,
        positive_mask_T: Tensor,
        cu_seqlens: Tensor,
        rollout_tokens_S: Tensor | None = None,
    ) -> Tokens:
        """Selects the tokens that count. Missing old and untruncated logprobs are replaced by the policy's own."""
        old_logprobs_T = logprobs_T if old_logprobs_T is None else old_logprobs_T
        is_valid_T = (loss_mask_T > 0) & ~(torch.isneginf(logprobs_T) | torch.isneginf(old_logprobs_T))
        return cls(
            logprobs_T=torch.where(is_valid_T, logprobs_T, 0.0),
            untruncated_logprobs_T=torch.where(
                is_valid_T, logprobs_T if untruncated_logprobs_T is None else untruncated_logprobs_T, 0.0
            ),
            old_logprobs_T=torch.where(is_valid_T, old_logprobs_T, 0.0).detach(),
            generator_logprobs_T=torch.where(is_valid_T, generator_logprobs_T, 0.0),
            advantages_T=torch.where(is_valid_T, advantages_T, 0.0),
            is_valid_T=is_valid_T,
            segments=Segments.of(cu_seqlens, is_valid_T.to(logprobs_T.dtype)),
            reference_logprobs_T=None
            if reference_logprobs_T is None
            else torch.where(is_valid_T, reference_logprobs_T, 0.0).detach(),
            loss_mask_T=loss_mask_T,
            positive_mask_T=positive_mask_T,
            cu_seqlens=cu_seqlens,
            rollout_tokens_S=rollout_tokens_S,
        )


def policy_loss(
    tokens: Tokens, config: LossConfig, size: BatchSize, *, entropy_T: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one row (scalar with gradient), and the row's part of the metrics of the global batch (detached scalars).

    The surrogate of the config (PPO's, CISPO's or REINFORCE's) times the generator's importance weight, plus the KL
    penalty, plus the negative log-likelihood of good rollouts. Losses of all rows of all dp ranks add up to the
    batch's, and so do metrics, except extremes (`mrl.metrics.extreme_of`). Values outside the mask have no effect, NaN
    included.

    With top-k or top-p, a logprob of -inf is a token that only the trainer's arithmetic excludes: it is masked, and
    counted in `outside_truncation_fraction`. The KL penalty compares `untruncated_logprobs_T` with an untruncated
    reference. `entropy_T` only becomes a metric.
    """
    segments = tokens.segments
    log_ratio_T = tokens.logprobs_T - tokens.old_logprobs_T
    # GSPO takes the mean over the sequence. A ratio that is 1 by force keeps the token's own gradient, as in NeMo RL.
    if config.sequence_level_importance_ratios and not config.force_on_policy_ratio:
        log_ratio_T = segments.spread(segments.mean(log_ratio_T))
    ratio_T = ratio(log_ratio_T, config.max_log_ratio)
    clipped_ratio_T = ratio_T.clamp(1.0 - config.ratio_clip_min, 1.0 + config.ratio_clip_max)
    objectives = {"cispo": cispo, "reinforce": reinforce, "ppo": clipped_surrogate}
    objective = objectives[config.surrogate] if config.token_loss is None else own_loss(config.token_loss)
    token_loss_T, is_clipped_T = objective(tokens, ratio_T, clipped_ratio_T, config)
    drift_T = tokens.old_logprobs_T - tokens.generator_logprobs_T
    importance_T, is_outside_T = importance_weights(drift_T, segments, config)
    if config.use_importance_sampling_correction:
        token_loss_T = token_loss_T * importance_T
    kl_T = kl_term(tokens, config)
    token_loss_T = token_loss_T + config.kl_in_loss * kl_T
    weights_T = loss_weights(tokens.loss_mask_T, tokens.cu_seqlens, config, size, tokens.rollout_tokens_S)
    loss = (weights_T * torch.where(tokens.is_valid_T, token_loss_T, 0.0)).sum()
    positive_nll = torch.zeros_like(loss)
    if config.positive_example_nll_weight > 0:
        positive_nll = -(tokens.logprobs_T * tokens.positive_mask_T).sum() / max(size.num_positive_tokens, 1.0)
        loss = loss + config.positive_example_nll_weight * positive_nll

    with torch.no_grad():
        is_far_T = is_bounded(log_ratio_T, config.max_log_ratio)
        if config.use_importance_sampling_correction:
            is_far_T = is_far_T | is_bounded(log_weights(drift_T, segments, config), config.max_log_ratio)
        per_token = {
            "probs_ratio_clamped": clipped_ratio_T,
            "clip_fraction": is_clipped_T.float(),
            "bounded_fraction": is_far_T.float(),
            **({} if entropy_T is None else {"entropy": entropy_T}),
        }
        sums = {name: values_T[tokens.is_valid_T].sum() for name, values_T in per_token.items()}
        sums |= token_metrics(
            *(
                values_T[tokens.is_valid_T]
                for values_T in (tokens.logprobs_T, tokens.old_logprobs_T, tokens.generator_logprobs_T, ratio_T)
            ),
            kl_type=config.reference_policy_kl_type,
        )
        sums["outside_truncation_fraction"] = ((tokens.loss_mask_T > 0) & ~tokens.is_valid_T).float().sum()
        metrics = {name: value / max(size.num_valid_tokens, 1.0) for name, value in sums.items()}
        metrics |= {
            LOSS: loss.detach(),
            "kl_penalty": (weights_T * kl_T).sum(),
            "positive_nll_loss": positive_nll.detach(),
        }
        metrics |= extremes("probs_ratio_{}", ratio_T[tokens.is_valid_T])
        metrics |= extremes("probs_ratio_clamped_{}", clipped_ratio_T[tokens.is_valid_T])
        in_tokens_T = segments.mask_T / max(size.num_valid_tokens, 1.0)
        in_sequences_T = segments.weights_T / max(size.num_valid_sequences, 1.0)
        per_weight_T = in_sequences_T if config.sequence_level_importance_ratios else in_tokens_T
        metrics["sampling_importance_ratio"] = (per_weight_T * importance_T).sum()
        if config.truncation is not None:
            per_bound_T = in_sequences_T if config.truncation == "seq-mask-tis" else in_tokens_T
            metrics["is_oob_ratio"] = (per_bound_T * is_outside_T).sum()
    return loss, metrics


def clipped_surrogate(
    tokens: Tokens, ratio_T: Tensor, clipped_ratio_T: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic bound (arXiv:1707.06347) with a bound for each side (arXiv:2503.14476), and the tokens clipped.

    With `ratio_clip_c`, the loss of bad tokens is bounded too (arXiv:1912.09729). GSPO is this with ratios of
    sequences.
    """
    surrogate_T, clipped_T = -tokens.advantages_T * ratio_T, -tokens.advantages_T * clipped_ratio_T
    loss_T, is_clipped_T = torch.maximum(surrogate_T, clipped_T), clipped_T > surrogate_T
    if config.ratio_clip_c is not None:
        bound_T = -tokens.advantages_T * config.ratio_clip_c
        is_bounded_T = (tokens.advantages_T < 0) & (loss_T > bound_T)
        loss_T, is_clipped_T = torch.where(is_bounded_T, bound_T, loss_T), is_clipped_T | is_bounded_T
    return loss_T, is_clipped_T


def cispo(tokens: Tokens, ratio_T: Tensor, clipped_ratio_T: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """REINFORCE with the clipped ratio as a weight: no token loses its gradient (arXiv:2506.13585)."""
    return -tokens.advantages_T * clipped_ratio_T.detach() * tokens.logprobs_T, clipped_ratio_T != ratio_T


def reinforce(tokens: Tokens, ratio_T: Tensor, clipped_ratio_T: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """The policy gradient itself (arXiv:2402.14740); nothing is clipped."""
    return -tokens.advantages_T * tokens.logprobs_T, torch.zeros_like(ratio_T, dtype=torch.bool)


def own_loss(path: str) -> Callable[[Tokens, Tensor, Tensor, LossConfig], tuple[Tensor, Tensor]]:
    """Calls `loss_fn.token_loss` as the losses above. ValueError: it returns something else."""
    function = own.find_fitting(path, own.LOSS)

    def token_loss(
        tokens: Tokens, ratio_T: Tensor, clipped_ratio_T: Tensor, config: LossConfig
    ) -> tuple[Tensor, Tensor]:
        returned = function(tokens=tokens, ratio_T=ratio_T, clipped_ratio_T=clipped_ratio_T, config=config)
        parts = cast("tuple[Tensor, Tensor]", returned if isinstance(returned, tuple) else (returned,))
        if len(parts) != 2 or not all(isinstance(part, Tensor) and part.shape == ratio_T.shape for part in parts):
            shapes = [tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts]
            raise ValueError(
                f"loss_fn.token_loss={path} returned {shapes}; return two tensors of shape {tuple(ratio_T.shape)}: "
                "each token's loss, and whether it is clipped"
            )
        return parts

    return token_loss


def kl_term(tokens: Tokens, config: LossConfig) -> Tensor:
    """KL to the reference, [T], with the gradient of its expected value; 0 where the loss has no such term.

    Token weights are 1, with the gradient of the token's probability; with `use_on_policy_kl_approximation` the
    importance weights policy / generator, because the generator sampled the tokens.
    """
    if tokens.reference_logprobs_T is None or config.kl_in_loss == 0:
        return torch.zeros_like(tokens.logprobs_T)
    logprobs_T = tokens.untruncated_logprobs_T
    drawn_from_T = tokens.generator_logprobs_T if config.use_on_policy_kl_approximation else logprobs_T.detach()
    return kl_divergence(
        logprobs_T,
        tokens.reference_logprobs_T,
        kl_type=config.reference_policy_kl_type,
        input_clamp=config.kl_input_clamp_value,
        output_clamp=config.kl_output_clamp_value,
        sampling_weights_T=correction_weight(logprobs_T - drawn_from_T, config.max_log_ratio),
    )


def loss_weights(
    loss_mask_T: Tensor, cu_seqlens: Tensor, config: LossConfig, size: BatchSize, rollout_tokens_S: Tensor | None = None
) -> Tensor:
    """Weight of each token of a whole row in the loss of the global batch; shape [T], 0 outside the mask.

    With `token_level_loss` every token counts the same; else every rollout, however many sequences it has, or with
    `constant_length_normalizer` every token of it. `rollout_tokens_S` as in `Tokens`.
    """
    if config.token_level_loss:
        return loss_mask_T / max(size.num_valid_tokens, 1.0)
    num_rollouts = max(size.num_valid_sequences if size.num_valid_rollouts is None else size.num_valid_rollouts, 1.0)
    if config.constant_length_normalizer is not None:
        return loss_mask_T / config.constant_length_normalizer / num_rollouts
    segments = Segments.of(cu_seqlens, loss_mask_T)
    counts_S = segments.counts_S if rollout_tokens_S is None else rollout_tokens_S.clamp(min=1.0)
    return loss_mask_T / segments.spread(counts_S) / num_rollouts


def token_metrics(new: Tensor, old: Tensor, generator: Tensor, ratios: Tensor, *, kl_type: KlType) -> dict[str, Tensor]:
    """Sums over tokens, all valid, under NeMo RL's names if any. KL by the estimator of the KL penalty, not clamped."""
    drift = old - generator
    mixture = torch.logaddexp(old, generator) - math.log(2)
    return {
        "gen_kl_error": kl_divergence(generator, old, kl_type=kl_type).sum(),
        "policy_kl_error": kl_divergence(old, generator, kl_type=kl_type).sum(),
        "js_divergence_error": torch.stack(
            [kl_divergence(mixture, side, kl_type="k3") for side in (old, generator)]
        ).sum()
        / 2,
        "token_mult_prob_error": drift.abs().exp().sum(),
        "mean_abs_dlogp": drift.abs().sum(),
        "probs_ratio": ratios.sum(),
        "approx_entropy": -((new - generator).exp() * new).sum(),
    }
