# SPDX-License-Identifier: Apache-2.0
"""Logprob passes and the train step of one rank, through Megatron's own pipeline schedules.

A packed row is a microbatch. Every function here is collective over all ranks of the policy: all call it, in the same
order, with the same number of rows. Ranks of a context-parallel group get the same whole rows, compute their own
tokens, and return results of whole rows. With a `replay`, routers follow the routes of rows that have them. T packed
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mrl.algo.balance import balance_metrics
from mrl.algo.losses import LOSS, BatchSize
from mrl.config.schema.megatron import MegatronConfig
from mrl.data.packing import PackedRow, split_teacher
from mrl.policy.batch import (
    answers_for_rows,
    combine,
    computed_positions,
    packed_params,
    share_from_last_stage,
    whole_row,
)
from mrl.policy.distillation import top_logits
from mrl.policy.logprobs import TokenDistribution
from mrl.policy.moe import RouterReplay, row_tokens, show_row, take_routing, update_expert_biases
from mrl.policy.mtp import mtp_parameters
from mrl.policy.objectives import Objective
from mrl.policy.optimizer import clip_apart
from mrl.policy.output import output_columns, token_rewards, token_scores
from mrl.types import NOT_FINITE, TeacherTokens


@torch.no_grad()
def compute_logprobs(
    chunks: list[DistributedDataParallel],
    rows: list[PackedRow],
    distribution: TokenDistribution,
    replay: RouterReplay | None = None,
) -> list[Tensor]:
    """Log-probability of every label, one float32 [T] per row; an empty list on all but the last pipeline stage."""

    def logprobs_of(output: Tensor, row: PackedRow, model: DistributedDataParallel) -> Tensor:
        return whole_row(token_scores(model, output, row, distribution).logprobs_T, row)

    return _forward_only(chunks, rows, logprobs_of, replay)


@torch.no_grad()
def compute_values(chunks: list[DistributedDataParallel], rows: list[PackedRow]) -> list[Tensor]:
    """The critic's value at every token, float32 [T] per row, on the host; empty on all but the last pipeline stage."""

    def values_of(output: Tensor, row: PackedRow, model: DistributedDataParallel) -> Tensor:
        return whole_row(token_rewards(model, output), row).cpu()

    return _forward_only(chunks, rows, values_of)


@torch.no_grad()
def compute_top_logits(
    chunks: list[DistributedDataParallel], rows: list[PackedRow], distribution: TokenDistribution, k: int
) -> dict[int, TeacherTokens]:
    """The k likeliest tokens at each generated token, by sequence index, on the row's reporting rank; else empty."""

    def top_of(output: Tensor, row: PackedRow, model: DistributedDataParallel) -> dict[int, TeacherTokens]:
        top = top_logits(output_columns(model, output, distribution), k)
        logits_TK, tokens_TK = (whole_row(values, row) for values in top)
        return split_teacher(row, logits_TK, tokens_TK) if answers_for_rows() else {}

    found = _forward_only(chunks, rows, top_of)
    return {index: teacher for of_row in found for index, teacher in of_row.items()}


def compute_drawn_logprobs(
    chunks: list[DistributedDataParallel], rows: list[PackedRow], distribution: TokenDistribution
) -> dict[int, TeacherTokens]:
    """The logprob of each generated token, by sequence index, on the rank that reports the row; empty on others."""
    logprobs = compute_logprobs(chunks, rows, distribution)
    if not answers_for_rows():
        return {}
    found = [
        split_teacher(row, logprobs_T[:, None], row.labels_T[:, None])
        for row, logprobs_T in zip(rows, logprobs, strict=True)
    ]
    return {index: teacher for of_row in found for index, teacher in of_row.items()}


def train_step(
    chunks: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    rows: list[PackedRow],
    *,
    size: BatchSize,
    objective: Objective,
    megatron: MegatronConfig,
    replay: RouterReplay | None = None,
    skips: bool = False,
) -> dict[str, float]:
    """One optimizer step over the global batch; returns its metrics, the same floats on every rank.

    With `skips`, one whose loss or gradient is not finite changes nothing, and `train/num_skipped_updates` is 1.
    """
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    row_metrics = forward_backward(chunks, rows, size=size, objective=objective, replay=replay)
    routing = take_routing(chunks, loss_type=megatron.moe_router_load_balancing_type)
    if megatron.empty_unused_memory_level >= 1:
        torch.cuda.empty_cache()
    metrics = objective.finish(_global_metrics(row_metrics))
    optimizer.prepare_grads()
    norms = {"grad_norm": float(optimizer.get_grad_norm())}
    if objective.trains_mtp_apart:
        norms["mtp_grad_norm"] = clip_apart(mtp_parameters(chunks), optimizer, norms["grad_norm"])
    is_bad = torch.tensor(float(not all(map(math.isfinite, (metrics[LOSS], *norms.values())))))
    dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
    if is_bad and not skips:
        raise RuntimeError(
            f"the train step gave loss {metrics[LOSS]} and gradient norms {norms}: {NOT_FINITE}; no parameter was "
            "changed"
        )
    lr = max(group["lr"] for group in optimizer.param_groups)
    if not is_bad:
        # Clips the gradients; preparing them again changes nothing.
        is_updated, _, _ = optimizer.step()
        assert is_updated
    if megatron.empty_unused_memory_level >= 2:
        torch.cuda.empty_cache()
    if not is_bad:
        update_expert_biases(chunks, routing, rate=megatron.moe_router_bias_update_rate)
    if megatron.track_moe_metrics:
        metrics |= balance_metrics(routing, per_layer=megatron.moe_per_layer_logging)
    if skips:
        metrics["num_skipped_updates"] = float(is_bad)
    metrics |= {**norms, "lr": lr, "num_valid_tokens": float(size.num_valid_tokens)}
    return {f"train/{name}": value for name, value in metrics.items()}


