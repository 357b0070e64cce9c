# SPDX-License-Identifier: Apache-2.0
"""One rank's rows of a global batch: sizes over all ranks, log-probabilities, and what `mrl.algo.token_advantages` makes of both.

Collective functions are called by all ranks, in the same order. T packed tokens of a row, S sequences of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mrl.algo.critic import ValuedRow, gae_of_rows
from mrl.algo.losses import MAX_METRICS, MIN_METRICS
from mrl.algo.token_advantages import error_metrics, finish_error_metrics, kl_penalty, sequence_errors, teacher_gap, token_advantages
from mrl.config.schema.algo import GrpoConfig, LossConfig, OnPolicyDistillationConfig
from mrl.config.schema.ppo import GaeConfig
from mrl.data.packing import PackedRow, as_row, by_sequence, regroup
from mrl.policy.packed import join, local_positions


@dataclass
class TrainRow:
    """A row with the log-probabilities that the loss compares with, if any. They are None on all but the last pipeline stage."""

    row: PackedRow
    old_logprobs_T: Tensor | None = None
    reference_logprobs_T: Tensor | None = None
    values_T: Tensor | None = None
    """The critic's, before its updates."""
    returns_T: Tensor | None = None
    """What the critic learns; NaN at tokens that do not count."""
    entropy_T: Tensor | None = None
    """Of the policy's distributions, for readers: a train step of the policy loss leaves it here."""


@dataclass(frozen=True)
class BatchSize:
    """What the losses of a global batch are divided by."""

    num_valid_tokens: int
    num_valid_sequences: int
    num_positive_tokens: int
    """Valid tokens of sequences with a reward above 0."""
    num_tokens: int
    """Without padding."""
    num_sequences: int


@dataclass
class RankBatch:
    """This rank's rows of a global batch, with the log-probabilities by row of training; these lists are empty off the last stage."""

    rows: list[PackedRow]
    logprob_rows: list[PackedRow]
    size: BatchSize
    old_logprobs: list[Tensor] | None = None
    reference_logprobs: list[Tensor] | None = None
    values: list[Tensor] | None = None
    returns: list[Tensor] | None = None
    finished_rows: list[TrainRow] | None = None
    """Set by `finish_batches`: on the last pipeline stage with final masks and advantages, on the others as they were."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`train/*` of `finish_batches`, the same on every rank."""

    def by_train_row(self, logprobs: list[Tensor]) -> list[Tensor]:
        """Log-probabilities by row of training, from those by row of the logprob passes."""
        return regroup(logprobs, self.logprob_rows, self.rows) if logprobs else []

    def train_rows(self) -> list[TrainRow]:
        """The rows as the loss takes them, with the log-probabilities that this rank has."""
        if self.finished_rows is not None:
            return self.finished_rows
        known = (self.old_logprobs, self.reference_logprobs, self.values, self.returns)
        return [TrainRow(*item) for item in zip(self.rows, *(tokens or [None] * len(self.rows) for tokens in known), strict=True)]

    def take_values(self, values: Mapping[int, np.ndarray]) -> None:
        """Takes the critic's values, by sequence."""
        self.values = [as_row(row, values) for row in self.rows]

    def take_returns(self, returns: Mapping[int, np.ndarray]) -> None:
        """Takes what the critic is to learn, by sequence; tokens without a return leave the loss. Collective over the dp group."""
        self.returns = [as_row(row, returns) for row in self.rows]
        kept = [(~returns_T.isnan()).float() for returns_T in self.returns]
        self.rows = [replace(row, loss_mask_T=row.loss_mask_T * kept_T) for row, kept_T in zip(self.rows, kept, strict=True)]
        self.size = global_batch_size(self.rows)


def own_positions(row: PackedRow) -> Tensor:
    """Positions in the row of this rank's tokens, its part under context parallelism."""
    group = parallel_state.get_context_parallel_group()
    return local_positions(row.cu_seqlens, cp_size=group.size(), cp_rank=group.rank())


def router_positions(row: PackedRow) -> Tensor:
    """Positions in the row of the tokens that this rank's routers see: tp ranks share its own tokens out equally."""
    group = parallel_state.get_tensor_model_parallel_group()
    return own_positions(row).chunk(group.size())[group.rank()]


def whole_row(own_T: Tensor, row: PackedRow) -> Tensor:
    """The values of a whole row, [T], from those of this rank's tokens, which keep their gradient. Collective over the cp group."""
    group = parallel_state.get_context_parallel_group()
    parts = [torch.empty_like(own_T) for _ in range(group.size())]
    dist.all_gather(parts, own_T.detach().contiguous(), group=group)
    parts[group.rank()] = own_T
    return join(parts, row.cu_seqlens)


