"""The log-probability pass and the train step of one rank, through megatron's own pipeline schedules.

A packed row is a microbatch. Every function here is collective over all ranks of the policy: all call it, in the same order, with the
same number of rows. Ranks of a context-parallel group get the same whole rows, take their own tokens of each, and return what belongs to
whole rows. T packed tokens, V vocabulary columns of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mrl.algo.balance import balance_metrics
from mrl.algo.losses import LOSS, MAX_METRICS, MIN_METRICS
from mrl.config.schema.megatron import MegatronConfig
from mrl.data.packing import PackedRow
from mrl.policy.context import join, local_positions
from mrl.policy.distribution import TokenDistribution
from mrl.policy.moe import row_tokens, show_row, take_routing, update_expert_biases
from mrl.policy.output import token_scores
from mrl.policy.router_replay import RouterReplay


@dataclass(frozen=True)
class TrainRow:
    """A row with the log-probabilities that the loss compares with, if any. They are None on all but the last pipeline stage."""

    row: PackedRow
    old_logprobs_T: Tensor | None
    reference_logprobs_T: Tensor | None


@dataclass(frozen=True)
class Objective:
    """What a train step minimises, see `mrl.policy.objectives`."""

    row_loss: Callable[[Tensor, TrainRow, DistributedDataParallel], tuple[Tensor, dict[str, Tensor]]]
    """Loss of a row (with gradient by this rank's tokens) and its share of the metrics, from what the model returned for these tokens.
    On the last pipeline stage. The gradients of all rows of all ranks add up to that of the batch, and so do the metrics."""
    finish: Callable[[dict[str, float]], dict[str, float]]
    """Metrics of the global batch from the sums (or extremes) over all rows."""


def check_equal_counts(num_rows: int) -> None:
    """Raises RuntimeError if ranks hold different numbers of rows: the pipeline schedule would wait for ever."""
    counts = torch.tensor([num_rows, -num_rows])
    dist.all_reduce(counts, op=dist.ReduceOp.MAX)
    if counts[0] != -counts[1]:
        raise RuntimeError(f"data-parallel ranks hold between {-counts[1]} and {counts[0]} packed rows; they must hold the same number")


@dataclass(frozen=True)
class BatchSize:
    """What the losses of a global batch are divided by."""

    num_valid_tokens: int
    num_valid_sequences: int
    num_positive_tokens: int
    """Valid ones of sequences with a reward above 0."""
    num_tokens: int
    """Without padding."""
    num_sequences: int


def global_batch_size(rows: list[PackedRow]) -> BatchSize:
    """Tokens and sequences of the global batch, all and valid ones, from this rank's rows. Collective over the dp group."""
    sizes = [
        (row.num_valid_tokens, row.num_valid_sequences, int(row.positive_mask_T.sum()), sum(row.lengths), len(row.lengths)) for row in rows
    ]
    counts = torch.tensor(sizes, dtype=torch.int64).reshape(-1, 5).sum(dim=0)
    dist.all_reduce(counts, group=parallel_state.get_data_parallel_group())
    return BatchSize(*counts.tolist())


@torch.no_grad()
def compute_logprobs(
    chunks: list[DistributedDataParallel], rows: list[PackedRow], distribution: TokenDistribution, replay: RouterReplay | None = None
) -> list[Tensor]:
    """Log-probability of every label, one float32 [T] per row; an empty list on all but the last pipeline stage.

    With `replay`, the routers follow the rows that have routes.
    """

    def forward_step(iterator: Iterator[PackedRow], model: DistributedDataParallel) -> tuple[Tensor, Callable[..., Tensor]]:
        row = next(iterator)
        return _forward(model, row, replay), lambda output, non_loss_data: logprobs_of(output, row, model)

    def logprobs_of(output: Tensor, row: PackedRow, model: DistributedDataParallel) -> Tensor:
        local_T = token_scores(model, output, row.labels_T[own_positions(row)].to(output.device), distribution).logprobs_T
        return whole_row(local_T, row)

    return _run_schedule(forward_step, rows, chunks, forward_only=True)


def train_step(
    chunks: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    rows: list[TrainRow],
    *,
    size: BatchSize,
    objective: Objective,
    megatron: MegatronConfig,
    replay: RouterReplay | None = None,
) -> dict[str, float]:
    """One optimizer step over the global batch; returns its metrics, the same floats on every rank.

    With `replay`, the routers follow the rows that have routes.

    Raises:
        RuntimeError: loss or gradient is NaN or infinite. Weights, biases and optimizer state are as before, on all ranks.
    """
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    row_metrics = _forward_backward(chunks, rows, size, objective, replay)
    routing = take_routing(chunks, loss_type=megatron.moe_router_load_balancing_type)
    if megatron.empty_unused_memory_level >= 1:
        torch.cuda.empty_cache()
    metrics = objective.finish(_global_metrics(row_metrics))
    optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    _check_finite(metrics[LOSS], grad_norm)
    lr = max(group["lr"] for group in optimizer.param_groups)
    # Prepares the gradients once more, which changes nothing, and clips them.
    is_updated, _, _ = optimizer.step()
    assert is_updated
    if megatron.empty_unused_memory_level >= 2:
        torch.cuda.empty_cache()
    update_expert_biases(chunks, routing, rate=megatron.moe_router_bias_update_rate)
    if megatron.track_moe_metrics:
        metrics |= balance_metrics(routing, per_layer=megatron.moe_per_layer_logging)
    metrics |= {"grad_norm": grad_norm, "lr": lr, "num_valid_tokens": float(size.num_valid_tokens)}
    return {f"train/{name}": value for name, value in metrics.items()}


@torch.no_grad()
def evaluate(chunks: list[DistributedDataParallel], rows: list[TrainRow], objective: Objective) -> dict[str, float]:
    """Metrics of the objective over the global batch, the same floats on every rank; nothing is trained."""

    def forward_step(iterator: Iterator[TrainRow], model: DistributedDataParallel) -> tuple[Tensor, Callable[..., dict[str, Tensor]]]:
        item = next(iterator)
        return _forward(model, item.row), lambda output, non_loss_data: objective.row_loss(output, item, model)[1]

    return objective.finish(_global_metrics(_run_schedule(forward_step, rows, chunks, forward_only=True)))


def _forward_backward(
    chunks: list[DistributedDataParallel], rows: list[TrainRow], size: BatchSize, objective: Objective, replay: RouterReplay | None
) -> list[dict[str, Tensor]]:
    def forward_step(iterator: Iterator[TrainRow], model: DistributedDataParallel) -> tuple[Tensor, Callable[..., object]]:
        item = next(iterator)
        return _counted_forward(model, item.row, size, replay), lambda output: loss_of(output, item, model)

    def loss_of(output: Tensor, item: TrainRow, model: DistributedDataParallel) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss, metrics = objective.row_loss(output, item, model)
        # The count is what megatron would divide gradients by; `model.sum_gradients` drops it.
        return loss, torch.ones((), dtype=torch.int, device=output.device), metrics

    return _run_schedule(forward_step, rows, chunks, forward_only=False)


def _counted_forward(model: DistributedDataParallel, row: PackedRow, size: BatchSize, replay: RouterReplay | None) -> Tensor:
    """As `_forward`, with routers that know the row: now, and when its layers are computed again in its backward pass."""
    tokens = row_tokens(
        row, num_batch_tokens=size.num_tokens, num_batch_sequences=size.num_sequences, device=next(model.parameters()).device
    )
    show_row(model, tokens)
    output = _forward(model, row, replay)
    if output.requires_grad:
        # The first that happens in the row's backward pass, before which other rows may have gone forward.
        output.register_hook(lambda _: show_row(model, tokens))
    return output


def whole_row(own_T: Tensor, row: PackedRow) -> Tensor:
    """The values of a whole row, [T], from those of this rank's tokens, which keep their gradient.

    Collective over the context-parallel group.
    """
    group = parallel_state.get_context_parallel_group()
    parts = [torch.empty_like(own_T) for _ in range(group.size())]
    dist.all_gather(parts, own_T.detach().contiguous(), group=group)
    parts[group.rank()] = own_T
    return join(parts, row.cu_seqlens)


def own_positions(row: PackedRow) -> Tensor:
    """Positions in the row of this rank's tokens."""
    group = parallel_state.get_context_parallel_group()
    return local_positions(row.cu_seqlens, cp_size=group.size(), cp_rank=group.rank())


def _forward(model: DistributedDataParallel, row: PackedRow, replay: RouterReplay | None = None) -> Tensor:
    """What `token_scores` takes of this rank's tokens from the last chunk of the model, hidden states for the next one from any other."""
    device = next(model.parameters()).device
    cu_seqlens, local = row.cu_seqlens.to(device), own_positions(row)
    # Padding is computed as tokens that no other token sees, so the bounds with and without it are the same.
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=row.max_seqlen,
        max_seqlen_kv=row.max_seqlen,
    )
    # The log-probabilities make their own float32 copy of the logits, in parts.
    keep_dtype = {"fp32_output": False} if model.config.bf16 else {}
    if replay is not None:
        replay.enter(row)
    output = model(
        input_ids=row.token_ids_T[local][None].to(device),
        position_ids=row.position_ids_T[local][None].to(device),
        attention_mask=None,
        packed_seq_params=packed,
        **keep_dtype,
    )
    if replay is not None:
        replay.enter_again_in_backward(output)
    return output


