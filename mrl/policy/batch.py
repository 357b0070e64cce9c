# SPDX-License-Identifier: Apache-2.0
"""A rank's rows of a global batch: sizes over all ranks, logprobs, and what `mrl.algo.token_advantages` makes of both.

Collective functions are called by all ranks, in the same order. T packed tokens of a row, S sequences of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mrl.algo.critic import ValuedRow, gae_of_rows
from mrl.algo.losses import BatchSize
from mrl.algo.ratios import extremes
from mrl.algo.token_advantages import (
    error_metrics,
    finish_error_metrics,
    kl_penalty,
    sequence_errors,
    teacher_gap,
    token_advantages,
)
from mrl.config.schema.algo import GrpoConfig, LossConfig
from mrl.config.schema.ppo import GaeConfig
from mrl.config.schema.teachers import OnPolicyDistillationConfig
from mrl.data.packing import PackedRow, as_row, by_sequence, regroup
from mrl.metrics import extreme_of
from mrl.policy.packed import join, local_positions
from mrl.policy.tree_layers import tree_params
from mrl.policy.versions import packed_arguments
from mrl.types import NOT_FINITE


@dataclass
class RankBatch:
    """Rows of this rank in a global batch, and the same sequences in the rows of the logprob passes."""

    rows: list[PackedRow]
    logprob_rows: list[PackedRow]
    size: BatchSize
    has_old_logprobs: bool = False
    is_finished: bool = False
    """Set by `finish_batches`: rows of the last pipeline stage have final masks and advantages, rows of other stages
    are unchanged.
    """
    metrics: dict[str, float] = field(default_factory=dict)
    """`train/*` of `finish_batches`, the same on every rank."""

    def with_values(self, values: list[Tensor]) -> Iterator[tuple[PackedRow, Tensor]]:
        """Pairs training rows with values computed in rows of logprob passes; none outside the last pipeline stage."""
        return zip(self.rows, regroup(values, self.logprob_rows, self.rows) if values else (), strict=False)

    def take_returns(self, returns: Mapping[int, np.ndarray]) -> None:
        """Takes critic targets by sequence; tokens without a return leave the loss. Collective over the dp group."""
        for row in self.rows:
            row.returns_T = as_row(row, returns)
            row.loss_mask_T = row.loss_mask_T * (~row.returns_T.isnan()).float()
        self.size = global_batch_size(self.rows)


def own_positions(row: PackedRow) -> Tensor:
    """Positions in the row of this rank's tokens, its part under context parallelism."""
    group = parallel_state.get_context_parallel_group()
    return local_positions(row.cu_seqlens, cp_size=group.size(), cp_rank=group.rank())


def computed_positions(row: PackedRow) -> Tensor:
    """Positions in the row of the tokens that this rank's model computes: its own, or those of the row's tree."""
    return own_positions(row) if row.tree is None else row.tree.positions_U


def of_routers(values: Tensor) -> Tensor:
    """The part of the values of this rank's computed tokens that its routers see: tp ranks share them out equally."""
    group = parallel_state.get_tensor_model_parallel_group()
    return values.chunk(group.size())[group.rank()]


def whole_row(own_T: Tensor, row: PackedRow) -> Tensor:
    """A whole row's values, [T], from this rank's tokens, which keep their gradient. Collective over the cp group."""
    group = parallel_state.get_context_parallel_group()
    parts = [torch.empty_like(own_T) for _ in range(group.size())]
    dist.all_gather(parts, own_T.detach().contiguous(), group=group)
    parts[group.rank()] = own_T
    return join(parts, row.cu_seqlens)


def packed_params(row: PackedRow, device: torch.device) -> PackedSeqParams:
    """Row sequences for Megatron's layers. Padding is tokens that no other sees: bounds with and without it agree."""
    if row.tree is not None:
        further = packed_arguments(len(row.tree.positions_U))
        return tree_params(row.tree, row.position_ids_T, device, **further)
    cu_seqlens = row.cu_seqlens.to(device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=row.max_seqlen,
        max_seqlen_kv=row.max_seqlen,
        **packed_arguments(len(row.token_ids_T)),
    )


def check_equal_counts(num_rows: int) -> None:
    """Raises RuntimeError if ranks hold unequal numbers of rows, as pipelines would hang. Collective over all ranks."""
    counts = torch.tensor([num_rows, -num_rows])
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    if counts[0] != -counts[1]:
        raise RuntimeError(
            f"data-parallel ranks hold between {-counts[1]} and {counts[0]} packed rows; they must hold the same number"
        )


