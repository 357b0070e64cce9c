# SPDX-License-Identifier: Apache-2.0
"""Seconds of logprobs and a train step with shared prefixes, beside bare Megatron on whole rows: docs/data/prefix.json.

Usage: python -m scripts.bench.prefix [--no-record] [--repeats 3] [--model nemotron_h|qwen3]

Groups of 16 rollouts, prompt to reply 1:1, 4:1 and 16:1, and two rollouts of an agent whose prompts repeat the
conversation without earlier thoughts, on one rank with one thread. The agent's 11 turns have the lengths, a token for
16 characters, of SWE-agent's demonstration of marshmallow-1867 with function calls (trajectories/demonstrations of
github.com/princeton-nlp/SWE-agent). Bare: Megatron's forward passes over packed rows of whole rollouts, then its
forward, backward and optimizer step. mrl: `compute_old_logprobs` and GRPO's `train_step` over the same rollouts with
`policy.share_prefixes=true`. Same process, weights, row lengths and optimizer, in turns. Seconds are those of the
processor, which a busy host changes little. Activations are the bytes that autograd keeps for the backward passes of
all rows.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mrl.config.schema.run import RunConfig
from mrl.data.batch import make_batch, plan_batch
from mrl.data.packing import PackedRow
from mrl.data.planning import sequence_cost
from mrl.data.prefixes import add_trees
from mrl.policy.policy import PolicyRank
from mrl.types import Rollout, RolloutInfo, RolloutRequest, SamplingParams, TrainSequence
from scripts.bench.bare_megatron import bare_pass, bare_step
from scripts.bench.shapes import WIDER
from scripts.bench.turns import bench_parser, lowest_to_highest, median, report, take_turns
from tests.long.record import Row
from tests.models import save_model
from tests.stack.policy.policy_ranks import open_policy, pack_rows, run_config
from tests.stack.policy.prefix_ranks import conversation, of_agent
from tests.stack.ranks import Rank, RankPool

GENERATIONS = 16
TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Case:
    """Sequences to train, and the least speed of bare Megatron's that is asked of mrl; None: none is."""

    name: str
    sequences: Callable[[], list[TrainSequence]]
    target: float | None


def rollouts(prompt_tokens: int, reply_tokens: int) -> list[TrainSequence]:
    """A group of random replies."""
    rng, sequences = np.random.default_rng(0), []
    prompt = tuple(rng.integers(0, 256, prompt_tokens).tolist())
    for index in range(GENERATIONS):
        request = RolloutRequest("p", index, 0, 1, prompt, SamplingParams(1.0, 1.0, None, reply_tokens, ()))
        tokens = rng.integers(0, 256, reply_tokens).astype(np.int32)
        logprobs = rng.normal(-5.0, 0.3, reply_tokens).astype(np.float32)
        rollout = Rollout(request, 1, tokens, logprobs, "length")
        sequences.append(TrainSequence(RolloutInfo.of(rollout, rollout), float(rng.normal()), True))
    return sequences


TASK_CHARACTERS = 1658 + 3661
"""Characters of the system's and the user's messages."""
# Characters of a turn's thought, action and observation.
TURN_CHARACTERS = (
    *((213, 19, 40), (51, 244, 453), (69, 19, 3), (395, 5, 280), (166, 23, 84), (252, 37, 4137), (569, 119, 8978)),
    *((128, 127, 4364), (346, 19, 3), (159, 15, 16), (27, 6, 578)),
)