def _run_schedule(forward_step: Callable[..., object], rows: list, chunks: list[DistributedDataParallel], *, forward_only: bool) -> list:
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        # Every chunk computes every row.
        data_iterator=[iter(rows) for _ in chunks],
        model=chunks,
        num_microbatches=len(rows),
        # Rows differ in length: the model's variable_seq_lengths makes stages tell each other the shape.
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def _global_metrics(row_metrics: list[dict[str, Tensor]]) -> dict[str, float]:
    """Metrics of all rows of all ranks: combined over dp and cp on the last stage, then handed to every rank."""
    metrics: dict[str, float] = {}
    if parallel_state.is_pipeline_last_stage():
        metrics = combine(row_metrics, parallel_state.get_data_parallel_group(with_context_parallel=True))
    # Ranks are ordered with the pipeline outermost, so the last rank is in the last stage.
    shared = [metrics]
    dist.broadcast_object_list(shared, src=dist.get_world_size() - 1)
    return shared[0]


def combine(row_metrics: list[dict[str, Tensor]], group: dist.ProcessGroup) -> dict[str, float]:
    """Sums, or by `MIN_METRICS` and `MAX_METRICS` extremes, of scalars over all rows of the ranks of a group, all of which call this."""
    metrics: dict[str, float] = {}
    names = sorted(row_metrics[0])
    values = torch.stack([torch.stack([row[name].double() for name in names]) for row in row_metrics])
    for reduce, op, chosen in _REDUCTIONS:
        kind = [name for name in names if chosen(name)]
        part = reduce(values[:, [names.index(name) for name in kind]])
        dist.all_reduce(part, op=op, group=group)
        metrics |= dict(zip(kind, part.tolist(), strict=True))
    return metrics


_REDUCTIONS = (
    (lambda values: values.sum(dim=0), dist.ReduceOp.SUM, lambda name: name not in MIN_METRICS + MAX_METRICS),
    (lambda values: values.amin(dim=0), dist.ReduceOp.MIN, lambda name: name in MIN_METRICS),
    (lambda values: values.amax(dim=0), dist.ReduceOp.MAX, lambda name: name in MAX_METRICS),
)


def _check_finite(loss: float, grad_norm: float) -> None:
    is_bad = torch.tensor(float(not math.isfinite(loss) or not math.isfinite(grad_norm)))
    dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
    if is_bad:
        raise RuntimeError(f"the train step gave loss {loss} and gradient norm {grad_norm}: not finite; no parameter was changed")
