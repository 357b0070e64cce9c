"""Log-probabilities and entropy from vocabulary-parallel logits, or from hidden states without the logits of a whole row.

Neither keeps or gathers the whole vocabulary on any rank. T packed tokens, V local vocabulary columns (padding included), D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.policy.distribution import TokenDistribution, local_max

# fp32 copies of given logits live for this many rows at a time: 4 bytes x 1024 x V/tp, 0.27 GB for 131,072 columns at tp 2.
CHUNK_TOKENS = 1024


@dataclass(frozen=True)
class TokenScores:
    """What the distribution says of the label at each position, float32 [T], the same on every rank of the tp group."""

    logprobs_T: Tensor
    """With gradient; -inf, without gradient, where top-k or top-p leave the label out."""
    untruncated_logprobs_T: Tensor
    """As if every token could be drawn, with gradient; the same tensor where the distribution is not truncated."""
    entropy_T: Tensor
    """Entropy of the distribution in nats, without gradient."""


def scores_of_logits(logits_TV: Tensor, labels_T: Tensor, distribution: TokenDistribution, group: dist.ProcessGroup) -> TokenScores:
    """Scores of the labels, from this rank's columns of the padded vocabulary, in rank order.

    Columns from `vocab_size` on are padding and have no probability. Logits are divided by the temperature in float32 first, as the
    sampler does. Collective over `group` (tensor parallel): every rank calls it, in the same order; the backward pass has no collective.
    """
    return _token_scores(logits_TV, None, labels_T, distribution, group, CHUNK_TOKENS)


def scores_of_hidden(
    hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, distribution: TokenDistribution, group: dist.ProcessGroup, *, chunk_tokens: int
) -> TokenScores:
    """As `scores_of_logits` of `hidden_TD @ weight_VD.T`, of which only `chunk_tokens` rows are ever there, in the backward pass too.

    Every rank passes the hidden states of all T tokens; their gradient is that of this rank's columns, still to be summed over `group`.
    The weight's gradient is summed over the chunks in float32.
    """
    return _token_scores(hidden_TD, weight_VD, labels_T, distribution, group, chunk_tokens)


def _token_scores(
    inputs: Tensor, weight_VD: Tensor | None, labels_T: Tensor, distribution: TokenDistribution, group: dist.ProcessGroup, chunk_tokens: int
) -> TokenScores:
    logprobs_T, untruncated_T, entropy_T = _Scores.apply(inputs, weight_VD, labels_T, distribution, group, chunk_tokens)
    return TokenScores(logprobs_T, untruncated_T if distribution.is_truncated else logprobs_T, entropy_T)


class _Scores(torch.autograd.Function):
    """Saves its inputs and makes the logits of a chunk again in the backward pass, so that no [T, V] float32 tensor is kept.

    The inputs are the logits [T, V] where there is no weight, and hidden states [T, D] where there is one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight_VD: Tensor | None,
        labels_T: Tensor,
        distribution: TokenDistribution,
        group: dist.ProcessGroup,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        columns = _Columns(inputs.shape[1] if weight_VD is None else len(weight_VD), labels_T, distribution, group)
        rows = [slice(start, min(start + chunk_tokens, len(labels_T))) for start in range(0, len(labels_T), chunk_tokens)]
        sums = _Sums.over(lambda chunk: _logits(inputs, weight_VD, chunk, columns), rows, columns)
        ctx.columns, ctx.rows = columns, rows
        is_kept_T = sums.label_T >= sums.least_kept_T
        above_T = sums.label_T - sums.max_T
        # NaN logits must stay NaN.
        logprobs_T = torch.where(sums.label_T < sums.least_kept_T, -torch.inf, above_T - sums.log_sum_T)
        entropy_T = sums.log_sum_T - sums.mean_T
        normalizers = sums.max_T + sums.log_sum_T, sums.max_T + sums.untruncated_log_sum_T
        ctx.save_for_backward(inputs, weight_VD, *normalizers, sums.least_kept_T, is_kept_T)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, above_T - sums.untruncated_log_sum_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        inputs, weight_VD, *saved = ctx.saved_tensors
        columns, num_real = ctx.columns, ctx.columns.num_real
        grad_inputs = torch.zeros_like(inputs) if ctx.needs_input_grad[0] else None
        # A sum of many chunks would lose the small ones in bfloat16.
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for chunk in ctx.rows:
            grad = _logit_gradient(_logits(inputs, weight_VD, chunk, columns), chunk, columns, saved, grads).to(inputs.dtype)
            if grad_inputs is not None and weight_VD is None:
                grad_inputs[chunk, :num_real] = grad
            if grad_inputs is not None and weight_VD is not None:
                grad_inputs[chunk] = grad @ weight_VD[:num_real]
            if grad_weight_VD is not None:
                grad_weight_VD[:num_real] += grad.t() @ inputs[chunk]
        return grad_inputs, None if grad_weight_VD is None else grad_weight_VD.to(inputs.dtype), None, None, None, None


