# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and entropy under the sampling distribution, from logits or hidden states, vocabulary-parallel.

Nothing keeps or gathers the whole vocabulary on any rank. T packed tokens, V vocabulary columns of this rank (padding
included), D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from conversion.files.hf_folder import read_config
from mrl.config.rules.tokens import num_choices
from mrl.phases import ModelName, role_of

if TYPE_CHECKING:
    from mrl.config.schema.policy import PolicyConfig
    from mrl.config.schema.run import RunConfig


def vocab_size_of(config: RunConfig, model: ModelName) -> int:
    """Number of tokens that a model chooses from: its config.json's, but the student's for a teacher.

    Models with one tokenizer may round up the rows of their embeddings differently: 151,936 and 152,064 in Qwen 2.5.
    """
    names = [config.model(model).model_name]
    if role_of(model) == "teacher":
        names.append(config.policy.model_name)
    sizes = [int(str(read_config(Path(name) / "config.json")["vocab_size"])) for name in names]
    return min([*sizes, num_choices(config) or sizes[0]] if config.has_engines else sizes)


# Rows of logits copied to float32 at a time: 4 bytes x 1024 x V/tp, 0.27 GB for 131,072 columns at tp 2.
CHUNK_TOKENS = 1024


@dataclass(frozen=True)
class TokenDistribution:
    """Distribution that tokens are drawn from, made of logits in the order and by the rules of vLLM's sampler."""

    vocab_size: int
    """Number of tokens without the padding of the vocabulary."""
    temperature: float = 1.0
    top_k: int | None = None
    """Number of likeliest tokens kept, with all as likely as the last of them; None = all."""
    top_p: float = 1.0
    """Probability kept: of these tokens only the likeliest that add up to `top_p`, with all as likely as the last of
    them.
    """
    defer_fp32_logits: bool = True
    """Converts logits to float32 in parts; false = a whole row at once. The values are the same."""

    @classmethod
    def of(cls, config: PolicyConfig, vocab_size: int, *, is_sampled: bool = True) -> TokenDistribution:
        """The distribution of the configured sampler; without one, the model's own: temperature 1, every token."""
        whole = cls(vocab_size, defer_fp32_logits=config.megatron_cfg.defer_fp32_logits)
        if not is_sampled:
            return whole
        generation = config.generation
        return replace(whole, temperature=generation.temperature, top_k=generation.top_k, top_p=generation.top_p)

    @property
    def untruncated(self) -> TokenDistribution:
        """The same without top-k, top-p for the reference model, which would exclude other tokens than the policy."""
        return replace(self, top_k=None, top_p=1.0)

    @property
    def is_truncated(self) -> bool:
        """True if some tokens may have probability 0."""
        return self.top_p < 1.0 or (self.top_k is not None and self.top_k < self.vocab_size)

    def least_kept(self, scaled_TV: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The smallest logit per position that top-k and top-p keep, float32 [T], the same on every rank of `group`.

        `scaled_TV` are this rank's float32 logits after temperature, without padding. Ranks exchange sums over columns,
        never logits. Collective over `group` (tensor parallel): every rank calls it, in the same order.
        """
        least_T = scaled_TV.new_full(scaled_TV.shape[:1], torch.finfo(torch.float32).min)
        if self.top_k is not None and self.top_k < self.vocab_size:
            target_T = torch.full_like(least_T, self.top_k)
            least_T = _largest_reaching(
                lambda value_T: (scaled_TV >= value_T[:, None]).sum(dim=-1).float(), target_T, group
            )
        if self.top_p < 1.0:
            max_T = _local_max(scaled_TV)
            dist.all_reduce(max_T, op=dist.ReduceOp.MAX, group=group)
            weights_TV = torch.exp(scaled_TV - max_T[:, None])
            weights_TV.masked_fill_(scaled_TV < least_T[:, None], 0.0)
            total_T = weights_TV.sum(dim=-1)
            dist.all_reduce(total_T, group=group)
            least_p_T = _largest_reaching(
                lambda value_T: torch.where(scaled_TV >= value_T[:, None], weights_TV, 0.0).sum(dim=-1),
                self.top_p * total_T,
                group,
            )
            least_T = torch.maximum(least_T, least_p_T)
        return least_T


@dataclass(frozen=True)
class TokenScores:
    """Scores of the label at each position, float32 [T], the same on every rank of the tp group."""

    logprobs_T: Tensor
    """Log-probabilities with gradient; -inf, without gradient, where top-k or top-p leave the label out."""
    untruncated_logprobs_T: Tensor
    """Log-probabilities with gradient as if every token could be drawn; the same tensor where the distribution is not
    truncated.
    """
    entropy_T: Tensor
    """Entropy of the distribution in nats, without gradient."""
    is_likeliest_T: Tensor
    """Marks labels than which no token is likelier, bool."""


@dataclass(frozen=True)
class OutputColumns:
    """This rank's columns of a row's logits, copied to float32 for `chunk_tokens` rows at a time."""

    inputs: Tensor
    """The logits [T, V] where there is no weight, and hidden states [T, D] where there is one."""
    weight_VD: Tensor | None
    distribution: TokenDistribution
    group: dist.ProcessGroup
    """Tensor parallel: its ranks have the columns of the padded vocabulary, in rank order."""
    chunk_tokens: int = CHUNK_TOKENS

    @property
    def num_columns(self) -> int:
        return self.inputs.shape[1] if self.weight_VD is None else len(self.weight_VD)

    @property
    def first(self) -> int:
        """The token of the first column."""
        return self.group.rank() * self.num_columns

    @property
    def num_real(self) -> int:
        """Number of columns without the vocabulary's padding."""
        return min(max(self.distribution.vocab_size - self.first, 0), self.num_columns)

    def chunks(self) -> list[slice]:
        num_tokens = len(self.inputs)
        return [
            slice(start, min(start + self.chunk_tokens, num_tokens))
            for start in range(0, num_tokens, self.chunk_tokens)
        ]

    def logits(self, chunk: slice) -> Tensor:
        """A float32 copy of the real columns of a chunk, after temperature."""
        rows = self.inputs[chunk]
        logits = rows[:, : self.num_real] if self.weight_VD is None else rows @ self.weight_VD[: self.num_real].t()
        return logits.to(torch.float32, copy=True).div_(self.distribution.temperature)

    def place(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's column of each token, 0 where it has none, and a mask of the tokens that have one."""
        columns = tokens - self.first
        is_local = (columns >= 0) & (columns < self.num_real)
        return torch.where(is_local, columns, 0), is_local


class Gradients:
    """Gradients of the columns' inputs and weight, chunk by chunk."""

    def __init__(self, columns: OutputColumns, needed: tuple[bool, ...]) -> None:
        self._columns = columns
        self.inputs = torch.zeros_like(columns.inputs) if needed[0] else None
        # A sum of many chunks would lose the small ones in bfloat16.
        weight_VD = columns.weight_VD
        self._weight_VD = (
            torch.zeros_like(weight_VD, dtype=torch.float32) if needed[1] and weight_VD is not None else None
        )

    def add(self, chunk: slice, grad: Tensor) -> None:
        """Adds the gradients by the logits of a chunk, before temperature."""
        columns, num_real = self._columns, self._columns.num_real
        grad = grad.to(columns.inputs.dtype)
        if self.inputs is not None and columns.weight_VD is None:
            self.inputs[chunk, :num_real] = grad
        if self.inputs is not None and columns.weight_VD is not None:
            self.inputs[chunk] = grad @ columns.weight_VD[:num_real]
        if self._weight_VD is not None:
            self._weight_VD[:num_real] += grad.t() @ columns.inputs[chunk]

    def weight(self) -> Tensor | None:
        return None if self._weight_VD is None else self._weight_VD.to(self._columns.inputs.dtype)


def scores_of(columns: OutputColumns, labels_T: Tensor, sources_T: Tensor | None = None) -> TokenScores:
    """Scores of the labels. Logits are divided by the temperature in float32 first, as the sampler does.

    `sources_T` are the rows of logits that predict the labels, int64; None: each row predicts one, in order. From
    hidden states, only `chunk_tokens` rows of logits exist at a time, also in the backward pass. The gradient of
    hidden states comes from this rank's columns and is still to be summed over the group; the weight's is summed over
    the chunks in float32. Collective over the tensor-parallel group: every rank calls it, in the same order; the
    backward pass has no collective.
    """
    if sources_T is None:
        scores = _Scores.apply(columns.inputs, columns.weight_VD, columns, labels_T, torch.arange(len(labels_T)))
    else:
        # A chunk of rows has labels next to each other.
        order_T = sources_T.argsort(stable=True)
        sorted_scores = _Scores.apply(columns.inputs, columns.weight_VD, columns, labels_T[order_T], sources_T[order_T])
        places_T = order_T.argsort()
        scores = [values_T.index_select(0, places_T) for values_T in sorted_scores]
    logprobs_T, untruncated_T, entropy_T, likeliest_T = scores
    return TokenScores(
        logprobs_T, untruncated_T if columns.distribution.is_truncated else logprobs_T, entropy_T, likeliest_T
    )


def _with_labels(columns: OutputColumns, sources_T: Tensor) -> list[tuple[slice, slice]]:
    chunks = columns.chunks()
    stops = torch.tensor([chunk.stop for chunk in chunks], device=sources_T.device)
    bounds = [0, *torch.searchsorted(sources_T, stops).tolist()]
    return [(chunk, slice(start, stop)) for chunk, start, stop in zip(chunks, bounds, bounds[1:], strict=False)]


class _Scores(torch.autograd.Function):
    """Saves its inputs and remakes a chunk's logits in the backward pass, so that no [U, V] float32 tensor is kept.

    The inputs are the logits [U, V] where there is no weight, and hidden states [U, D] where there is one. Labels come
    in the order of the rows that predict them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight_VD: Tensor | None,
        columns: OutputColumns,
        labels_T: Tensor,
        sources_T: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        distribution, group, (column_T, is_local_T) = columns.distribution, columns.group, columns.place(labels_T)
        sources_T, num_rows = sources_T.to(inputs.device), len(inputs)
        # Sums this rank's columns first, then over ranks: a chunk waits for no other rank unless the distribution is
        # truncated.
        max_U = torch.empty(num_rows, device=inputs.device)
        least_kept_U = torch.full_like(max_U, -torch.inf)
        sums = torch.zeros(3 * num_rows + len(labels_T), device=inputs.device)
        of_rows, label_T = sums[: 3 * num_rows].view(3, num_rows), sums[3 * num_rows :]
        whole_U, kept_U, moment_U = of_rows
        spans = _with_labels(columns, sources_T)
        for chunk, labels in spans:
            scaled = columns.logits(chunk)
            if columns.num_real:
                label = scaled[sources_T[labels] - chunk.start, column_T[labels]]
                label_T[labels] = torch.where(is_local_T[labels], label, 0.0)
            max_U[chunk] = _local_max(scaled)
            is_out = None
            if distribution.is_truncated:
                least_kept_U[chunk] = distribution.least_kept(scaled, group)
                is_out = scaled < least_kept_U[chunk, None]
            shifted = scaled.sub_(max_U[chunk, None])
            exps = torch.exp(shifted)
            whole_U[chunk] = exps.sum(dim=-1)
            if is_out is not None:
                exps.masked_fill_(is_out, 0.0)
            kept_U[chunk] = exps.sum(dim=-1)
            moment_U[chunk] = exps.mul_(shifted).sum(dim=-1)
        global_max_U = max_U.clone()
        dist.all_reduce(global_max_U, op=dist.ReduceOp.MAX, group=group)
        below_U = max_U - global_max_U
        moment_U += kept_U * below_U
        of_rows *= torch.exp(below_U)
        dist.all_reduce(sums, group=group)

        log_kept_U, log_whole_U = kept_U.log(), whole_U.log()
        above_T, is_kept_T = label_T - global_max_U[sources_T], label_T >= least_kept_U[sources_T]
        # NaN logits must stay NaN.
        is_out_T = label_T < least_kept_U[sources_T]
        logprobs_T = torch.where(is_out_T, -torch.inf, above_T - log_kept_U[sources_T])
        entropy_T = (log_kept_U - moment_U / kept_U)[sources_T]
        # Not `columns` itself: it holds the inputs, which only the graph frees in time.
        ctx.of_columns = distribution, group, columns.chunk_tokens
        ctx.spans = spans
        normalizers = global_max_U + log_kept_U, global_max_U + log_whole_U
        ctx.save_for_backward(inputs, weight_VD, column_T, is_local_T, sources_T, *normalizers, least_kept_U, is_kept_T)
        ctx.set_materialize_grads(False)
        is_likeliest_T = above_T >= 0
        ctx.mark_non_differentiable(entropy_T, is_likeliest_T)
        return logprobs_T, above_T - log_whole_U[sources_T], entropy_T, is_likeliest_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        (
            inputs,
            weight_VD,
            column_T,
            is_local_T,
            sources_T,
            normalizer_U,
            untruncated_normalizer_U,
            least_kept_U,
            is_kept_T,
        ) = ctx.saved_tensors
        columns = OutputColumns(inputs, weight_VD, *ctx.of_columns)
        gradients = Gradients(columns, ctx.needs_input_grad)
        distribution = columns.distribution
        (grad_T, untruncated_grad_T, *_) = grads

        def by_logits(grad_T: Tensor, normalizer_U: Tensor, scaled: Tensor, chunk: slice, labels: slice) -> Tensor:
            """Labels' log-softmax gradient: 1 - probability for the label, -probability for others over temperature."""
            rows, scale = sources_T[labels] - chunk.start, grad_T[labels] / distribution.temperature
            # Several labels of a row add up; accumulation by index_put is deterministic on GPUs, too.
            row_scale = scale.new_zeros(len(scaled)).index_put_((rows,), scale, accumulate=True)
            result = torch.sub(scaled, normalizer_U[chunk, None]).exp_().mul_(-row_scale[:, None])
            if not columns.num_real:
                return result
            return result.index_put_((rows, column_T[labels]), scale * is_local_T[labels], accumulate=True)

        for chunk, labels in ctx.spans:
            scaled, grad = columns.logits(chunk), None
            if grad_T is not None:
                kept_grad_T = torch.where(is_kept_T, grad_T, 0.0)
                grad = by_logits(kept_grad_T, normalizer_U, scaled, chunk, labels)
                if distribution.is_truncated:
                    grad.masked_fill_(scaled < least_kept_U[chunk, None], 0.0)
            if untruncated_grad_T is not None:
                untruncated = by_logits(untruncated_grad_T, untruncated_normalizer_U, scaled, chunk, labels)
                grad = untruncated if grad is None else grad.add_(untruncated)
            gradients.add(chunk, torch.zeros_like(scaled) if grad is None else grad)
        return gradients.inputs, gradients.weight(), None, None, None


def _local_max(scaled_TV: Tensor) -> Tensor:
    """The largest logit at each position, float32 [T]; the smallest finite number on a rank that has only padding."""
    if scaled_TV.shape[1] == 0:
        return torch.full((scaled_TV.shape[0],), torch.finfo(torch.float32).min, device=scaled_TV.device)
    return scaled_TV.amax(dim=-1).float()


def _largest_reaching(weight_from: Callable[[Tensor], Tensor], target_T: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The largest float32 such that all ranks' columns at or above it weigh at least `target_T`; the lowest if none.

    `weight_from(value_T)` is the weight of this rank's columns of at least `value_T`. Bisects all finite floats, so the
    result is exactly one of the columns, without sorting or gathering the vocabulary.
    """

    def flipped(bits_T: Tensor) -> Tensor:
        """Converts float32 bits to int32 in the same order, and back: flips bits below the sign of negative numbers."""
        return bits_T ^ ((bits_T >> 31) & 0x7FFFFFFF)

    limit = torch.finfo(torch.float32).max
    high_T = flipped(torch.full_like(target_T, limit).view(torch.int32)).long()
    low_T = flipped(torch.full_like(target_T, -limit).view(torch.int32)).long()
    for _ in range(32):
        middle_T = low_T + (high_T - low_T + 1) // 2
        weight_T = weight_from(flipped(middle_T.int()).view(torch.float32))
        dist.all_reduce(weight_T, group=group)
        reaches_T = weight_T >= target_T
        low_T = torch.where(reaches_T, middle_T, low_T)
        high_T = torch.where(reaches_T, high_T, middle_T - 1)
    return flipped(low_T.int()).view(torch.float32)
