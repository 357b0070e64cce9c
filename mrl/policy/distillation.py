# SPDX-License-Identifier: Apache-2.0
"""Scores of a teacher and of its student for the tokens of a row, from logits or hidden states, vocabulary-parallel.

Nothing keeps or gathers the whole vocabulary on any rank. T packed tokens, V vocabulary columns of this rank (padding
included), D hidden size, K tokens that the teacher holds likeliest at each position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.algo.distillation import StudentScores
from mrl.policy.logprobs import Gradients, OutputColumns


@torch.no_grad()
def top_logits(columns: OutputColumns, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits by position, largest first, float32 [T, K], and their tokens, int64. Ties have no fixed
    order.

    Each rank finds its own, and they are merged: ranks exchange k numbers a token. Collective over the tensor-parallel
    group.
    """
    group, values, tokens = columns.group, [], []
    for chunk in columns.chunks():
        logits = columns.logits(chunk)
        own = torch.topk(logits, min(k, logits.shape[1]), dim=-1)
        missing = k - own.values.shape[1]
        value = torch.nn.functional.pad(own.values, (0, missing), value=-torch.inf)
        token = torch.nn.functional.pad(own.indices + columns.first, (0, missing), value=0)
        all_values = [torch.empty_like(value) for _ in range(group.size())]
        all_tokens = [torch.empty_like(token) for _ in range(group.size())]
        dist.all_gather(all_values, value.contiguous(), group=group)
        dist.all_gather(all_tokens, token.contiguous(), group=group)
        best = torch.topk(torch.cat(all_values, dim=-1), k, dim=-1)
        values.append(best.values)
        tokens.append(torch.cat(all_tokens, dim=-1).gather(1, best.indices))
    return torch.cat(values), torch.cat(tokens)


def student_scores(columns: OutputColumns, tokens_TK: Tensor, *, needs_vocabulary: bool) -> StudentScores:
    """Scores of these tokens at each position, int64 [T, K]; with `needs_vocabulary`, also sums over the vocabulary.

    Collective over the tensor-parallel group; the backward pass has no collective.
    """
    logits_TK, log_sum_T, negentropy_T = _StudentScores.apply(
        columns.inputs, columns.weight_VD, columns, tokens_TK, needs_vocabulary
    )
    return StudentScores(logits_TK, log_sum_T, negentropy_T) if needs_vocabulary else StudentScores(logits_TK)


class _StudentScores(torch.autograd.Function):
    """Saves its inputs and remakes a chunk's logits in the backward pass, so that no [T, V] float32 tensor is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight_VD: Tensor | None,
        columns: OutputColumns,
        tokens_TK: Tensor,
        needs_vocabulary: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        column_TK, is_local_TK = columns.place(tokens_TK)
        logits_TK = torch.zeros(tokens_TK.shape, device=inputs.device)
        max_T = torch.full((len(tokens_TK),), torch.finfo(torch.float32).min, device=inputs.device)
        sum_T, moment_T = torch.zeros(2, len(tokens_TK), device=inputs.device)
        if columns.num_real:
            for chunk in columns.chunks():
                logits = columns.logits(chunk)
                logits_TK[chunk] = torch.where(is_local_TK[chunk], logits.gather(1, column_TK[chunk]), 0.0)
                if needs_vocabulary:
                    max_T[chunk] = logits.amax(dim=-1)
                    exps = torch.exp(logits.sub_(max_T[chunk, None]))
                    sum_T[chunk], moment_T[chunk] = exps.sum(dim=-1), exps.mul_(logits).sum(dim=-1)
        dist.all_reduce(logits_TK, group=columns.group)
        log_sum_T, negentropy_T, global_max_T = torch.zeros(3, len(tokens_TK), device=inputs.device)
        if needs_vocabulary:
            global_max_T = max_T.clone()
            dist.all_reduce(global_max_T, op=dist.ReduceOp.MAX, group=columns.group)
            below_T = max_T - global_max_T
            sums = torch.stack([sum_T, moment_T + sum_T * below_T]) * torch.exp(below_T)
            dist.all_reduce(sums, group=columns.group)
            log_sum_T = sums[0].log()
            logits_TK, negentropy_T = logits_TK - global_max_T[:, None], sums[1] / sums[0] - log_sum_T
        # Not `columns` itself: it holds the inputs, which only the graph frees in time.
        ctx.of_columns = columns.distribution, columns.group, columns.chunk_tokens
        ctx.needs_vocabulary = needs_vocabulary
        ctx.save_for_backward(inputs, weight_VD, column_TK, is_local_TK, global_max_T, log_sum_T, negentropy_T)
        ctx.set_materialize_grads(False)
        if not needs_vocabulary:
            ctx.mark_non_differentiable(log_sum_T, negentropy_T)
        return logits_TK, log_sum_T, negentropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        inputs, weight_VD, column_TK, is_local_TK, *of_vocabulary = ctx.saved_tensors
        columns = OutputColumns(inputs, weight_VD, *ctx.of_columns)
        grad_TK, *vocabulary_grads = grads
        gradients = Gradients(columns, ctx.needs_input_grad)
        for chunk in columns.chunks() if columns.num_real else ():
            if ctx.needs_vocabulary:
                grad = _vocabulary_gradient(columns.logits(chunk), chunk, of_vocabulary, vocabulary_grads)
            else:
                grad = torch.zeros(chunk.stop - chunk.start, columns.num_real, device=inputs.device)
            if grad_TK is not None:
                grad.scatter_add_(1, column_TK[chunk], grad_TK[chunk] * is_local_TK[chunk])
            gradients.add(chunk, grad.div_(columns.distribution.temperature))
        return gradients.inputs, gradients.weight(), None, None, None


def _vocabulary_gradient(
    logits: Tensor, chunk: slice, of_vocabulary: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> Tensor:
    """The gradient of log-sum and negentropy by a chunk's logits, overwritten: p * (a + b * (log p - negentropy))."""
    max_T, log_sum_T, negentropy_T = (part[chunk, None] for part in of_vocabulary)
    log_sum_grad_T, negentropy_grad_T = (
        torch.zeros_like(log_sum_T) if grad is None else grad[chunk, None] for grad in grads
    )
    logprobs = logits.sub_(max_T).sub_(log_sum_T)
    if grads[1] is None:
        return logprobs.exp_().mul_(log_sum_grad_T)
    probs = torch.exp(logprobs)
    return probs.mul_(logprobs.sub_(negentropy_T).mul_(negentropy_grad_T).add_(log_sum_grad_T))
