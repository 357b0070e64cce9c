"""The objective of each algorithm: the losses of `mrl.algo`, computed from what the model returns for a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from mrl.algo.losses import LOSS, MAX_METRICS, MIN_METRICS, Denominators, LossRow, policy_loss
from mrl.algo.ratios import Segments
from mrl.algo.supervised import bradley_terry_loss, dpo_loss, nll_loss, perplexity
from mrl.config.schema.algo import DpoConfig, LossConfig
from mrl.config.schema.run import RunConfig
from mrl.policy.batch import BatchSize, TrainRow, own_positions, whole_row
from mrl.policy.logprobs import TokenDistribution
from mrl.policy.output import token_rewards, token_scores


@dataclass(frozen=True)
class Objective:
    """What a train step minimises."""

    row_loss: Callable[[Tensor, TrainRow, DistributedDataParallel], tuple[Tensor, dict[str, Tensor]]]
    """On the last pipeline stage, the loss of a row (with gradient by this rank's tokens) and its share of the metrics, from what the model
    returned for these tokens. The gradients of all rows of all ranks add up to the batch's, and so do the metrics."""
    finish: Callable[[dict[str, float]], dict[str, float]] = dict
    """Metrics of the global batch from the sums (or extremes) over all rows."""


def objective_of(config: RunConfig, distribution: TokenDistribution, size: BatchSize) -> Objective:
    """The objective of the configured algorithm, over a global batch of this size."""
    match config.algorithm:
        case "grpo":
            return _grpo_objective(config.loss_fn, distribution, size)
        case "sft":
            return _sft_objective(distribution, size)
        case "dpo":
            return _dpo_objective(config.dpo, distribution, size)
        case "rm":
            return _reward_model_objective(size)


def _grpo_objective(config: LossConfig, distribution: TokenDistribution, size: BatchSize) -> Objective:
    """The policy loss. Rows carry old logprobs unless the config does without them, and reference logprobs where there is a KL term."""
    counts = Denominators(size.num_valid_tokens, size.num_valid_sequences, size.num_positive_tokens)

    def row_loss(output: Tensor, item: TrainRow, model: DistributedDataParallel) -> tuple[Tensor, dict[str, Tensor]]:
        row, device = item.row, output.device
        scores = token_scores(model, output, row, distribution)
        # Losses of sequences need whole ones; the gradient is by the tokens of this rank.
        loss, metrics = policy_loss(
            whole_row(scores.logprobs_T, row),
            LossRow(
                generator_logprobs_T=row.generator_logprobs_T.to(device),
                old_logprobs_T=item.old_logprobs_T,
                reference_logprobs_T=item.reference_logprobs_T,
                advantages_T=row.advantages_T.to(device),
                loss_mask_T=row.loss_mask_T.to(device),
                positive_mask_T=row.positive_mask_T.to(device),
                cu_seqlens=row.cu_seqlens.to(device),
            ),
            config,
            counts,
            untruncated_logprobs_T=whole_row(scores.untruncated_logprobs_T, row),
            entropy_T=whole_row(scores.entropy_T, row),
        )
        return loss, _shared_metrics(metrics)

    return Objective(row_loss)


def _sft_objective(distribution: TokenDistribution, size: BatchSize) -> Objective:
    """The mean negative log-likelihood of the tokens that are learned."""

    def row_loss(output: Tensor, item: TrainRow, model: DistributedDataParallel) -> tuple[Tensor, dict[str, Tensor]]:
        row, local = item.row, own_positions(item.row)
        scores = token_scores(model, output, row, distribution)
        return nll_loss(scores.logprobs_T, (row.loss_mask_T[local] / max(size.num_valid_tokens, 1)).to(output.device))

    return Objective(row_loss, lambda sums: {**sums, "perplexity": perplexity(sums[LOSS])})


def _dpo_objective(config: DpoConfig, distribution: TokenDistribution, size: BatchSize) -> Objective:
    """Direct preference optimisation. Rows carry reference logprobs, and hold pairs: each preferred answer before the other."""

    def row_loss(output: Tensor, item: TrainRow, model: DistributedDataParallel) -> tuple[Tensor, dict[str, Tensor]]:
        row, device = item.row, output.device
        assert item.reference_logprobs_T is not None
        scores = token_scores(model, output, row, distribution)
        logprobs_T = whole_row(scores.logprobs_T, row)
        answers = Segments.of(row.cu_seqlens.to(device), row.loss_mask_T.to(device))
        compared = answers.mean if config.preference_average_log_probs else answers.sum
        learned = answers.mean if config.sft_average_log_probs else answers.sum
        # The padding at the end of a row is a sequence of its own.
        log_ratios_2B = compared(logprobs_T - item.reference_logprobs_T)[: len(row.lengths)]
        logprobs_2B = learned(logprobs_T)[: len(row.lengths)]
        loss, metrics = dpo_loss(log_ratios_2B, logprobs_2B[0::2], num_pairs=size.num_valid_sequences / 2, config=config)
        return loss, _shared_metrics(metrics)

    return Objective(row_loss)


def _reward_model_objective(size: BatchSize) -> Objective:
    """A reward at the end of each answer, higher for the preferred one. Rows hold pairs, the model has a reward head."""

    def row_loss(output: Tensor, item: TrainRow, model: DistributedDataParallel) -> tuple[Tensor, dict[str, Tensor]]:
        row = item.row
        rewards_T = whole_row(token_rewards(model, output), row)
        last_2B = row.cu_seqlens[: len(row.lengths)].long() + torch.tensor(row.lengths, dtype=torch.int64) - 1
        rewards_2B = rewards_T[last_2B.to(rewards_T.device)]
        loss, metrics = bradley_terry_loss(rewards_2B[0::2], rewards_2B[1::2], num_pairs=size.num_valid_sequences / 2)
        return loss, _shared_metrics(metrics)

    return Objective(row_loss)


def _shared_metrics(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of metrics that each rank of a context-parallel group computes: ranks add up all of them but extremes."""
    cp_size = parallel_state.get_context_parallel_world_size()
    return {name: value if name in MIN_METRICS + MAX_METRICS else value / cp_size for name, value in metrics.items()}
