"""What each algorithm minimises, as the train step wants it: the losses of `mrl.algo` on what the model returns for a row."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from mrl.algo.losses import LOSS, finish_metrics, loss_weights, policy_loss
from mrl.algo.preferences import dpo_loss, sequence_sums
from mrl.algo.sft import nll_loss, perplexity
from mrl.config.schema import RunConfig
from mrl.config.schema_algo import LossConfig
from mrl.config.schema_supervised import DpoConfig
from mrl.data.packing import PackedRow
from mrl.policy.distribution import TokenDistribution
from mrl.policy.output import token_scores
from mrl.policy.step import BatchSize, Objective, TrainRow, own_positions


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
    """The policy loss. Rows carry old logprobs, and reference logprobs where there is a KL term."""

    def row_loss(output: Tensor, item: TrainRow, model: DistributedDataParallel) -> tuple[Tensor, dict[str, Tensor]]:
        row, device = item.row, output.device
        assert item.old_logprobs_T is not None
        local = own_positions(row)
        weights_T = loss_weights(
            row.loss_mask_T,
            row.cu_seqlens,
            token_level=config.token_level_loss,
            num_valid_tokens=size.num_valid_tokens,
            num_valid_sequences=size.num_valid_sequences,
        )
        scores = token_scores(model, output, row.labels_T[local].to(device), distribution)
        return policy_loss(
            scores.logprobs_T,
            item.old_logprobs_T[local.to(device)],
            None if item.reference_logprobs_T is None else item.reference_logprobs_T[local.to(device)],
            untruncated_logprobs_T=scores.untruncated_logprobs_T,
            entropy_T=scores.entropy_T,
            generator_logprobs_T=row.generator_logprobs_T[local].to(device),
            advantages_T=row.advantages_T[local].to(device),
            weights_T=weights_T[local].to(device),
            config=config,
        )

    def finish(sums: dict[str, float]) -> dict[str, float]:
        metrics = finish_metrics(sums, num_valid_tokens=size.num_valid_tokens)
        metrics["mean_abs_dlogp"] = metrics.pop("abs_dlogp")
        return metrics

    return Objective(row_loss, finish)


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
    """This rank's part of metrics that all ranks of a context-parallel group have computed alike: they are added up."""
    cp_size = parallel_state.get_context_parallel_world_size()
    return {name: value / cp_size for name, value in metrics.items()}
