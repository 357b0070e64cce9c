"""Log-probabilities of given tokens from vocabulary-parallel logits, without a full-vocabulary copy on any rank.

T packed tokens, V local vocabulary columns (padding included).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# fp32 copies of the logits live for this many rows at a time: 4 bytes x 1024 x V/tp, 0.27 GB for 131,072 columns at tp 2.
CHUNK_TOKENS = 1024


def vocab_parallel_logprobs(
    logits_TV: Tensor, labels_T: Tensor, *, vocab_size: int, temperature: float, group: dist.ProcessGroup
) -> Tensor:
    """Log-probability of each label, shape [T], float32, differentiable, the same on every rank of `group`.

    `logits_TV` holds this rank's columns of the padded vocabulary, in rank order; columns from `vocab_size` on are padding and have no
    probability. Logits are divided by `temperature` in float32 first, as the sampler does. Collective over `group` (tensor parallel):
    every rank calls it, in the same order; the backward pass needs no collective.
    """
    return _VocabParallelLogprobs.apply(logits_TV, labels_T, vocab_size, temperature, group)


class _VocabParallelLogprobs(torch.autograd.Function):
    """Saves the logits as they are and makes the softmax again in the backward pass, so that no [T, V] float32 tensor is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        labels_T: Tensor,
        vocab_size: int,
        temperature: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        num_columns = logits_TV.shape[1]
        first_column = group.rank() * num_columns
        num_real = min(max(vocab_size - first_column, 0), num_columns)
        column_T = labels_T - first_column
        is_local_T = (column_T >= 0) & (column_T < num_real)
        column_T = torch.where(is_local_T, column_T, 0)

        max_T = _local_max(logits_TV[:, :num_real])
        dist.all_reduce(max_T, op=dist.ReduceOp.MAX, group=group)
        max_T = max_T / temperature
        sum_and_label = torch.zeros(2, len(labels_T), device=logits_TV.device)
        for rows in _chunks(len(labels_T)):
            scaled = logits_TV[rows].float() / temperature
            sum_and_label[0, rows] = torch.exp(scaled[:, :num_real] - max_T[rows, None]).sum(dim=-1)
            label = scaled.gather(1, column_T[rows, None])[:, 0]
            sum_and_label[1, rows] = torch.where(is_local_T[rows], label, 0.0)
        dist.all_reduce(sum_and_label, group=group)

        log_sum_T = sum_and_label[0].log()
        ctx.save_for_backward(logits_TV, max_T + log_sum_T, column_T, is_local_T)
        ctx.num_real, ctx.temperature = num_real, temperature
        # The label's logit first, which loses fewest bits.
        return (sum_and_label[1] - max_T) - log_sum_T

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits_TV, log_normalizer_T, column_T, is_local_T = ctx.saved_tensors
        num_real, temperature = ctx.num_real, ctx.temperature
        grad_TV = torch.zeros_like(logits_TV)
        for rows in _chunks(len(grad_T)):
            scale = grad_T[rows, None] / temperature
            grad = torch.exp(logits_TV[rows, :num_real].float() / temperature - log_normalizer_T[rows, None]).mul_(-scale)
            if num_real:
                grad.scatter_add_(1, column_T[rows, None], scale * is_local_T[rows, None])
            grad_TV[rows, :num_real] = grad.to(logits_TV.dtype)
        return grad_TV, None, None, None, None


def _local_max(logits_TV: Tensor) -> Tensor:
    if logits_TV.shape[1] == 0:
        return torch.full((logits_TV.shape[0],), -torch.inf, device=logits_TV.device)
    return logits_TV.amax(dim=-1).float()


def _chunks(num_tokens: int) -> list[slice]:
    return [slice(start, min(start + CHUNK_TOKENS, num_tokens)) for start in range(0, num_tokens, CHUNK_TOKENS)]
