# SPDX-License-Identifier: Apache-2.0
"""Megatron's own cross entropy, schedule and optimizer on a policy's model and packed rows, for the benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mrl.config.schema.run import RunConfig
from mrl.data.packing import PackedRow, pack_row
from mrl.data.planning import SequenceCost, pack
from mrl.types import Rollout, RolloutInfo, RolloutRequest, SamplingParams, TrainSequence
from tests.stack.policy.policy_ranks import PAD_TOKEN_ID

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

    from mrl.policy.policy import PolicyRank


def packed_rows(
    config: RunConfig, prompts: Sequence[Sequence[int]], new_tokens: int, index: int, *, row_tokens: int, num_parts: int
) -> list[PackedRow]:
    """Rows of one data-parallel rank: a random rollout for each prompt."""
    rng = np.random.default_rng(0)
    sequences = []
    for number, prompt in enumerate(prompts):
        request = RolloutRequest(f"p{number}", 0, 0, 1, tuple(prompt), SamplingParams(1.0, 1.0, None, new_tokens, ()))
        tokens = rng.integers(0, 256, new_tokens).astype(np.int32)
        logprobs = rng.normal(-5.0, 0.3, new_tokens).astype(np.float32)
        rollout = Rollout(request, 1, tokens, logprobs, "length")
        sequences.append(TrainSequence(RolloutInfo.of(rollout, rollout), float(rng.normal()), True))
    lengths = [len(prompt) + new_tokens for prompt in prompts]
    plan = pack(lengths, algorithm="balanced", row_tokens=row_tokens, dp_size=num_parts, cost=SequenceCost(1.0, 0.01))
    multiples = dict(divisible_by=config.policy.row_multiple, sequence_multiple=config.policy.sequence_multiple)
    return [
        pack_row({number: sequences[number] for number in row}, **multiples, pad_token_id=PAD_TOKEN_ID)
        for row in plan[index]
    ]


def bare_step(policy: PolicyRank, rows: list[PackedRow]) -> None:
    """A step of Megatron alone, with the model and optimizer of the policy."""
    for chunk in policy._chunks:
        chunk.zero_grad_buffer()
    policy._state.optimizer.zero_grad()
    bare_pass(policy, rows, forward_only=False)
    policy._state.optimizer.step()


def bare_pass(policy: PolicyRank, rows: list[PackedRow], *, forward_only: bool) -> None:
    """Megatron's forward and backward passes over the rows, or its forward passes alone."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from mrl.policy.batch import global_batch_size, packed_params
    from mrl.policy.moe import row_tokens, show_row

    size = global_batch_size(rows)

    def forward_step(
        iterator: Iterator[PackedRow], model: DistributedDataParallel
    ) -> tuple[Tensor, Callable[..., object]]:
        row = next(iterator)
        # The model's routers count these tokens.
        show_row(model, row_tokens(row, size, row.token_ids_T.device))
        labels = row.labels_T[None].long()
        losses = model(
            row.token_ids_T[None],
            row.position_ids_T[None],
            attention_mask=None,
            labels=labels,
            packed_seq_params=packed_params(row, labels.device),
        )
        return losses, lambda output: (output.sum(), torch.ones((), dtype=torch.int), {"loss": output.detach().sum()})

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(rows)],
        model=policy._chunks,
        num_microbatches=len(rows),
        seq_length=1,
        micro_batch_size=1,
        forward_only=forward_only,
    )