def packed_params(row: PackedRow, device: torch.device) -> PackedSeqParams:
    """The row's sequences, as Megatron's layers take them. Padding is tokens that no other token sees: bounds with and without it agree."""
    cu_seqlens = row.cu_seqlens.to(device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=row.max_seqlen,
        max_seqlen_kv=row.max_seqlen,
    )


def check_equal_counts(num_rows: int) -> None:
    """Raises RuntimeError if ranks hold different numbers of rows, because pipelines would wait for ever. Collective over all ranks."""
    counts = torch.tensor([num_rows, -num_rows])
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    if counts[0] != -counts[1]:
        raise RuntimeError(f"data-parallel ranks hold between {-counts[1]} and {counts[0]} packed rows; they must hold the same number")


def global_batch_size(rows: list[PackedRow]) -> BatchSize:
    """Size of the global batch, from this rank's rows. Collective over the dp group."""
    sizes = [
        (row.num_valid_tokens, row.num_valid_sequences, int(row.positive_mask_T.sum()), sum(row.lengths), len(row.lengths)) for row in rows
    ]
    counts = torch.tensor(sizes, dtype=torch.int64).reshape(-1, 5).sum(dim=0)
    dist.all_reduce(counts, group=parallel_state.get_data_parallel_group())
    return BatchSize(*counts.tolist())


def finish_batches(
    batches: list[RankBatch],
    grpo: GrpoConfig,
    loss: LossConfig | None,
    gae: GaeConfig | None = None,
    teaching: OnPolicyDistillationConfig | None = None,
) -> None:
    """Finishes all batches of a step: sequences masked, advantages by token. Collective over all ranks.

    `loss` is None if nothing is learned from rewards. With `gae`, rows have values, advantages come from these, and finished rows have
    returns, too. With `teaching`, rows have what teachers say of their tokens, and advantages are those of arXiv:2601.02780:
    log(teacher / policy), and a share of what the reward gives.
    """

    def add_over_ranks(value: Tensor) -> Tensor:
        dist.all_reduce(value, group=parallel_state.get_data_parallel_group())
        return value

    rows = [batch.train_rows() for batch in batches]
    metrics: list[dict[str, float]] = [{} for _ in batches]
    if parallel_state.is_pipeline_last_stage():
        if all(item.old_logprobs_T is not None for items in rows for item in items):
            rows, metrics = map(list, zip(*(_without_errors(items, grpo.seq_logprob_error_threshold) for items in rows), strict=True))
        # Normalisation is over all updates of the step.
        step = [item for items in rows for item in items]
        penalties = None
        if loss is not None and loss.use_kl_in_reward:
            penalties = [
                kl_penalty(_on_host(item.old_logprobs_T), _on_host(item.reference_logprobs_T), item.row.loss_mask_T, loss) for item in step
            ]
        starts = [item.row.advantages_T for item in step]
        if teaching is not None:
            starts, penalties = [teaching.reward_weight * advantages_T for advantages_T in starts], [-_gap(item) for item in step]
        if gae is not None:
            starts, returns = gae_of_rows(
                [_valued(item, kl_T) for item, kl_T in zip(step, penalties or [None] * len(step), strict=True)], gae, add_over_ranks
            )
            if any(not returns_T[item.row.loss_mask_T > 0].isfinite().all() for item, returns_T in zip(step, returns, strict=True)):
                raise RuntimeError("the critic's values of the step are not all finite, and no returns can be made of them")
            targets = iter([torch.where(item.row.loss_mask_T > 0, part, torch.nan) for item, part in zip(step, returns, strict=True)])
            rows, penalties = [[replace(item, returns_T=next(targets)) for item in items] for items in rows], None
        advantages = iter(
            token_advantages(
                starts,
                [item.row.fixed_advantages_T for item in step],
                [item.row.loss_mask_T for item in step],
                penalties,
                grpo,
                add_over_ranks,
            )
        )
        rows = [[replace(item, row=replace(item.row, advantages_T=next(advantages))) for item in items] for items in rows]
        metrics = [measured | _advantage_metrics(items, teaching is not None) for measured, items in zip(metrics, rows, strict=True)]
    shared = [
        (global_batch_size([item.row for item in items]), {f"train/{name}": value for name, value in measured.items()})
        for items, measured in zip(rows, metrics, strict=True)
    ]
    share_from_last_stage(shared)
    for batch, items, (size, measured) in zip(batches, rows, shared, strict=True):
        batch.finished_rows, batch.size, batch.metrics = items, size, measured
        batch.returns = [item.returns_T for item in items if item.returns_T is not None]


