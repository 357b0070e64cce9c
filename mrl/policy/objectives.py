"""What each algorithm minimises, as the train step wants it: the losses of `mrl.algo` on what the model returns for a row."""

from __future__ import annotations

from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from mrl.algo.losses import LOSS, finish_metrics, loss_weights, policy_loss
from mrl.algo.sft import nll_loss, perplexity
from mrl.config.schema import RunConfig
from mrl.config.schema_algo import LossConfig
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