@torch.no_grad()
def evaluate(chunks: list[DistributedDataParallel], rows: list[PackedRow], objective: Objective) -> dict[str, float]:
    """Metrics of the objective over the global batch, the same floats on every rank; trains nothing."""
    with objective.around(chunks):
        row_metrics = _forward_only(chunks, rows, lambda *row: objective.row_loss(*row)[1])
    return objective.finish(_global_metrics(row_metrics))


def forward_backward(
    chunks: list[DistributedDataParallel],
    rows: list[PackedRow],
    *,
    size: BatchSize,
    objective: Objective,
    replay: RouterReplay | None = None,
) -> list[dict[str, Tensor]]:
    """Adds the objective's gradients to the chunks' buffers; returns the rows' metrics, on the last pipeline stage."""

    def forward_step(
        iterator: Iterator[PackedRow], model: DistributedDataParallel
    ) -> tuple[Tensor, Callable[..., object]]:
        row, device = next(iterator), next(model.parameters()).device
        tokens = row_tokens(row, size, device)
        show_row(model, tokens)
        output = _forward(model, row, replay)
        if output.requires_grad:
            # Tells routers the row again, first thing in its backward pass: other rows may have gone forward since.
            output.register_hook(lambda _: show_row(model, tokens))

        def loss_of(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            loss, metrics = objective.row_loss(output, row, model)
            # Megatron would divide gradients by this count; `model.sum_gradients` drops it.
            return loss, torch.ones((), dtype=torch.int, device=output.device), metrics

        return output, loss_of

    with objective.around(chunks):
        return _run_schedule(forward_step, rows, chunks, forward_only=False)


def _forward_only(
    chunks: list[DistributedDataParallel],
    rows: list[PackedRow],
    result_of: Callable[[Tensor, PackedRow, DistributedDataParallel], object],
    replay: RouterReplay | None = None,
) -> list:
    """Applies `result_of` to each row's output, on the last pipeline stage."""

    def forward_step(
        iterator: Iterator[PackedRow], model: DistributedDataParallel
    ) -> tuple[Tensor, Callable[..., object]]:
        row = next(iterator)
        return _forward(model, row, replay), lambda output, non_loss_data: result_of(output, row, model)

    return _run_schedule(forward_step, rows, chunks, forward_only=True)


def _forward(model: DistributedDataParallel, row: PackedRow, replay: RouterReplay | None = None) -> Tensor:
    """Runs the model on this rank's tokens: its last chunk returns input of `token_scores`, any other hidden states."""
    device = next(model.parameters()).device
    local = computed_positions(row)
    # The logprob computation makes its own float32 copies of the logits, in parts.
    keep_dtype = {"fp32_output": False} if model.config.bf16 else {}
    if replay is not None:
        replay.enter(row)
    output = model(
        input_ids=row.token_ids_T[local][None].to(device),
        position_ids=row.position_ids_T[local][None].to(device),
        attention_mask=None,
        packed_seq_params=packed_params(row, device),
        **keep_dtype,
    )
    if replay is not None:
        replay.enter_again_in_backward(output)
    return output


def _run_schedule(
    forward_step: Callable[..., object], rows: list, chunks: list[DistributedDataParallel], *, forward_only: bool
) -> list:
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(rows) for _ in chunks],
        model=chunks,
        num_microbatches=len(rows),
        # Unused, as rows differ in length: variable_seq_lengths makes stages send the shape first.
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _global_metrics(row_metrics: list[dict[str, Tensor]]) -> dict[str, float]:
    """Combines the metrics of all rows over dp and cp on the last stage, and sends them to all ranks."""
    metrics: dict[str, float] = {}
    if parallel_state.is_pipeline_last_stage():
        metrics = combine(row_metrics, parallel_state.get_data_parallel_group(with_context_parallel=True))
    shared = [metrics]
    share_from_last_stage(shared)
    return shared[0]