def turns() -> list[TrainSequence]:
    """The agent's two rollouts, of random tokens."""
    rng = np.random.default_rng(0)
    task = rng.integers(0, 256, TASK_CHARACTERS // 16).tolist()
    lengths = [[-(-number // 16) for number in turn] for turn in TURN_CHARACTERS]
    return [
        sequence
        for index in range(2)
        for sequence in of_agent(conversation(rng, "p", index, task, lengths), float(rng.normal()), True)
    ]


CASES = (
    Case("1 : 1", partial(rollouts, 48, 48), 1.7),
    Case("4 : 1", partial(rollouts, 192, 48), 3.5),
    Case("16 : 1", partial(rollouts, 768, 48), 7.0),
    Case("an agent's turns", turns, None),
)
ROW_TOKENS = 2048
"""Room for the longest prompt with all its replies, and for an agent's conversation with all its thoughts."""


def main() -> None:
    """Measures, prints a JSON line per row, and records."""
    parser = bench_parser(__doc__, repeats=3)
    parser.add_argument("--model", choices=WIDER, default="nemotron_h")
    options = parser.parse_args()
    report("prefix", rows_of(options.model, options.repeats), options)


def rows_of(model_type: str, repeats: int) -> Iterator[Row]:
    """A row for each case."""
    pool = RankPool(1)
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name), model_type, **WIDER[model_type])
        packing = [f"policy.sequence_packing.{stage}_mb_tokens={ROW_TOKENS}" for stage in ("train", "logprob")]
        longest = f"policy.max_total_sequence_length={ROW_TOKENS}"
        one = "cluster.cpu_units_per_node=1"
        config = run_config(Path(name), "one", "policy.share_prefixes=true", longest, one, *packing)
        for case in CASES:
            found = pool.run(measure, config, case, repeats, world_size=1, timeout_s=TIMEOUT_S)[0]
            ours, bare, kept, whole, computed = found
            ratios = [theirs / own for own, theirs in zip(ours, bare, strict=True)]
            yield {
                "model": model_type,
                "prompt : reply": case.name,
                "tokens, whole": whole,
                "fewer tokens": round(whole / computed, 2),
                "mrl s": median(ours),
                "Megatron s": median(bare),
                "speed of Megatron's": median(ratios),
                "at least": case.target,
                "lowest to highest": lowest_to_highest(ratios),
                "mrl's activations MB": round(kept[0] / 1e6),
                "Megatron's activations MB": round(kept[1] / 1e6),
                "repeats": repeats,
            }
    pool.close()


def measure(
    rank: Rank, config: RunConfig, case: Case, repeats: int
) -> tuple[list[float], list[float], list[int], int, int]:
    """Seconds of mrl's steps and of bare ones, bytes that each keeps for its backward passes, and tokens of both."""
    sequences = case.sequences()
    batch, made = make_batch(sequences, config), dict(enumerate(sequences))
    cost = sequence_cost(config.policy.model_name)
    lengths = [sequence.rollout.num_tokens for sequence in sequences]
    whole_plan, _ = plan_batch(lengths, config.policy, dp_size=1, cost=cost)
    shared, whole = (pack_rows(config.policy, plan[0], made) for plan in (batch.rows, whole_plan))
    add_trees(shared, divisible_by=config.policy.row_multiple)
    assert sum(len(row.lengths) for row in shared) == sum(len(row.lengths) for row in whole) == len(sequences)
    computed = sum(sum(row.lengths) if row.tree is None else len(row.tree.positions_U) for row in shared)
    with open_policy(rank, config) as policy:
        ways = {our_update: shared, bare_update: whole}
        seconds = take_turns({way: partial(timed, way, policy, rows) for way, rows in ways.items()}, repeats)
        kept = [kept_bytes(policy, rows) for rows in (shared, whole)]
    return seconds[our_update], seconds[bare_update], kept, sum(lengths), computed


def timed(way: Callable[[PolicyRank, list[PackedRow]], None], policy: PolicyRank, rows: list[PackedRow]) -> float:
    """Processor seconds of an update."""
    started = time.process_time()
    way(policy, rows)
    return time.process_time() - started


def our_update(policy: PolicyRank, rows: list[PackedRow]) -> None:
    """Old logprobs and a step of GRPO."""
    policy.enter("logprob")
    policy.set_batch(rows)
    policy.compute_old_logprobs()
    policy.enter("train")
    policy.train_step()


def bare_update(policy: PolicyRank, rows: list[PackedRow]) -> None:
    """Forward passes of Megatron, as for old logprobs, and its step."""
    with torch.no_grad():
        bare_pass(policy, rows, forward_only=True)
    bare_step(policy, rows)


def kept_bytes(policy: PolicyRank, rows: list[PackedRow]) -> int:
    """Bytes of distinct memory, less that of parameters, that a train step over the rows keeps for backward passes."""
    weights = {parameter.untyped_storage().data_ptr() for chunk in policy._chunks for parameter in chunk.parameters()}
    total = 0
    for row in rows:
        seen: dict[int, int] = {}

        def note(tensor: Tensor, seen: dict[int, int] = seen) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            if row.tree is None:
                bare_step(policy, [row])
            else:
                our_update(policy, [row])
        total += sum(seen.values())
    return total


if __name__ == "__main__":
    main()