class _Columns:
    """Which columns of the vocabulary this rank has, and which labels are among them."""

    def __init__(self, num_columns: int, labels_T: Tensor, distribution: TokenDistribution, group: dist.ProcessGroup) -> None:
        first_column = group.rank() * num_columns
        self.num_real = min(max(distribution.vocab_size - first_column, 0), num_columns)
        column_T = labels_T - first_column
        self.is_local_T = (column_T >= 0) & (column_T < self.num_real)
        self.label_T = torch.where(self.is_local_T, column_T, 0)
        self.distribution, self.group = distribution, group


@dataclass
class _Sums:
    """Over all ranks, float32 [T]. A label's own logit is kept apart from the normalizer, which loses fewest bits."""

    max_T: Tensor
    log_sum_T: Tensor
    """log of the sum of exp(logit - max) over the tokens that can be drawn."""
    untruncated_log_sum_T: Tensor
    mean_T: Tensor
    """Mean of logit - max under the distribution."""
    label_T: Tensor
    least_kept_T: Tensor

    @classmethod
    def over(cls, logits_of: Callable[[slice], Tensor], rows: list[slice], columns: _Columns) -> _Sums:
        """Sums over this rank's real columns of the logits of each chunk of rows, then over the ranks: a chunk waits for no other rank
        unless the distribution is truncated."""
        distribution, group = columns.distribution, columns.group
        max_T = torch.empty(len(columns.label_T), device=columns.label_T.device)
        least_kept_T = torch.full_like(max_T, -torch.inf)
        whole_T, kept_T, moment_T, label_T = sums = torch.zeros(4, len(max_T), device=max_T.device)
        for chunk in rows:
            scaled = _scaled(logits_of(chunk), distribution)
            if columns.num_real:
                label = scaled.gather(1, columns.label_T[chunk, None])[:, 0]
                label_T[chunk] = torch.where(columns.is_local_T[chunk], label, 0.0)
            max_T[chunk] = local_max(scaled)
            is_out = None
            if distribution.is_truncated:
                least_kept_T[chunk] = distribution.least_kept(scaled, group)
                is_out = scaled < least_kept_T[chunk, None]
            shifted = scaled.sub_(max_T[chunk, None])
            exps = torch.exp(shifted)
            whole_T[chunk] = exps.sum(dim=-1)
            if is_out is not None:
                exps.masked_fill_(is_out, 0.0)
            kept_T[chunk] = exps.sum(dim=-1)
            moment_T[chunk] = exps.mul_(shifted).sum(dim=-1)

        global_max_T = max_T.clone()
        dist.all_reduce(global_max_T, op=dist.ReduceOp.MAX, group=group)
        below_T = max_T - global_max_T
        moment_T += kept_T * below_T
        sums[:3] *= torch.exp(below_T)
        dist.all_reduce(sums, group=group)
        return cls(global_max_T, kept_T.log(), whole_T.log(), moment_T / kept_T, label_T, least_kept_T)


def _logits(inputs: Tensor, weight_VD: Tensor | None, chunk: slice, columns: _Columns) -> Tensor:
    """This rank's real columns of the logits of a chunk of rows."""
    return inputs[chunk, : columns.num_real] if weight_VD is None else inputs[chunk] @ weight_VD[: columns.num_real].t()


def _logit_gradient(logits: Tensor, chunk: slice, columns: _Columns, saved: list[Tensor], grads: tuple[Tensor | None, ...]) -> Tensor:
    """Gradient of the logits of a chunk of rows, float32, from the gradients of both log-probabilities."""
    normalizer_T, untruncated_normalizer_T, least_kept_T, is_kept_T = saved
    distribution = columns.distribution
    grad_T, untruncated_grad_T, _ = grads
    scaled = _scaled(logits, distribution)
    result = None
    if grad_T is not None:
        result = _gradient_of(torch.where(is_kept_T, grad_T, 0.0), normalizer_T, scaled, chunk, columns)
        if distribution.is_truncated:
            result.masked_fill_(scaled < least_kept_T[chunk, None], 0.0)
    if untruncated_grad_T is not None:
        untruncated = _gradient_of(untruncated_grad_T, untruncated_normalizer_T, scaled, chunk, columns)
        result = untruncated if result is None else result.add_(untruncated)
    return torch.zeros_like(scaled) if result is None else result


def _gradient_of(grad_T: Tensor, normalizer_T: Tensor, scaled: Tensor, chunk: slice, columns: _Columns) -> Tensor:
    """Of the log-softmax of the labels: of the label 1 - probability, of all others -probability, over the temperature."""
    scale = grad_T[chunk, None] / columns.distribution.temperature
    result = torch.sub(scaled, normalizer_T[chunk, None]).exp_().mul_(-scale)
    if columns.num_real:
        result.scatter_add_(1, columns.label_T[chunk, None], scale * columns.is_local_T[chunk, None])
    return result


def _scaled(logits: Tensor, distribution: TokenDistribution) -> Tensor:
    """A float32 copy of the logits after temperature."""
    return logits.to(torch.float32, copy=True).div_(distribution.temperature)
