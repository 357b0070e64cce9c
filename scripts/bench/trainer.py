# SPDX-License-Identifier: Apache-2.0
"""Seconds of mrl's train step and bare Megatron's on the same model and packed rows, in turns: docs/data/trainer.json.

Usage: python -m scripts.bench.trainer [--no-record] [--repeats 9]

Bare: Megatron's own cross entropy through its forward-backward schedule, then `optimizer.step()`. mrl: `set_batch` and
GRPO's `train_step`, with log-probabilities, loss, routing statistics and metrics. Same processes, weights, rows and
optimizer.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mrl.config.schema.run import RunConfig
from mrl.data.packing import PackedRow, pack_row
from mrl.data.planning import SequenceCost, pack
from mrl.types import Rollout, RolloutInfo, RolloutRequest, SamplingParams, TrainSequence
from scripts.bench.turns import bench_parser, lowest_to_highest, median, report, take_turns
from tests.long.record import Row
from tests.models import save_model
from tests.stack.policy.policy_ranks import PAD_TOKEN_ID, open_policy, run_config
from tests.stack.ranks import Rank, RankPool

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

    from mrl.policy.policy import PolicyRank

TARGET = 0.9
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Case:
    """A batch and a layout."""

    layout: str
    num_ranks: int
    num_rollouts: int
    prompt_tokens: int
    new_tokens: int
    row_tokens: int


CASES = (Case("tp2 sp dp2 ep2", 4, 512, 20, 3, 4096), Case("one", 1, 32, 128, 384, 4096))


def main() -> None:
    """Measures, prints a JSON line per row, and records."""
    options = bench_parser(__doc__, repeats=9).parse_args()
    report("trainer", rows_of(options.repeats), options)


def rows_of(repeats: int) -> Iterator[Row]:
    """A row for each case."""
    pool = RankPool(max(case.num_ranks for case in CASES))
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name), "nemotron_h")
        for case in CASES:
            config = run_config(
                Path(name), case.layout, "policy.max_total_sequence_length=1024", "loss_fn.force_on_policy_ratio=true"
            )
            ours, bare = pool.run(measure, config, case, repeats, world_size=case.num_ranks, timeout_s=TIMEOUT_S)[0]
            ratios = [theirs / own for own, theirs in zip(ours, bare, strict=True)]
            yield {
                "layout": case.layout,
                "rollouts": case.num_rollouts,
                "tokens": case.num_rollouts * (case.prompt_tokens + case.new_tokens),
                "mrl s": median(ours),
                "Megatron s": median(bare),
                "speed of Megatron's": median(ratios),
                "at least": TARGET,
                "lowest to highest": lowest_to_highest(ratios),
                "repeats": repeats,
            }
    pool.close()


def measure(rank: Rank, config: RunConfig, case: Case, repeats: int) -> tuple[list[float], list[float]]:
    """Measures on a rank the seconds of mrl's steps and of bare ones. The first of each warms up."""
    with open_policy(rank, config) as policy:
        num_parts = case.num_ranks // config.policy.megatron_cfg.tensor_model_parallel_size
        prompts = np.random.default_rng(0).integers(0, 256, (case.num_rollouts, case.prompt_tokens)).tolist()
        rows = packed_rows(
            config, prompts, case.new_tokens, policy.dp_rank, row_tokens=case.row_tokens, num_parts=num_parts
        )
        steps = (our_step, bare_step)
        seconds = take_turns({step: partial(timed, step, policy, rows) for step in steps}, repeats)
        return seconds[our_step], seconds[bare_step]


def timed(step: Callable[[PolicyRank, list[PackedRow]], None], policy: PolicyRank, rows: list[PackedRow]) -> float:
    """Seconds of a step of all ranks."""
    torch.distributed.barrier()
    started = time.perf_counter()
    step(policy, rows)
    torch.distributed.barrier()
    return time.perf_counter() - started


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


def our_step(policy: PolicyRank, rows: list[PackedRow]) -> None:
    """A step of GRPO."""
    policy.enter("logprob")
    policy.set_batch(rows)
    policy.enter("train")
    policy.train_step()


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


if __name__ == "__main__":
    main()
