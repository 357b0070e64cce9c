# SPDX-License-Identifier: Apache-2.0
"""Losses without rollouts: supervised fine-tuning, and preferences in answer pairs. T packed tokens, B pairs a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.algo.losses import LOSS

if TYPE_CHECKING:
    from mrl.config.schema.algo import DpoConfig


def nll_loss(logprobs_T: Tensor, weights_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one row (scalar with gradient) and its metrics (detached): minus the weighted sum of log-probabilities.

    `weights_T` is the weight of each token: for a mean, 1 / (learned tokens of the global batch). Tokens of weight 0
    have no effect, NaN included. The losses of all rows of all dp ranks add up to the loss of the batch, and so do
    those of the parts of a row.
    """
    loss = -(weights_T * torch.where(weights_T > 0, logprobs_T, 0.0)).sum()
    return loss, {LOSS: loss.detach()}


def perplexity(mean_nll: float) -> float:
    """exp of the mean negative log-likelihood per token; infinite where that is out of range."""
    return float(torch.tensor(mean_nll, dtype=torch.float64).exp())


def bradley_terry_loss(
    chosen_B: Tensor, rejected_B: Tensor, *, beta: float = 1.0, num_pairs: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood that chosen answers win, sigmoid(beta * (chosen - rejected)), metrics of both rewards.

    A scalar with gradient, and detached scalars under NeMo RL's names (https://doi.org/10.2307/2334029,
    arXiv:2203.02155).
    """
    margin_B = chosen_B - rejected_B
    loss = -F.logsigmoid(beta * margin_B).sum() / num_pairs
    sums = {
        "accuracy": (margin_B > 0).float(),
        "rewards_chosen_mean": chosen_B,
        "rewards_rejected_mean": rejected_B,
        "rewards_margin_mean": margin_B,
    }
    return loss, {LOSS: loss.detach(), **{name: value_B.detach().sum() / num_pairs for name, value_B in sums.items()}}


def dpo_loss(
    log_ratios_2B: Tensor, chosen_logprobs_B: Tensor, *, num_pairs: float, config: DpoConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of direct preference optimisation (arXiv:2305.18290) and its metrics.

    `log_ratios_2B` are log(policy / reference) of whole answers, each chosen one before its rejected one: the implicit
    rewards over beta. The SFT loss raises `chosen_logprobs_B`, those of the policy.
    """
    preference, metrics = bradley_terry_loss(
        log_ratios_2B[0::2], log_ratios_2B[1::2], beta=config.reference_policy_kl_penalty, num_pairs=num_pairs
    )
    sft = -chosen_logprobs_B.sum() / num_pairs
    loss = config.preference_loss_weight * preference + config.sft_loss_weight * sft
    return loss, {**metrics, LOSS: loss.detach(), "preference_loss": preference.detach(), "sft_loss": sft.detach()}
