# SPDX-License-Identifier: Apache-2.0
"""The log-probability pass and the train step of one rank, through megatron's own pipeline schedules, and the objective of each algorithm.

A packed row is a microbatch. Every function here is collective over all ranks of the policy: all call it, in the same order, with the
same number of rows. Ranks of a context-parallel group get the same whole rows, take their own tokens of each, and return what belongs to
whole rows. With a `replay`, the routers follow the rows that have routes. T packed tokens.
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
from mrl.algo.critic import finish_value_metrics, value_loss
from mrl.algo.distillation import distillation_loss, needs_vocabulary
from mrl.algo.losses import LOSS, MAX_METRICS, MIN_METRICS, Denominators, LossRow, policy_loss
from mrl.algo.ratios import Segments
from mrl.algo.supervised import bradley_terry_loss, dpo_loss, nll_loss, perplexity
from mrl.config.schema.algo import DpoConfig, LossConfig
from mrl.config.schema.megatron import MegatronConfig
from mrl.config.schema.ppo import ValueLossConfig
from mrl.config.schema.run import RunConfig
from mrl.data.packing import PackedRow, PackedTeacher, split_teacher
from mrl.phases import ModelName
from mrl.policy.batch import BatchSize, TrainRow, answers_for_rows, combine, own_positions, share_from_last_stage, whole_row
from mrl.policy.distillation import student_scores, top_logits
from mrl.policy.logprobs import TokenDistribution
from mrl.policy.moe import RouterReplay, row_tokens, show_row, take_routing, update_expert_biases
from mrl.policy.output import output_columns, token_rewards, token_scores
from mrl.types import TeacherTokens


@torch.no_grad()
def compute_logprobs(
    chunks: list[DistributedDataParallel], rows: list[PackedRow], distribution: TokenDistribution, replay: RouterReplay | None = None
) -> list[Tensor]:
    """Log-probability of every label, one float32 [T] per row; an empty list on all but the last pipeline stage."""

    def logprobs_of(output: Tensor, item: TrainRow, model: DistributedDataParallel) -> Tensor:
        return whole_row(token_scores(model, output, item.row, distribution).logprobs_T, item.row)

    return _forward_only(chunks, list(map(TrainRow, rows)), logprobs_of, replay)


@torch.no_grad()
def compute_values(chunks: list[DistributedDataParallel], rows: list[PackedRow]) -> list[Tensor]:
    """The critic's value at every token, one float32 [T] per row, on the host; an empty list on all but the last pipeline stage."""

    def values_of(output: Tensor, item: TrainRow, model: DistributedDataParallel) -> Tensor:
        return whole_row(token_rewards(model, output), item.row).cpu()

    return _forward_only(chunks, list(map(TrainRow, rows)), values_of)


@torch.no_grad()
def compute_top_logits(
    chunks: list[DistributedDataParallel], rows: list[PackedRow], distribution: TokenDistribution, k: int
) -> dict[int, TeacherTokens]:
    """The k likeliest tokens at each generated token, by index of the sequence, on the rank that answers for the row; empty on others."""

    def top_of(output: Tensor, item: TrainRow, model: DistributedDataParallel) -> dict[int, TeacherTokens]:
        top = top_logits(output_columns(model, output, distribution), k)
        logits_TK, tokens_TK = (whole_row(values, item.row) for values in top)
        return split_teacher(item.row, logits_TK, tokens_TK) if answers_for_rows() else {}

    found = _forward_only(chunks, list(map(TrainRow, rows)), top_of)
    return {index: teacher for of_row in found for index, teacher in of_row.items()}


def compute_drawn_logprobs(
    chunks: list[DistributedDataParallel], rows: list[PackedRow], distribution: TokenDistribution
) -> dict[int, TeacherTokens]:
    """The logprob of each generated token, by index of the sequence, on the rank that answers for the row; empty on others."""
    logprobs = compute_logprobs(chunks, rows, distribution)
    if not answers_for_rows():
        return {}
    found = [split_teacher(row, logprobs_T[:, None], row.labels_T[:, None]) for row, logprobs_T in zip(rows, logprobs, strict=True)]
    return {index: teacher for of_row in found for index, teacher in of_row.items()}


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
    """One optimizer step over the global batch; returns its metrics, the same floats on every rank."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    row_metrics = forward_backward(chunks, rows, size=size, objective=objective, replay=replay)
    routing = take_routing(chunks, loss_type=megatron.moe_router_load_balancing_type)
    if megatron.empty_unused_memory_level >= 1:
        torch.cuda.empty_cache()
    metrics = objective.finish(_global_metrics(row_metrics))
    optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    is_bad = torch.tensor(float(not math.isfinite(metrics[LOSS]) or not math.isfinite(grad_norm)))
    dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
    if is_bad:
        raise RuntimeError(f"the train step gave loss {metrics[LOSS]} and gradient norm {grad_norm}: not finite; no parameter was changed")
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
    """Metrics of the objective over the global batch, the same floats on every rank; trains nothing."""
    return objective.finish(_global_metrics(_forward_only(chunks, rows, lambda *row: objective.row_loss(*row)[1])))


def forward_backward(
    chunks: list[DistributedDataParallel],
    rows: list[TrainRow],
    *,
    size: BatchSize,
    objective: Objective,
    replay: RouterReplay | None = None,
) -> list[dict[str, Tensor]]:
    """Adds the gradients of the objective to the chunks' buffers; returns the rows' shares of its metrics, on the last pipeline stage."""

    def forward_step(iterator: Iterator[TrainRow], model: DistributedDataParallel) -> tuple[Tensor, Callable[..., object]]:
        item, device = next(iterator), next(model.parameters()).device
        tokens = row_tokens(item.row, size, device)
        show_row(model, tokens)
        output = _forward(model, item.row, replay)
        if output.requires_grad:
            # Routers know the row again when its layers are recomputed: this hook comes first in the row's backward pass, before which
            # other rows may have gone forward.
            output.register_hook(lambda _: show_row(model, tokens))

        def loss_of(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            loss, metrics = objective.row_loss(output, item, model)
            # The count is what megatron would divide gradients by; `model.sum_gradients` drops it.
            return loss, torch.ones((), dtype=torch.int, device=output.device), metrics

        return output, loss_of

    return _run_schedule(forward_step, rows, chunks, forward_only=False)


def _forward_only(
    chunks: list[DistributedDataParallel],
    rows: list[TrainRow],
    result_of: Callable[[Tensor, TrainRow, DistributedDataParallel], object],
    replay: RouterReplay | None = None,
) -> list:
    """What `result_of` makes of each row's output, on the last pipeline stage."""

    def forward_step(iterator: Iterator[TrainRow], model: DistributedDataParallel) -> tuple[Tensor, Callable[..., object]]:
        item = next(iterator)
        return _forward(model, item.row, replay), lambda output, non_loss_data: result_of(output, item, model)

    return _run_schedule(forward_step, rows, chunks, forward_only=True)


