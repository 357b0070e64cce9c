"""What each algorithm minimises, as the train step wants it: the losses of `mrl.algo` on what the model returns for a row."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from mrl.algo.losses import LOSS, MAX_METRICS, MIN_METRICS, Denominators, LossRow, policy_loss
from mrl.algo.preferences import dpo_loss, sequence_sums
from mrl.algo.sft import nll_loss, perplexity
from mrl.config.schema import RunConfig
from mrl.config.schema_algo import LossConfig
from mrl.config.schema_supervised import DpoConfig
from mrl.data.packing import PackedRow
from mrl.policy.distribution import TokenDistribution
from mrl.policy.output import token_scores
from mrl.policy.step import BatchSize, Objective, TrainRow, own_positions, whole_row


def objective_of(config: RunConfig, distribution: TokenDistribution, size: BatchSize) -> Objective:
    """That of the configured algorithm, over a global batch of this size."""
    match config.algorithm:
        case "grpo":
            return grpo_objective(config.loss_fn, distribution, size)
        case "sft":
            return sft_objective(distribution, size)
        case "dpo":
            return dpo_objective(config.dpo, distribution, size)


def grpo_objective(config: LossConfig, distribution: TokenDistribution, size: BatchSize) -> Objective:
    """The policy loss. Rows carry old logprobs unless the config does without them, and reference logprobs where there is a KL term."""
    counts = Denominators(size.num_valid_tokens, size.num_valid_sequences, size.num_positive_tokens)

    def row_loss(output: Tensor, item: TrainRow, model: DistributedDataParallel) -> tuple[Tensor, dict[str, Tensor]]:
        row, device = item.row, output.device
        scores = token_scores(model, output, row.labels_T[own_positions(row)].to(device), distribution)
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
            untruncated_logprobs_T=None if scores.untruncated_logprobs_T is None else whole_row(scores.untruncated_logprobs_T, row),
            entropy_T=None if scores.entropy_T is None else whole_row(scores.entropy_T, row),
        )
        return loss, shared_metrics(metrics)

    return Objective(row_loss, finish=lambda metrics: metrics)


def sft_objective(distribution: TokenDistribution, size: BatchSize) -> Objective:
    """The mean negative log-likelihood of the tokens that are learned."""

    def row_loss(output: Tensor, item: TrainRow, model: DistributedDataParallel) -> tuple[Tensor, dict[str, Tensor]]:
        row, local = item.row, own_positions(item.row)
        scores = token_scores(model, output, row.labels_T[local].to(output.device), distribution)
        return nll_loss(scores.logprobs_T, (row.loss_mask_T[local] / max(size.num_valid_tokens, 1)).to(output.device))

    return Objective(row_loss, lambda sums: {**sums, "perplexity": perplexity(sums[LOSS])})


def dpo_objective(config: DpoConfig, distribution: TokenDistribution, size: BatchSize) -> Objective:
    """Direct preference optimisation. Rows carry reference logprobs, and hold pairs: each preferred answer before the other."""

    def row_loss(output: Tensor, item: TrainRow, model: DistributedDataParallel) -> tuple[Tensor, dict[str, Tensor]]:
        row, local, device = item.row, own_positions(item.row), output.device
        assert item.reference_logprobs_T is not None
        logprobs_T = token_scores(model, output, row.labels_T[local].to(device), distribution).logprobs_T
        ratios_T = logprobs_T - item.reference_logprobs_T[local.to(device)]
        ratios_2B = answer_sums(ratios_T, row, local, is_mean=config.preference_average_log_probs)
        answers_2B = answer_sums(logprobs_T, row, local, is_mean=config.sft_average_log_probs)
        loss, metrics = dpo_loss(ratios_2B, answers_2B[0::2], num_pairs=size.num_valid_sequences / 2, config=config)
        return loss, shared_metrics(metrics)

    return Objective(row_loss, lambda sums: sums)


def answer_sums(values_T: Tensor, row: PackedRow, local: Tensor, *, is_mean: bool) -> Tensor:
    """Sum (or mean) of this rank's values over the learned tokens of each whole sequence of a row, in order, without the padding.

    Ranks of a context-parallel group have the same sums, with the gradient of their own tokens: what the ranks compute of them is the same
    loss, and their gradients add up to its gradient. Collective over that group.
    """
    lengths = row.cu_seqlens.diff().long()
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    counts = torch.zeros(len(lengths)).index_add(0, sequence_T, row.loss_mask_T) if is_mean else None
    device = values_T.device
    sums = sequence_sums(
        values_T,
        row.loss_mask_T[local].to(device),
        sequence_T[local].to(device),
        num_sequences=len(lengths),
        counts=None if counts is None else counts.to(device),
    )
    total = sums.detach().clone()
    dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
    return (sums + (total - sums.detach()))[: len(row.sequence_indices)]


def shared_metrics(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of metrics that all ranks of a context-parallel group have computed alike: they are added up, but for extremes."""
    cp_size = parallel_state.get_context_parallel_world_size()
    return {name: value if name in MIN_METRICS + MAX_METRICS else value / cp_size for name, value in metrics.items()}