def global_batch_size(rows: list[PackedRow]) -> BatchSize:
    """Global batch size from this rank's rows, which get the tokens of their rollouts. Collective over the dp group."""
    group = parallel_state.get_data_parallel_group()
    lone = sum(row.num_valid_sequences for row in rows if row.rollouts is None)
    sizes = [
        (
            row.num_valid_tokens,
            row.num_valid_sequences,
            int(row.positive_mask_T.sum()),
            sum(row.lengths),
            len(row.lengths),
            0,
        )
        for row in rows
    ]
    counts = torch.tensor([*sizes, (0, 0, 0, 0, 0, lone)], dtype=torch.int64).sum(dim=0)
    dist.all_reduce(counts, group=group)
    # The sequences of a rollout may lie on several ranks. A rollout has the index of its first sequence; a teacher has
    # some of them only.
    num_indices = torch.tensor(1 + max((index for row in rows for index in row.rollouts or ()), default=-1))
    dist.all_reduce(num_indices, op=dist.ReduceOp.MAX, group=group)
    tokens_R, own = torch.zeros(int(num_indices)), [row.valid_tokens_S for row in rows]
    for row, tokens_S in zip(rows, own, strict=True):
        if row.rollouts:
            tokens_R.index_add_(0, torch.tensor(row.rollouts), tokens_S[: len(row.rollouts)])
    dist.all_reduce(tokens_R, group=group)
    for row, tokens_S in zip(rows, own, strict=True):
        if row.rollouts:
            tokens_S[: len(row.rollouts)] = tokens_R[row.rollouts]
        row.rollout_tokens_S = tokens_S
    *others, num_lone = counts.tolist()
    return BatchSize(*others, num_valid_rollouts=num_lone + int((tokens_R > 0).sum()))


def finish_batches(
    batches: list[RankBatch],
    grpo: GrpoConfig,
    loss: LossConfig | None,
    gae: GaeConfig | None = None,
    teaching: OnPolicyDistillationConfig | None = None,
) -> None:
    """Finishes all batches of a step: sequences masked, advantages by token. Collective over all ranks.

    `loss` is None if nothing is learned from rewards. With `gae`, advantages come from the rows' values, and finished
    rows also have returns. With `teaching`, rows have teacher logprobs, and advantages are those of arXiv:2601.02780:
    log(teacher / policy), and a share of the reward's advantages.
    """

    def add_over_ranks(value: Tensor) -> Tensor:
        dist.all_reduce(value, group=parallel_state.get_data_parallel_group())
        return value

    rows = [batch.rows for batch in batches]
    metrics: list[dict[str, float]] = [{} for _ in batches]
    if parallel_state.is_pipeline_last_stage():
        if all(row.old_logprobs_T is not None for of_batch in rows for row in of_batch):
            rows, metrics = map(
                list,
                zip(*(_without_errors(of_batch, grpo.seq_logprob_error_threshold) for of_batch in rows), strict=True),
            )
        step = [row for of_batch in rows for row in of_batch]
        penalties = None
        if loss is not None and loss.use_kl_in_reward:
            penalties = [
                kl_penalty(_on_host(row.old_logprobs_T), _on_host(row.reference_logprobs_T), row.loss_mask_T, loss)
                for row in step
            ]
        starts = [row.advantages_T for row in step]
        if teaching is not None:
            starts, penalties = (
                [teaching.reward_weight * advantages_T for advantages_T in starts],
                [-_gap(row) for row in step],
            )
        if gae is not None:
            starts, returns = gae_of_rows(
                [_valued(row, kl_T) for row, kl_T in zip(step, penalties or [None] * len(step), strict=True)],
                gae,
                add_over_ranks,
            )
            if any(
                not returns_T[row.loss_mask_T > 0].isfinite().all()
                for row, returns_T in zip(step, returns, strict=True)
            ):
                raise RuntimeError(
                    f"some of the critic's values of the step are {NOT_FINITE}, and no returns can be made of them"
                )
            targets = iter(
                [torch.where(row.loss_mask_T > 0, part, torch.nan) for row, part in zip(step, returns, strict=True)]
            )
            rows, penalties = [[replace(row, returns_T=next(targets)) for row in of_batch] for of_batch in rows], None
        advantages = iter(
            token_advantages(
                starts,
                [row.fixed_advantages_T for row in step],
                [row.loss_mask_T for row in step],
                penalties,
                grpo,
                add_over_ranks,
            )
        )
        rows = [[replace(row, advantages_T=next(advantages)) for row in of_batch] for of_batch in rows]
        metrics = [
            measured | _advantage_metrics(of_batch, teaching is not None)
            for measured, of_batch in zip(metrics, rows, strict=True)
        ]
    shared = [
        (global_batch_size(of_batch), {f"train/{name}": value for name, value in measured.items()})
        for of_batch, measured in zip(rows, metrics, strict=True)
    ]
    share_from_last_stage(shared)
    for batch, of_batch, (size, measured) in zip(batches, rows, shared, strict=True):
        batch.rows, batch.size, batch.metrics, batch.is_finished = of_batch, size, measured, True


