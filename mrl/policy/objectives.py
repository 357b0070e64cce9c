# SPDX-License-Identifier: Apache-2.0
"""The objective of each algorithm, and of a critic: the loss of a row of a global batch, and its share of the metrics.

The loss of multi-token prediction can be added to any token objective. Shape suffixes: T tokens of a row, or of this
rank's part of it, K steps, D hidden size, V vocabulary columns of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model
from torch import Tensor

from mrl.algo.critic import finish_value_metrics, value_loss
from mrl.algo.distillation import distillation_loss, needs_vocabulary
from mrl.algo.losses import LOSS, BatchSize, Tokens, policy_loss
from mrl.algo.ratios import Segments
from mrl.algo.supervised import bradley_terry_loss, dpo_loss, nll_loss, perplexity
from mrl.config.schema.algo import DpoConfig, LossConfig
from mrl.config.schema.ppo import ValueLossConfig
from mrl.config.schema.run import RunConfig
from mrl.data.packing import PackedRow, PackedTeacher
from mrl.metrics import extreme_of
from mrl.policy.batch import RankBatch, own_positions, packed_params, whole_row
from mrl.policy.distillation import student_scores
from mrl.policy.logprobs import TokenDistribution, scores_of
from mrl.policy.mtp import embedding_on_last_stage, mtp_of
from mrl.policy.output import output_columns, token_rewards, token_scores

if TYPE_CHECKING:
    from mrl.config.schema.megatron import MegatronConfig


@dataclass(frozen=True)
class Objective:
    """Loss that a train step minimises."""

    row_loss: Callable[[Tensor, PackedRow, DistributedDataParallel], tuple[Tensor, dict[str, Tensor]]]
    """Loss of a row (with gradient by this rank's tokens) and its share of the metrics, from the model's output on the
    last pipeline stage. The gradients of all rows of all ranks add up to the batch's, and so do the metrics."""
    finish: Callable[[dict[str, float]], dict[str, float]] = dict
    """Metrics of the global batch from the sums (or extremes) over all rows."""
    around: Callable[[list[DistributedDataParallel]], AbstractContextManager[object]] = nullcontext
    """Prepares the chunks for `row_loss` inside the `with` block. Collective over all ranks."""
    trains_mtp_apart: bool = False
    """True if MTP layers have a gradient norm of their own, by which alone their gradients are clipped."""


def objective_of_values(config: RunConfig, _: TokenDistribution, batch: RankBatch) -> Objective:
    """The objective of a critic, over the global batch of these rows."""
    return _value_objective(config.value_loss_fn, batch.size)


def objective_of_policy(config: RunConfig, distribution: TokenDistribution, batch: RankBatch) -> Objective:
    """The objective of the configured algorithm, over the global batch of these rows. Collective over the dp group."""
    objective = _objective_of_policy(config, distribution, batch.size)
    if not config.mtp_steps:
        return objective
    return with_mtp(objective, batch.rows, config.policy.megatron_cfg, distribution.vocab_size)


def _objective_of_policy(config: RunConfig, distribution: TokenDistribution, size: BatchSize) -> Objective:
    match config.algorithm:
        case "grpo" | "ppo":
            return _grpo_objective(config.loss_fn, distribution, size)
        case "distillation":
            return _distillation_objective(config.loss_fn, distribution, size)
        case "sft":
            return _sft_objective(distribution, size)
        case "dpo":
            return _dpo_objective(config.dpo, distribution, size)
        case "rm":
            return _reward_model_objective(size)


def _grpo_objective(config: LossConfig, distribution: TokenDistribution, size: BatchSize) -> Objective:
    """The policy loss. Rows carry old logprobs unless the config needs none, and reference logprobs for a KL term."""

    def row_loss(output: Tensor, row: PackedRow, model: DistributedDataParallel) -> tuple[Tensor, dict[str, Tensor]]:
        device, scores = output.device, token_scores(model, output, row, distribution)
        entropy_T = whole_row(scores.entropy_T, row)
        row.entropy_T = entropy_T if row.entropy_T is None else row.entropy_T
        tokens = Tokens.of(
            whole_row(scores.logprobs_T, row),
            untruncated_logprobs_T=whole_row(scores.untruncated_logprobs_T, row),
            old_logprobs_T=None if config.force_on_policy_ratio else row.old_logprobs_T,
            generator_logprobs_T=row.generator_logprobs_T.to(device),
            reference_logprobs_T=None if row.reference_logprobs_T is None else row.reference_logprobs_T.to(device),
            advantages_T=row.advantages_T.to(device),
            loss_mask_T=row.loss_mask_T.to(device),
            positive_mask_T=row.positive_mask_T.to(device),
            cu_seqlens=row.cu_seqlens.to(device),
            rollout_tokens_S=None if row.rollout_tokens_S is None else row.rollout_tokens_S.to(device),
        )
        loss, metrics = policy_loss(tokens, config, size, entropy_T=entropy_T)
        return loss, _shared_metrics(metrics)

    return Objective(row_loss)


def _distillation_objective(config: LossConfig, distribution: TokenDistribution, size: BatchSize) -> Objective:
    """The divergence from the teacher at the tokens that the policy generated. Rows carry the teacher's scores."""

    def row_loss(output: Tensor, row: PackedRow, model: DistributedDataParallel) -> tuple[Tensor, dict[str, Tensor]]:
        local, device = own_positions(row), output.device
        columns = output_columns(model, output, distribution)
        teacher = row.teacher or PackedTeacher(
            torch.zeros(len(row.labels_T), 1), torch.zeros(len(row.labels_T), 1, dtype=torch.int64)
        )
        tokens_TK = teacher.token_ids_TK[local].to(device)
        student = student_scores(columns, tokens_TK, needs_vocabulary=needs_vocabulary(config))
        weights_T = (row.loss_mask_T[local] / max(size.num_valid_tokens, 1)).to(device)
        return distillation_loss(student, teacher.scores_TK[local].to(device), weights_T, config)

    return Objective(row_loss)


def _sft_objective(distribution: TokenDistribution, size: BatchSize) -> Objective:

    def row_loss(output: Tensor, row: PackedRow, model: DistributedDataParallel) -> tuple[Tensor, dict[str, Tensor]]:
        local = own_positions(row)
        scores = token_scores(model, output, row, distribution)
        return nll_loss(scores.logprobs_T, (row.loss_mask_T[local] / max(size.num_valid_tokens, 1)).to(output.device))

    return Objective(row_loss, lambda sums: {**sums, "perplexity": perplexity(sums[LOSS])})


def _dpo_objective(config: DpoConfig, distribution: TokenDistribution, size: BatchSize) -> Objective:
    """Direct preference optimisation. Rows carry reference logprobs, and hold pairs: the preferred answer first."""

    def row_loss(output: Tensor, row: PackedRow, model: DistributedDataParallel) -> tuple[Tensor, dict[str, Tensor]]:
        device = output.device
        assert row.reference_logprobs_T is not None
        scores = token_scores(model, output, row, distribution)
        logprobs_T = whole_row(scores.logprobs_T, row)
        answers = Segments.of(row.cu_seqlens.to(device), row.loss_mask_T.to(device))
        compared = answers.mean if config.preference_average_log_probs else answers.sum
        learned = answers.mean if config.sft_average_log_probs else answers.sum
        log_ratios_2B = compared(logprobs_T - row.reference_logprobs_T)[: len(row.lengths)]
        logprobs_2B = learned(logprobs_T)[: len(row.lengths)]
        loss, metrics = dpo_loss(
            log_ratios_2B, logprobs_2B[0::2], num_pairs=size.num_valid_sequences / 2, config=config
        )
        return loss, _shared_metrics(metrics)

    return Objective(row_loss)


def _reward_model_objective(size: BatchSize) -> Objective:
    """A reward at each answer's end, higher for the preferred one. Rows hold pairs, the model has a reward head."""

    def row_loss(output: Tensor, row: PackedRow, model: DistributedDataParallel) -> tuple[Tensor, dict[str, Tensor]]:
        rewards_T = whole_row(token_rewards(model, output), row)
        last_2B = row.cu_seqlens[: len(row.lengths)].long() + torch.tensor(row.lengths, dtype=torch.int64) - 1
        rewards_2B = rewards_T[last_2B.to(rewards_T.device)]
        loss, metrics = bradley_terry_loss(rewards_2B[0::2], rewards_2B[1::2], num_pairs=size.num_valid_sequences / 2)
        return loss, _shared_metrics(metrics)

    return Objective(row_loss)


def _value_objective(config: ValueLossConfig, size: BatchSize) -> Objective:
    """The critic's distance from the returns. Rows carry returns and values before updates; the model has a head."""

    def row_loss(output: Tensor, row: PackedRow, model: DistributedDataParallel) -> tuple[Tensor, dict[str, Tensor]]:
        assert row.values_T is not None and row.returns_T is not None
        loss, metrics = value_loss(
            whole_row(token_rewards(model, output), row),
            row.values_T.to(output.device),
            row.returns_T.to(output.device),
            row.loss_mask_T.to(output.device),
            config,
            num_tokens=size.num_valid_tokens,
        )
        return loss, _shared_metrics(metrics)

    return Objective(row_loss, finish_value_metrics)


def _shared_metrics(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of metrics that each rank of a context-parallel group computes: ranks sum all but extremes."""
    cp_size = parallel_state.get_context_parallel_world_size()
    return {name: value if extreme_of(name) else value / cp_size for name, value in metrics.items()}


def with_mtp(objective: Objective, rows: Sequence[PackedRow], config: MegatronConfig, vocab_size: int) -> Objective:
    """The objective plus the MTP layers' loss, and their metrics: `mtp_K_loss`, `mtp_K_acceptance_rate`, from step 1.

    At position t, step k of K predicts the label of position t + k from the hidden state of step k - 1 (of the model,
    for the first) and the embedding of token t + k. With factor f the loss is f / K * sum over k of the mean negative
    log-likelihood of the labels that count, at temperature 1 (arXiv:2412.19437, equations 24 and 25). Each mean is over
    the global batch, so that no packing or layout changes it.

    An acceptance rate is the share of labels that the step holds likeliest. `rows` are this rank's, of the global
    batch. Collective over the dp group.
    """
    counts = _label_counts(rows, config.mtp_num_layers)
    loss_of = partial(_row_loss, counts=counts, config=config, distribution=TokenDistribution(vocab_size))

    def row_loss(output: Tensor, row: PackedRow, model: DistributedDataParallel) -> tuple[Tensor, dict[str, Tensor]]:
        loss, metrics = objective.row_loss(output, row, model)
        mtp_loss, mtp_metrics = loss_of(output, row, model)
        return loss + mtp_loss, metrics | mtp_metrics

    around = partial(embedding_on_last_stage, with_gradient=not config.mtp_detach_heads)
    return replace(objective, row_loss=row_loss, around=around, trains_mtp_apart=config.mtp_detach_heads)


def _row_loss(
    output: Tensor,
    row: PackedRow,
    model: DistributedDataParallel,
    *,
    counts: list[int],
    config: MegatronConfig,
    distribution: TokenDistribution,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A row's loss by this rank's tokens, and its metrics share. `output`: the last stage's hidden states [1, T, D]."""
    bare, block, local, device = unwrap_model(model), mtp_of(model), own_positions(row), output.device
    assert block is not None
    embedding = bare.embedding if bare.pre_process else block.embedding[0]
    packed = packed_params(row, device)
    hidden_T1D = output.transpose(0, 1)
    if config.mtp_detach_heads:
        # Recomputation needs an input that requires a gradient.
        hidden_T1D = hidden_T1D.detach().requires_grad_(torch.is_grad_enabled())
    steps = range(1, config.mtp_num_layers + 1)
    # All at once: every copy to a GPU waits for it.
    tokens_KT, labels_KT, mask_KT = (
        torch.stack([shifted(values_T, row.cu_seqlens, ahead)[local] for ahead in steps]).to(device)
        for values_T in (row.token_ids_T, row.labels_T, row.loss_mask_T)
    )
    total, metrics = torch.zeros((), device=device), dict[str, Tensor]()
    for ahead, tokens_T, labels_T, mask_T in zip(steps, tokens_KT, labels_KT, mask_KT, strict=True):
        with torch.set_grad_enabled(torch.is_grad_enabled() and not config.mtp_detach_heads):
            # The second argument, positions, is None: hybrid models have none.
            embedded_T1D = embedding(tokens_T[None], tokens_T[None])
        # On the last stage a row's backward pass directly follows its forward pass, so routers still know the row in
        # recomputation.
        hidden_T1D = block.layers[(ahead - 1) % len(block.layers)](hidden_T1D, embedded_T1D, packed)
        columns = output_columns(model, hidden_T1D.transpose(0, 1), distribution)
        assert columns.weight_VD is not None, "the model returns hidden states where MTP layers are trained"
        scores = scores_of(
            replace(columns, weight_VD=columns.weight_VD.detach()) if config.mtp_detach_heads else columns, labels_T
        )
        weights_T = mask_T / max(counts[ahead - 1], 1)
        loss = -(scores.logprobs_T * weights_T).sum()
        total = total + loss * (config.mtp_loss_scaling_factor / config.mtp_num_layers)
        metrics[f"mtp_{ahead}_loss"] = loss.detach()
        metrics[f"mtp_{ahead}_acceptance_rate"] = (scores.is_likeliest_T * weights_T).sum()
    return total, metrics


def shifted(values_T: Tensor, cu_seqlens: Tensor, ahead: int) -> Tensor:
    """Shifts each sequence left by `ahead` positions; 0 where the sequence has ended."""
    ends_T = cu_seqlens[1:].long().repeat_interleave(cu_seqlens.diff())
    positions_T = torch.arange(len(values_T)) + ahead
    return torch.where(positions_T < ends_T, values_T[positions_T.clamp(max=len(values_T) - 1)], 0)


def _label_counts(rows: Sequence[PackedRow], num_steps: int) -> list[int]:
    """Counts the labels of each step over the global batch. Collective over the dp group."""
    counts = torch.zeros(num_steps, dtype=torch.int64)
    for row in rows:
        counts += torch.stack(
            [shifted(row.loss_mask_T, row.cu_seqlens, ahead).sum().long() for ahead in range(1, num_steps + 1)]
        )
    dist.all_reduce(counts, group=parallel_state.get_data_parallel_group())
    return counts.tolist()
