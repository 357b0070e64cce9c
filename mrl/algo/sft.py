"""The loss of supervised fine-tuning: negative log-likelihood of what is to be learned. T packed tokens of a row."""

from __future__ import annotations

import torch
from torch import Tensor

from mrl.algo.losses import LOSS


def nll_loss(logprobs_T: Tensor, weights_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one row (scalar with gradient) and its metrics (detached): minus the weighted sum of log-probabilities.

    `weights_T` is what each token counts, 1 / (tokens of the global batch that are learned) for their mean; what counts nothing has no
    effect, NaN included. The losses of all rows of all dp ranks add up to the loss of the batch, and so do those of the parts of a row.
    """
    loss = -(weights_T * torch.where(weights_T > 0, logprobs_T, 0.0)).sum()
    return loss, {LOSS: loss.detach()}


def perplexity(mean_nll: float) -> float:
    """exp of the mean negative log-likelihood per token; infinite where that is out of range."""
    return float(torch.tensor(mean_nll, dtype=torch.float64).exp())
