# SPDX-License-Identifier: Apache-2.0
"""The loss of multi-token prediction, beside that of any objective of tokens.

At position t, step k of K predicts the label of position t + k from the hidden state of step k - 1 (of the model, for the first) and the
embedding of token t + k. With factor f the loss is f / K * sum over k of the mean negative log-likelihood of the labels that count, at
temperature 1 (arXiv:2412.19437, equations 24 and 25). Each mean is over the global batch, so that no packing or layout changes it.
Shape suffixes: T tokens of a row, or of this rank's part of it, K steps, D hidden size, V vocabulary columns of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import unwrap_model
from torch import Tensor

from mrl.data.packing import PackedRow
from mrl.policy.batch import own_positions, packed_params
from mrl.policy.logprobs import TokenDistribution, scores_of_hidden
from mrl.policy.mtp import embedding_on_last_stage, mtp_of
from mrl.policy.output import output_columns

if TYPE_CHECKING:
    from mrl.config.schema.megatron import MegatronConfig
    from mrl.policy.objectives import Objective


def with_mtp(objective: Objective, rows: Sequence[PackedRow], config: MegatronConfig, vocab_size: int) -> Objective:
    """The objective with the loss of the MTP layers added, and their metrics: `mtp_K_loss` and `mtp_K_acceptance_rate`, from step 1.

    An acceptance rate is the share of labels that the step holds likeliest. `rows` are this rank's, of the global batch. Collective over
    the dp group.
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
    """On the last stage, the loss by this rank's tokens of a row, and its share of the metrics. `output` are hidden states [1, T, D]."""
    bare, block, local, device = unwrap_model(model), mtp_of(model), own_positions(row), output.device
    assert block is not None
    embedding = bare.embedding if bare.pre_process else block.embedding[0]
    packed, group = packed_params(row, device), parallel_state.get_tensor_model_parallel_group()
    hidden_T1D = output.transpose(0, 1)
    if config.mtp_detach_heads:
        # What is recomputed needs an input that requires a gradient.
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
            # Hybrid models have no positions, which the second argument would be.
            embedded_T1D = embedding(tokens_T[None], tokens_T[None])
        # A row's backward pass on the last stage comes right behind its forward pass: routers know the row where layers are recomputed.
        hidden_T1D = block.layers[(ahead - 1) % len(block.layers)](hidden_T1D, embedded_T1D, packed)
        columns = output_columns(model, hidden_T1D.transpose(0, 1), distribution)
        weight_VD = columns.weight_VD
        assert weight_VD is not None, "the model returns hidden states where MTP layers are trained"
        weight_VD = weight_VD.detach() if config.mtp_detach_heads else weight_VD
        scores = scores_of_hidden(columns.inputs, weight_VD, labels_T, distribution, group, chunk_tokens=columns.chunk_tokens)
        weights_T = mask_T / max(counts[ahead - 1], 1)
        loss = -(scores.logprobs_T * weights_T).sum()
        total = total + loss * (config.mtp_loss_scaling_factor / config.mtp_num_layers)
        metrics[f"mtp_{ahead}_loss"] = loss.detach()
        metrics[f"mtp_{ahead}_acceptance_rate"] = (scores.is_likeliest_T * weights_T).sum()
    return total, metrics


def shifted(values_T: Tensor, cu_seqlens: Tensor, ahead: int) -> Tensor:
    """At each position the value of the one that is `ahead` of it in its sequence; 0 where the sequence has ended."""
    ends_T = cu_seqlens[1:].long().repeat_interleave(cu_seqlens.diff())
    positions_T = torch.arange(len(values_T)) + ahead
    return torch.where(positions_T < ends_T, values_T[positions_T.clamp(max=len(values_T) - 1)], 0)


def _label_counts(rows: Sequence[PackedRow], num_steps: int) -> list[int]:
    """How many labels count for each step, over the global batch. Collective over the dp group."""
    counts = torch.zeros(num_steps, dtype=torch.int64)
    for row in rows:
        counts += torch.stack([shifted(row.loss_mask_T, row.cu_seqlens, ahead).sum().long() for ahead in range(1, num_steps + 1)])
    dist.all_reduce(counts, group=parallel_state.get_data_parallel_group())
    return counts.tolist()
