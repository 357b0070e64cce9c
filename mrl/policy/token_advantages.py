"""`mrl.algo.token_advantages` on the rows of every rank: masks and advantages that need logprobs, and the counts of what remains."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mrl.algo.token_advantages import error_metrics, finish_error_metrics, kl_penalty, sequence_errors, token_advantages
from mrl.config.schema.algo import GrpoConfig, LossConfig
from mrl.policy.step import BatchSize, TrainRow, combine, global_batch_size


@dataclass(frozen=True)
class FinishedBatch:
    """A batch as the loss wants it."""

    rows: list[TrainRow]
    """Logprobs are known on the last pipeline stage alone; on the others rows are as they were."""
    size: BatchSize
    """What the loss's sums are divided by, the same on every rank."""
    metrics: dict[str, float]
    """`train/*`, the same on every rank."""


def finish_batches(batches: list[list[TrainRow]], grpo: GrpoConfig, loss: LossConfig) -> list[FinishedBatch]:
    """This rank's rows of all batches of a step, masked and with the advantages of their tokens. Collective over all ranks."""
    metrics: list[dict[str, float]] = [{} for _ in batches]
    if parallel_state.is_pipeline_last_stage():
        if all(item.old_logprobs_T is not None for rows in batches for item in rows):
            masked = [_without_errors(rows, grpo.seq_logprob_error_threshold) for rows in batches]
            batches, metrics = [rows for rows, _ in masked], [measured for _, measured in masked]
        finished = iter(_with_advantages([item for rows in batches for item in rows], grpo, loss))
        batches = [[next(finished) for _ in rows] for rows in batches]
        metrics = [measured | _advantage_metrics(rows) for measured, rows in zip(metrics, batches, strict=True)]
    # Ranks are ordered with the pipeline outermost, so the last rank is in the last stage.
    shared = [
        (global_batch_size([item.row for item in rows]), {f"train/{name}": value for name, value in measured.items()})
        for rows, measured in zip(batches, metrics, strict=True)
    ]
    dist.broadcast_object_list(shared, src=dist.get_world_size() - 1)
    return [FinishedBatch(rows, *numbers) for rows, numbers in zip(batches, shared, strict=True)]


def _without_errors(rows: list[TrainRow], threshold: float | None) -> tuple[list[TrainRow], dict[str, float]]:
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


def _with_advantages(rows: list[TrainRow], grpo: GrpoConfig, loss: LossConfig) -> list[TrainRow]:
    """`rows` are those of a step: what is normalised is normalised over all its updates."""
    kl_in_reward = None
    if loss.use_kl_in_reward:
        kl_in_reward = [
            kl_penalty(_on_host(item.old_logprobs_T), _on_host(item.reference_logprobs_T), item.row.loss_mask_T, loss) for item in rows
        ]
    advantages = token_advantages(
        [item.row.advantages_T for item in rows],
        [item.row.fixed_advantages_T for item in rows],
        [item.row.loss_mask_T for item in rows],
        kl_in_reward,
        grpo,
        _add_over_ranks,
    )
    return [replace(item, row=replace(item.row, advantages_T=advantages_T)) for item, advantages_T in zip(rows, advantages, strict=True)]


def _advantage_metrics(rows: list[TrainRow]) -> dict[str, float]:
    values = torch.cat([item.row.advantages_T[item.row.loss_mask_T > 0] for item in rows])
    infinity = torch.tensor([torch.inf])
    parts = {
        "advantages/mean": values.sum(),
        "num_tokens": torch.tensor(float(len(values))),
        "advantages/min": torch.cat([values, infinity]).min(),
        "advantages/max": torch.cat([values, -infinity]).max(),
    }
    totals = combine([parts], parallel_state.get_data_parallel_group())
    count = totals.pop("num_tokens")
    return {name: value / (count if name == "advantages/mean" else 1.0) if count else 0.0 for name, value in totals.items()}


def _add_over_ranks(value: Tensor) -> Tensor:
    dist.all_reduce(value, group=parallel_state.get_data_parallel_group())
    return value


def _on_host(logprobs_T: Tensor | None) -> Tensor:
    assert logprobs_T is not None
    return logprobs_T.cpu()