def _forward(model: DistributedDataParallel, row: PackedRow, replay: RouterReplay | None = None) -> Tensor:
    """What the model returns for this rank's tokens: from its last chunk what `token_scores` takes, from any other hidden states."""
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
    """Metrics of all rows of all ranks, on every rank: the last stage combines them over dp and cp, and sends them to the others."""
    metrics: dict[str, float] = {}
    if parallel_state.is_pipeline_last_stage():
        metrics = combine(row_metrics, parallel_state.get_data_parallel_group(with_context_parallel=True))
    shared = [metrics]
    share_from_last_stage(shared)
    return shared[0]


@dataclass(frozen=True)
class Objective:
    """What a train step minimises."""

    row_loss: Callable[[Tensor, TrainRow, DistributedDataParallel], tuple[Tensor, dict[str, Tensor]]]
    """On the last pipeline stage, the loss of a row (with gradient by this rank's tokens) and its share of the metrics, from what the model
    returned for these tokens. The gradients of all rows of all ranks add up to the batch's, and so do the metrics."""
    finish: Callable[[dict[str, float]], dict[str, float]] = dict
    """Metrics of the global batch from the sums (or extremes) over all rows."""


def objective_of(config: RunConfig, distribution: TokenDistribution, size: BatchSize, model: ModelName = "policy") -> Objective:
    """The objective of a model in the configured algorithm, over a global batch of this size."""
    if model == "critic":
        return _value_objective(config.value_loss_fn, size)
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
    counts = Denominators(size.num_valid_tokens, size.num_valid_sequences, size.num_positive_tokens)

    def row_loss(output: Tensor, item: TrainRow, model: DistributedDataParallel) -> tuple[Tensor, dict[str, Tensor]]:
        row, device = item.row, output.device
        scores = token_scores(model, output, row, distribution)
        entropy_T = whole_row(scores.entropy_T, row)
        # Readers see the distributions of before the updates, also where rows are trained several times.
        item.entropy_T = entropy_T if item.entropy_T is None else item.entropy_T
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
            entropy_T=entropy_T,
        )
        return loss, _shared_metrics(metrics)

    return Objective(row_loss)


def _distillation_objective(config: LossConfig, distribution: TokenDistribution, size: BatchSize) -> Objective:
    """The divergence from the teacher at the tokens that the policy generated. Rows carry what the teacher says of them."""

    def row_loss(output: Tensor, item: TrainRow, model: DistributedDataParallel) -> tuple[Tensor, dict[str, Tensor]]:
        row, local, device = item.row, own_positions(item.row), output.device
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


def _value_objective(config: ValueLossConfig, size: BatchSize) -> Objective:
    """The critic's distance from the returns. Rows carry values of before the updates and returns; the model has a head."""

    def row_loss(output: Tensor, item: TrainRow, model: DistributedDataParallel) -> tuple[Tensor, dict[str, Tensor]]:
        assert item.values_T is not None and item.returns_T is not None
        loss, metrics = value_loss(
            whole_row(token_rewards(model, output), item.row),
            item.values_T.to(output.device),
            item.returns_T.to(output.device),
            item.row.loss_mask_T.to(output.device),
            config,
            num_tokens=size.num_valid_tokens,
        )
        return loss, _shared_metrics(metrics)

    return Objective(row_loss, finish_value_metrics)


def _shared_metrics(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of metrics that each rank of a context-parallel group computes: ranks add up all of them but extremes."""
    cp_size = parallel_state.get_context_parallel_world_size()
    return {name: value if name in MIN_METRICS + MAX_METRICS else value / cp_size for name, value in metrics.items()}