def _valued(item: TrainRow, kl_T: Tensor | None) -> ValuedRow:
    assert item.values_T is not None, "the critic's values come before the advantages"
    return ValuedRow(item.values_T, item.row.sequence_rewards, item.row.loss_mask_T, item.row.cu_seqlens, kl_T)


def answers_for_rows() -> bool:
    """Whether this rank tells of the rows of its dp rank: one of those that have what the last pipeline stage computes."""
    is_first = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0
    return is_first and parallel_state.is_pipeline_last_stage()


def sequences_of(batches: list[tuple[list[PackedRow], list[Tensor]]]) -> list[dict[int, np.ndarray]]:
    """By batch, the values of the sequences of its rows; nothing on a rank that does not answer for them."""
    if not answers_for_rows():
        return [{} for _ in batches]
    return [
        {index: part for row, values_T in zip(rows, values, strict=True) for index, part in by_sequence(row, values_T).items()}
        for rows, values in batches
    ]


def share_from_last_stage(values: list) -> None:
    """Replaces the entries of the list by those of the last pipeline stage. Collective over all ranks."""
    # Ranks are ordered with the pipeline outermost, so the last rank is in the last stage.
    dist.broadcast_object_list(values, src=dist.get_world_size() - 1)


def combine(row_metrics: list[dict[str, Tensor]], group: dist.ProcessGroup) -> dict[str, float]:
    """Sums, or by `MIN_METRICS` and `MAX_METRICS` extremes, of scalars over all rows of all ranks of a group. Collective over the group."""
    metrics: dict[str, float] = {}
    names = sorted(row_metrics[0])
    values = torch.stack([torch.stack([row[name].double() for name in names]) for row in row_metrics])
    for kind, reduce, op in (
        ([name for name in names if name not in MIN_METRICS + MAX_METRICS], torch.sum, dist.ReduceOp.SUM),
        ([name for name in names if name in MIN_METRICS], torch.amin, dist.ReduceOp.MIN),
        ([name for name in names if name in MAX_METRICS], torch.amax, dist.ReduceOp.MAX),
    ):
        part = reduce(values[:, [names.index(name) for name in kind]], dim=0)
        dist.all_reduce(part, op=op, group=group)
        metrics |= dict(zip(kind, part.tolist(), strict=True))
    return metrics


def _without_errors(rows: list[TrainRow], threshold: float | None) -> tuple[list[TrainRow], dict[str, float]]:
    """The rows without the sequences whose old and generator logprobs are too far apart, and the metrics of these errors."""
    kept_rows, errors, is_kept, rewards = [], [], [], []
    for item in rows:
        row = item.row
        error_S = sequence_errors(_on_host(item.old_logprobs_T), row.generator_logprobs_T, row.loss_mask_T, row.cu_seqlens)
        # NaN, of sequences that do not count anyway, is not above the threshold.
        is_kept_S = ~(error_S > threshold) if threshold is not None else torch.ones_like(error_S, dtype=torch.bool)
        kept_rows.append(replace(item, row=row.masked(is_kept_S)))
        is_counted_S = ~error_S.isnan()
        errors.append(error_S[is_counted_S])
        is_kept.append(is_kept_S[is_counted_S])
        rewards.append(row.sequence_rewards[is_counted_S])
    parts = error_metrics(torch.cat(errors), torch.cat(is_kept), torch.cat(rewards))
    return kept_rows, finish_error_metrics(combine([parts], parallel_state.get_data_parallel_group()))


def _gap(item: TrainRow) -> Tensor:
    """How far the teacher's logprobs are above the policy's, [T]; 0 in a row without sequences."""
    said, mask_T = item.row.teacher, item.row.loss_mask_T
    return torch.zeros_like(mask_T) if said is None else teacher_gap(said.scores_TK[:, 0], _on_host(item.old_logprobs_T), mask_T)


def _advantage_metrics(rows: list[TrainRow], has_teachers: bool) -> dict[str, float]:
    values = torch.cat([item.row.advantages_T[item.row.loss_mask_T > 0] for item in rows])
    infinity = torch.tensor([torch.inf])
    parts = {
        "advantages/mean": values.sum(),
        "num_tokens": torch.tensor(float(len(values))),
        "advantages/min": torch.cat([values, infinity]).min(),
        "advantages/max": torch.cat([values, -infinity]).max(),
    }
    if has_teachers:
        parts["teacher_gap/mean"] = torch.cat([_gap(item) for item in rows]).sum()
    totals = combine([parts], parallel_state.get_data_parallel_group())
    count = totals.pop("num_tokens")
    return {name: value / (count if name.endswith("/mean") else 1.0) if count else 0.0 for name, value in totals.items()}


def _on_host(logprobs_T: Tensor | None) -> Tensor:
    assert logprobs_T is not None
    return logprobs_T.cpu()
