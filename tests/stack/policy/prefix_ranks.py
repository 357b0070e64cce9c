# SPDX-License-Identifier: Apache-2.0
"""Steps of a whole `PolicyRank` on groups of rollouts that begin alike, for the tests of shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mrl.config.schema.run import RunConfig
from mrl.data.batch import make_batch
from mrl.data.packing import by_sequence
from mrl.data.planning import summaries
from mrl.data.prefixes import add_trees
from mrl.types import Rollout, RolloutRequest, SamplingParams, TrainSequence
from tests.rollouts import pulled
from tests.stack.policy.parity_ranks import _gradients
from tests.stack.policy.policy_ranks import open_policy, pack_rows
from tests.stack.ranks import Rank

NUM_GROUPS, GROUP_SIZE = 4, 5
NUM_AGENT_GROUPS, NUM_TURNS = 2, 4


@dataclass(frozen=True)
class Measured:
    """Measurements of one rank."""

    metrics: list[dict[str, float]]
    """Metrics of every step."""
    logprobs: dict[str, dict[int, np.ndarray]]
    """Old and reference logprobs of the first step by rollout, of all its generated tokens; empty on all but the last
    pipeline stage.
    """
    gradients: dict[str, np.ndarray]
    """Gradients of the first step by canonical name; NaN where this rank's optimizer has none."""
    computed_share: float
    """Tokens that the model computed, over those of this rank's rollouts."""
    num_levels: int
    """Levels of the deepest tree."""


def rollouts() -> list[Rollout]:
    """Groups of rollouts. Two of each begin alike behind the prompt, too; in the first group one of them ends there."""
    rng = np.random.default_rng(0)
    result = []
    for group in range(NUM_GROUPS):
        prompt = tuple(int(token) for token in rng.integers(0, 256, int(rng.integers(20, 48))))
        turn = rng.integers(0, 256, 18)
        for index in range(GROUP_SIZE):
            own = rng.integers(0, 256, int(rng.integers(1, 32)))
            tokens = own if index < 3 else np.concatenate([turn, own[: 0 if group == 0 and index == 4 else 13]])
            request = RolloutRequest(f"p{group}", index, 0, 1, prompt, SamplingParams(1.0, 1.0, None, 32, (258,)))
            logprobs = rng.normal(-5.0, 0.3, len(tokens)).astype(np.float32)
            result.append(Rollout(request, 1, tokens.astype(np.int32), logprobs, "stop"))
    return result


def agent_sequences() -> list[TrainSequence]:
    """Agents' turns without earlier thoughts in their prompts: a turn begins as the one before, up to its thoughts."""
    rng, found = np.random.default_rng(2), list[TrainSequence]()
    for group in range(NUM_AGENT_GROUPS):
        task = rng.integers(0, 256, int(rng.integers(24, 40))).tolist()
        for index in range(2):
            lengths = [tuple(rng.integers((4, 4, 8), (20, 16, 24)).tolist()) for _ in range(NUM_TURNS)]
            rollouts = conversation(rng, f"p{group}", index, task, lengths)
            found += of_agent(rollouts, float(rng.normal()), (group, index) != (1, 0), float(index))
    return found


def conversation(
    rng: np.random.Generator, prompt_id: str, index: int, task: list[int], lengths: Sequence[Sequence[int]]
) -> list[Rollout]:
    """A rollout for each turn, of random tokens: thoughts and an answer, then an observation, by their `lengths`."""
    history, rollouts = task, list[Rollout]()
    for sizes in lengths:
        thoughts, answer, observation = (rng.integers(0, 256, size).tolist() for size in sizes)
        params = SamplingParams(1.0, 1.0, None, len(thoughts) + len(answer), (258,))
        own = np.array([*thoughts, *answer], dtype=np.int32)
        logprobs = rng.normal(-5.0, 0.3, len(own)).astype(np.float32)
        request = RolloutRequest(prompt_id, index, 0, 1, tuple(history), params)
        rollouts.append(Rollout(request, 1, own, logprobs, "stop"))
        history = history + answer + observation
    return rollouts


def of_agent(rollouts: list[Rollout], advantage: float, is_valid: bool, reward: float = 0.0) -> list[TrainSequence]:
    """The sequences of one rollout of an agent, the last turn first."""
    return [
        TrainSequence(replace(info, payload=rollouts[-1 - place], place=place), advantage, is_valid, reward)
        for place, info in enumerate(summaries(rollouts[::-1]))
    ]


def sequences(rollouts: Sequence[Rollout]) -> list[TrainSequence]:
    """The rollouts with random advantages; one in seven is not valid."""
    advantages = np.random.default_rng(1).normal(size=len(rollouts))
    return [
        pulled(rollout, float(advantages[index]), index % 7 != 3, float(index % 2))
        for index, rollout in enumerate(rollouts)
    ]


def measure(rank: Rank, config: RunConfig, given: Sequence[TrainSequence], num_steps: int) -> Measured:
    """Trains on-policy on the same rollouts, in the rows of the run."""
    batch = make_batch(given, config)
    made = dict(enumerate(batch.sequences))
    metrics, logprobs, gradients, share, num_levels = [], {}, {}, 1.0, 0
    with open_policy(rank, config) as policy:
        for step in range(num_steps):
            rows, logprob_rows = (
                pack_rows(config.policy, plan[policy.dp_rank], made) for plan in (batch.rows, batch.logprob_rows)
            )
            if batch.shares_prefixes:
                add_trees([*rows, *logprob_rows], divisible_by=config.policy.row_multiple)
            policy.enter("logprob")
            policy.set_batch(rows, logprob_rows)
            policy.compute_old_logprobs()
            policy.compute_reference_logprobs()
            policy.enter("train")
            metrics.append(policy.train_step())
            if step == 0:
                gradients = _gradients(policy)
                for name in ("old_logprobs_T", "reference_logprobs_T"):
                    found = {}
                    for row in policy.batches()[0].rows:
                        values_T = getattr(row, name)
                        if values_T is not None:
                            found |= by_sequence(row, values_T * row.generated_mask_T)
                    logprobs[name] = found
                computed = sum(len(row.token_ids_T if row.tree is None else row.tree.positions_U) for row in rows)
                share = computed / sum(sum(row.lengths) for row in rows)
                num_levels = max(len(row.tree.levels) if row.tree else 0 for row in rows)
    return Measured(metrics, logprobs, gradients, share, num_levels)
