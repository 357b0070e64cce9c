# SPDX-License-Identifier: Apache-2.0
"""The objective of each algorithm, and of a critic: the loss of a row of a global batch, and its share of the metrics.

T packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from mrl.algo.critic import finish_value_metrics, value_loss
from mrl.algo.distillation import distillation_loss, needs_vocabulary
from mrl.algo.losses import LOSS, MAX_METRICS, MIN_METRICS, BatchSize, Tokens, policy_loss
from mrl.algo.ratios import Segments
from mrl.algo.supervised import bradley_terry_loss, dpo_loss, nll_loss, perplexity
from mrl.config.schema.algo import DpoConfig, LossConfig
from mrl.config.schema.ppo import ValueLossConfig
from mrl.config.schema.run import RunConfig
from mrl.data.packing import PackedRow, PackedTeacher
from mrl.phases import ModelName
from mrl.policy.batch import RankBatch, own_positions, whole_row
from mrl.policy.distillation import student_scores
from mrl.policy.logprobs import TokenDistribution
from mrl.policy.mtp_loss import with_mtp
from mrl.policy.output import output_columns, token_rewards, token_scores


@dataclass(frozen=True)
class Objective:
    """What a train step minimises."""

    row_loss: Callable[[Tensor, PackedRow, DistributedDataParallel], tuple[Tensor, dict[str, Tensor]]]
    """On the last pipeline stage, the loss of a row (with gradient by this rank's tokens) and its share of the metrics, from what the model
    returned for these tokens. The gradients of all rows of all ranks add up to the batch's, and so do the metrics."""
    finish: Callable[[dict[str, float]], dict[str, float]] = dict
    """Metrics of the global batch from the sums (or extremes) over all rows."""
    around: Callable[[list[DistributedDataParallel]], AbstractContextManager[object]] = nullcontext
    """Inside, `row_loss` has all that it needs of the chunks. Collective over all ranks."""
    trains_mtp_apart: bool = False
    """Whether MTP layers have a gradient norm of their own, by which alone their gradients are clipped."""


def objective_of(config: RunConfig, distribution: TokenDistribution, batch: RankBatch, model: ModelName = "policy") -> Objective:
    """The objective of a model in the configured algorithm, over the global batch of these rows. Collective over the dp group."""
    if model == "critic":
        return _value_objective(config.value_loss_fn, batch.size)
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
    """The policy loss. Rows carry old logprobs unless the config does without them, and reference logprobs where there is a KL term."""

    def row_loss(output: Tensor, row: PackedRow, model: DistributedDataParallel) -> tuple[Tensor, dict[str, Tensor]]:
        device, scores = output.device, token_scores(model, output, row, distribution)
        entropy_T = whole_row(scores.entropy_T, row)
        # Readers see the distributions of before the updates, also where rows are trained several times.
        row.entropy_T = entropy_T if row.entropy_T is None else row.entropy_T
        # Losses of sequences need whole ones; the gradient is by the tokens of this rank.
        tokens = Tokens.of(
            whole_row(scores.logprobs_T, row),
            untruncated_logprobs_T=whole_row(scores.untruncated_logprobs_T, row),
            old_logprobs_T=None if config.force_on_policy_ratio else row.old_logprobs_T,
            generator_logprobs_T=row.generator_logprobs_T.to(device),
            reference_logprobs_T=row.reference_logprobs_T,
            advantages_T=row.advantages_T.to(device),
            loss_mask_T=row.loss_mask_T.to(device),
            positive_mask_T=row.positive_mask_T.to(device),
            cu_seqlens=row.cu_seqlens.to(device),
        )
        loss, metrics = policy_loss(tokens, config, size, entropy_T=entropy_T)
        return loss, _shared_metrics(metrics)

    return Objective(row_loss)


def _distillation_objective(config: LossConfig, distribution: TokenDistribution, size: BatchSize) -> Objective:
    """The divergence from the teacher at the tokens that the policy generated. Rows carry what the teacher says of them."""

    def row_loss(output: Tensor, row: PackedRow, model: DistributedDataParallel) -> tuple[Tensor, dict[str, Tensor]]:
        local, device = own_positions(row), output.device
        columns = output_columns(model, output, distribution)
        # A row without sequences has no teacher; its tokens weigh nothing.
        teacher = row.teacher or PackedTeacher(torch.zeros(len(row.labels_T), 1), torch.zeros(len(row.labels_T), 1, dtype=torch.int64))
        tokens_TK = teacher.token_ids_TK[local].to(device)
        student = student_scores(columns, tokens_TK, needs_vocabulary=needs_vocabulary(config))
        weights_T = (row.loss_mask_T[local] / max(size.num_valid_tokens, 1)).to(device)
        return distillation_loss(student, teacher.scores_TK[local].to(device), weights_T, config)

    return Objective(row_loss)


def _sft_objective(distribution: TokenDistribution, size: BatchSize) -> Objective:
    """The mean negative log-likelihood of the tokens that are learned."""

    def row_loss(output: Tensor, row: PackedRow, model: DistributedDataParallel) -> tuple[Tensor, dict[str, Tensor]]:
        local = own_positions(row)
        scores = token_scores(model, output, row, distribution)
        return nll_loss(scores.logprobs_T, (row.loss_mask_T[local] / max(size.num_valid_tokens, 1)).to(output.device))

    return Objective(row_loss, lambda sums: {**sums, "perplexity": perplexity(sums[LOSS])})


def _dpo_objective(config: DpoConfig, distribution: TokenDistribution, size: BatchSize) -> Objective:
    """Direct preference optimisation. Rows carry reference logprobs, and hold pairs: each preferred answer before the other."""

    def row_loss(output: Tensor, row: PackedRow, model: DistributedDataParallel) -> tuple[Tensor, dict[str, Tensor]]:
        device = output.device
        assert row.reference_logprobs_T is not None
        scores = token_scores(model, output, row, distribution)
        logprobs_T = whole_row(scores.logprobs_T, row)
        answers = Segments.of(row.cu_seqlens.to(device), row.loss_mask_T.to(device))
        compared = answers.mean if config.preference_average_log_probs else answers.sum
        learned = answers.mean if config.sft_average_log_probs else answers.sum
        # The padding at the end of a row is a sequence of its own.
        log_ratios_2B = compared(logprobs_T - row.reference_logprobs_T)[: len(row.lengths)]
        logprobs_2B = learned(logprobs_T)[: len(row.lengths)]
        loss, metrics = dpo_loss(log_ratios_2B, logprobs_2B[0::2], num_pairs=size.num_valid_sequences / 2, config=config)
        return loss, _shared_metrics(metrics)

    return Objective(row_loss)


def _reward_model_objective(size: BatchSize) -> Objective:
    """A reward at the end of each answer, higher for the preferred one. Rows hold pairs, the model has a reward head."""

    def row_loss(output: Tensor, row: PackedRow, model: DistributedDataParallel) -> tuple[Tensor, dict[str, Tensor]]:
        rewards_T = whole_row(token_rewards(model, output), row)
        last_2B = row.cu_seqlens[: len(row.lengths)].long() + torch.tensor(row.lengths, dtype=torch.int64) - 1
        rewards_2B = rewards_T[last_2B.to(rewards_T.device)]
        loss, metrics = bradley_terry_loss(rewards_2B[0::2], rewards_2B[1::2], num_pairs=size.num_valid_sequences / 2)
        return loss, _shared_metrics(metrics)

    return Objective(row_loss)


def _value_objective(config: ValueLossConfig, size: BatchSize) -> Objective:
    """The critic's distance from the returns. Rows carry values of before the updates and returns; the model has a head."""

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
    """This rank's part of metrics that each rank of a context-parallel group computes: ranks add up all of them but extremes."""
    cp_size = parallel_state.get_context_parallel_world_size()
    return {name: value if name in MIN_METRICS + MAX_METRICS else value / cp_size for name, value in metrics.items()}
