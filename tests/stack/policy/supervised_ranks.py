# SPDX-License-Identifier: Apache-2.0
"""Functions that the tests of training without rollouts run on the ranks, and the examples that they train on."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mrl.config.schema.run import RunConfig
from mrl.data.batch import batch_examples
from mrl.data.planning import SequenceCost
from mrl.data.supervised import Example, TokenSequence
from tests.stack.policy import policy_ranks
from tests.stack.ranks import Rank

NUM_EXAMPLES = 12


def run_config(folder: Path, algorithm: str, layout: str, *overrides: str) -> RunConfig:
    """Config of the policy tests, for another algorithm, with rows of about three examples."""
    rows = ["policy.max_total_sequence_length=24", "policy.sequence_packing.train_mb_tokens=48"]
    return policy_ranks.run_config(folder, layout, f"algorithm={algorithm}", *rows, *overrides)


def examples(num_sequences: int) -> list[Example]:
    """Random examples, of so many sequences each that begin alike; some have two parts that are learned."""
    rng = np.random.default_rng(1)
    return [Example(f"e{index}", tuple(_sequences(rng, num_sequences))) for index in range(NUM_EXAMPLES)]


def _sequences(rng: np.random.Generator, num_sequences: int) -> list[TokenSequence]:
    prompt = rng.integers(0, 256, int(rng.integers(2, 8)))
    found = []
    for _ in range(num_sequences):
        length = int(rng.integers(4, 12))
        token_ids = np.concatenate([prompt, rng.integers(0, 256, length)]).astype(np.int32)
        start, stop = len(prompt), len(token_ids)
        targets = ((start, start + 1), (start + 3, stop)) if length > 6 else ((start, stop),)
        found.append(TokenSequence(token_ids, targets))
    return found


# What follows runs on a rank.


def evaluation_and_steps(
    rank: Rank, config: RunConfig, learned: list[Example], num_steps: int
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Metrics of the examples before any step, and of steps on all of them."""
    from megatron.core import parallel_state

    with policy_ranks.open_policy(rank, config) as policy:
        dp_size = parallel_state.get_data_parallel_world_size()
        batch = batch_examples(learned, config.policy, dp_size=dp_size, cost=SequenceCost(1.0, 0.01))
        plan = batch.rows[policy.dp_rank]
        made = {index: batch.sequences[index] for row in plan for index in row}
        rows = policy_ranks.pack_rows(config.policy, plan, made)
        policy.enter("train")

        def give_batch() -> None:
            policy.set_batch(rows)
            if config.keeps_reference:
                policy.compute_reference_logprobs()

        give_batch()
        before, steps = policy.evaluate(), []
        for _ in range(num_steps):
            give_batch()
            steps.append(policy.train_step())
        return before, steps