def _valued(row: PackedRow, kl_T: Tensor | None) -> ValuedRow:
    assert row.values_T is not None, "the critic's values come before the advantages"
    return ValuedRow(row.values_T, row.sequence_rewards, row.loss_mask_T, row.cu_seqlens, kl_T)


def answers_for_rows() -> bool:
    """True if this rank reports the rows of its dp rank: one that has what the last pipeline stage computes."""
    is_first = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0
    return is_first and parallel_state.is_pipeline_last_stage()


def sequences_of(batches: list[list[tuple[PackedRow, Tensor | None]]]) -> list[dict[int, np.ndarray]]:
    """Maps each batch to its sequences' values, if its rows have any; empty on a rank that does not report rows."""
    if not answers_for_rows():
        return [{} for _ in batches]
    return [
        {
            index: part
            for row, values_T in rows
            if values_T is not None
            for index, part in by_sequence(row, values_T).items()
        }
        for rows in batches
    ]


def share_from_last_stage(values: list) -> None:
    """Replaces the entries of the list by those of the last pipeline stage. Collective over all ranks."""
    dist.broadcast_object_list(values, src=dist.get_world_size() - 1)


def combine(row_metrics: list[dict[str, Tensor]], group: dist.ProcessGroup) -> dict[str, float]:
    """Sums, or by `extreme_of` extremes, of scalars over all rows of all ranks of a group. Collective over it."""
    metrics: dict[str, float] = {}
    names = sorted(row_metrics[0])
    values = torch.stack([torch.stack([row[name].double() for name in names]) for row in row_metrics])
    reductions = {
        None: (torch.sum, dist.ReduceOp.SUM),
        "min": (torch.amin, dist.ReduceOp.MIN),
        "max": (torch.amax, dist.ReduceOp.MAX),
    }
    for extreme, (reduce, op) in reductions.items():
        kind = [name for name in names if extreme_of(name) == extreme]
        part = reduce(values[:, [names.index(name) for name in kind]], dim=0)
        dist.all_reduce(part, op=op, group=group)
        metrics |= dict(zip(kind, part.tolist(), strict=True))
    return metrics


def _without_errors(rows: list[PackedRow], threshold: float | None) -> tuple[list[PackedRow], dict[str, float]]:
    """Rows without the sequences whose old and generator logprobs are too far apart, and metrics of these errors."""
    kept_rows, errors, is_kept, rewards = [], [], [], []
    for row in rows:
        error_S = sequence_errors(
            _on_host(row.old_logprobs_T), row.generator_logprobs_T, row.loss_mask_T, row.cu_seqlens
        )
        # Masked sequences have NaN, which is not above the threshold.
        is_kept_S = ~(error_S > threshold) if threshold is not None else torch.ones_like(error_S, dtype=torch.bool)
        kept_rows.append(row.masked(is_kept_S))
        is_counted_S = ~error_S.isnan()
        errors.append(error_S[is_counted_S])
        is_kept.append(is_kept_S[is_counted_S])
        rewards.append(row.sequence_rewards[is_counted_S])
    parts = error_metrics(torch.cat(errors), torch.cat(is_kept), torch.cat(rewards))
    return kept_rows, finish_error_metrics(combine([parts], parallel_state.get_data_parallel_group()))


def _gap(row: PackedRow) -> Tensor:
    """The teacher's logprobs minus the policy's, [T]; 0 in a row without sequences."""
    said, mask_T = row.teacher, row.loss_mask_T
    if said is None:
        return torch.zeros_like(mask_T)
    return teacher_gap(said.scores_TK[:, 0], _on_host(row.old_logprobs_T), mask_T)


def _advantage_metrics(rows: list[PackedRow], has_teachers: bool) -> dict[str, float]:
    values = torch.cat([row.advantages_T[row.loss_mask_T > 0] for row in rows])
    parts = {
        "advantages/mean": values.sum(),
        "num_tokens": torch.tensor(float(len(values))),
        **extremes("advantages/{}", values),
    }
    if has_teachers:
        parts["teacher_gap/mean"] = torch.cat([_gap(row) for row in rows]).sum()
    totals = combine([parts], parallel_state.get_data_parallel_group())
    count = totals.pop("num_tokens")
    return {
        name: value / (count if name.endswith("/mean") else 1.0) if count else 0.0 for name, value in totals.items()
    }


def _on_host(logprobs_T: Tensor | None) -> Tensor:
    assert logprobs_T is not None
    return logprobs_T.cpu()
