# SPDX-License-Identifier: Apache-2.0
"""Global batches: the row of the rank where each rollout, or each sequence of an example, is trained."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np

from mrl.config.sharing import AUTO, LEAST_SAVING, sharing_of
from mrl.data import planning
from mrl.data.packing import padded_length
from mrl.data.planning import MIN_SAVED_TOKENS, RowPlan, SequenceCost, Unit, prompt_units, sequence_cost
from mrl.types import Batch, Rollout, RolloutInfo, RolloutRequest, SamplingParams, TrainSequence, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mrl.config.schema.policy import PolicyConfig, ShareOrNot
    from mrl.config.schema.run import RunConfig
    from mrl.data.supervised import Example, TokenSequence
    from mrl.phases import ModelName


def make_batches(sequences: Sequence[TrainSequence], config: RunConfig, model: ModelName = "policy") -> list[Batch]:
    """Batches of a model's updates: `train_global_batch_size` rollouts each, with their sequences, in order."""
    size = config.model(model).train_global_batch_size
    starts = [index for index, sequence in enumerate(sequences) if not sequence.rollout.is_further][::size]
    return [make_batch(sequences[start:stop], config, model) for start, stop in pairwise([*starts, len(sequences)])]


def make_batch(sequences: Sequence[TrainSequence], config: RunConfig, model: ModelName = "policy") -> Batch:
    """The batch of these sequences, a pure function of their order. Invalid sequences do not count in denominators."""
    valid_lengths = [
        sequence.rollout.num_generated
        for sequence in sequences
        if sequence.is_valid and sequence.rollout.num_generated > 0
    ]
    policy = config.model(model)
    dp_size = config.replicas_of(model)
    infos = [sequence.rollout for sequence in sequences]
    units, saving = batch_units(infos, policy, dp_size=dp_size, shares=sharing_of(config, model))
    lengths, cost = [unit.num_tokens for unit in units], sequence_cost(policy.model_name)
    plans = plan_batch(lengths, policy, dp_size=dp_size, cost=cost)
    metrics = plan_metrics(plans[0], lengths, policy, cost)
    if saving is not None:
        metrics["train/prefix_sharing"] = saving
    rows, logprob_rows = (spread(plan, [unit.indices for unit in units]) for plan in plans)
    return Batch(
        sequences=tuple(sequences),
        rows=rows,
        logprob_rows=logprob_rows,
        num_valid_tokens=sum(valid_lengths),
        num_valid_sequences=len(valid_lengths),
        metrics=metrics,
    )


def batch_units(
    infos: Sequence[RolloutInfo], policy: PolicyConfig, *, dp_size: int, shares: ShareOrNot
) -> tuple[list[Unit], float | None]:
    """Sequences that stay together in a row, and their tokens over those that a model computes if they share prefixes.

    None: they share none, and each is a unit of its own. `auto` decides by the tokens, before rows are made, so that a
    batch is the same on all ranks, and in a resumed run.
    """
    whole = [Unit((index,), info.num_tokens) for index, info in enumerate(infos)]
    if not shares:
        return whole, None
    row_tokens = min(max_row_tokens(policy, "train"), max_row_tokens(policy, "logprob"))

    def units(least: int) -> list[Unit]:
        return prompt_units(infos, row_tokens=row_tokens, dp_size=dp_size, least_shared=least)

    total, made = sum(info.num_tokens for info in infos), units(MIN_SAVED_TOKENS)
    saving = total / max(1, sum(unit.num_tokens for unit in made))
    if shares == AUTO and saving < LEAST_SAVING:
        return whole, None
    if not policy.router_replay.enabled:
        return made, saving
    # Engines may send the tokens of a prompt to other experts in each rollout: rows must have room for all copies.
    return units(policy.max_total_sequence_length), 1.0


def spread(plan: RowPlan, members: Sequence[Sequence[int]]) -> RowPlan:
    """The plan of sequences from one of units, whose sequences are adjacent in a row."""
    return tuple(tuple(tuple(index for unit in row for index in members[unit]) for row in rows) for rows in plan)


def plan_batch(
    lengths: Sequence[int], policy: PolicyConfig, *, dp_size: int, cost: SequenceCost, group_size: int = 1
) -> tuple[RowPlan, RowPlan]:
    """Rows for training and for logprob passes, of sequences of these lengths; a rank has the same sequences in both.

    Each length may be that of a group of `group_size` sequences that stay together: rows then have so many times the
    tokens.
    """
    padded = [padded_length(length, policy.sequence_multiple) for length in lengths]
    packing = policy.sequence_packing
    train_tokens = max_row_tokens(policy, "train", group_size)
    logprob_tokens = max_row_tokens(policy, "logprob", group_size)
    if packing.enabled:
        train = planning.pack(padded, algorithm=packing.algorithm, row_tokens=train_tokens, dp_size=dp_size, cost=cost)
        logprob = train
        if logprob_tokens != train_tokens:
            logprob = planning.repack(train, padded, algorithm=packing.algorithm, row_tokens=logprob_tokens)
        if packing.microbatch_order == "largest_first":
            return planning.largest_first(train, padded), planning.largest_first(logprob, padded)
    elif policy.dynamic_batching.enabled:
        train, logprob = (
            planning.batch_dynamically(padded, row_tokens=tokens, length_multiple=policy.row_multiple, dp_size=dp_size)
            for tokens in (train_tokens, logprob_tokens)
        )
    else:
        train, logprob = (
            planning.batch_in_order(len(padded), sequences_per_row=size, dp_size=dp_size)
            for size in (policy.train_micro_batch_size, policy.logprob_batch_size)
        )
    return train, logprob


def max_row_tokens(policy: PolicyConfig, stage: Literal["train", "logprob"], group_size: int = 1) -> int:
    """Tokens of sequences that a row may hold to stay within its limit when padded. `group_size`: see `plan_batch`."""
    fills_rows = policy.sequence_packing if policy.sequence_packing.enabled else policy.dynamic_batching
    if fills_rows.enabled:
        limit = group_size * (fills_rows.train_mb_tokens if stage == "train" else fills_rows.logprob_mb_tokens)
        return limit - limit % policy.row_multiple
    num_sequences = policy.train_micro_batch_size if stage == "train" else policy.logprob_batch_size
    longest = padded_length(group_size * policy.max_total_sequence_length, policy.sequence_multiple)
    return padded_length(num_sequences * longest, policy.row_multiple)


def plan_metrics(
    plan: RowPlan, lengths: Sequence[int], policy: PolicyConfig, cost: SequenceCost, group_size: int = 1
) -> dict[str, float]:
    """Fill of a plan's rows and balance of the ranks, as `train/*`."""
    padded = [padded_length(length, policy.sequence_multiple) for length in lengths]
    num_rows = sum(len(rows) for rows in plan)
    in_rows = sum(
        padded_length(max(1, sum(padded[index] for index in row)), policy.row_multiple) for rows in plan for row in rows
    )
    return {
        "train/num_microbatches": float(len(plan[0])),
        "train/packing_efficiency": sum(lengths) / (num_rows * max_row_tokens(policy, "train", group_size)),
        "train/padding_fraction": 1.0 - sum(lengths) / in_rows,
        "train/dp_balance_tokens": max(planning.rank_shares(plan, padded, float)),
        "train/dp_balance_cost": max(planning.rank_shares(plan, padded, cost.of)),
    }


def batch_examples(examples: Sequence[Example], policy: PolicyConfig, *, dp_size: int, cost: SequenceCost) -> Batch:
    """The batch of these examples with payloads, as if an engine had drawn them: a pure function of their order.

    An example's sequences are adjacent in one row; all examples have the same number of them. Where that is two, a row
    has twice the tokens: its limit is that of the preferred answers, and as many again of the others.
    """
    size = len(examples[0].sequences)
    lengths = [
        sum(padded_length(len(sequence.token_ids), policy.sequence_multiple) for sequence in example.sequences)
        for example in examples
    ]
    plans = plan_batch(lengths, policy, dp_size=dp_size, cost=cost, group_size=size)
    members = [range(size * index, size * (index + 1)) for index in range(len(examples))]
    rows, logprob_rows = (spread(plan, members) for plan in plans)
    rollouts = [
        as_rollout(sequence, example.example_id, index)
        for example in examples
        for index, sequence in enumerate(example.sequences)
    ]
    return Batch(
        sequences=tuple(TrainSequence(RolloutInfo.of(one, one), advantage=0.0, is_valid=True) for one in rollouts),
        rows=rows,
        logprob_rows=logprob_rows,
        num_valid_tokens=sum(turn.stop - turn.start for rollout in rollouts for turn in rollout.turns),
        num_valid_sequences=len(rollouts),
        metrics=plan_metrics(plans[0], lengths, policy, cost, size),
    )


def as_rollout(sequence: TokenSequence, prompt_id: str, index: int) -> Rollout:
    """A rollout whose turns are the learned parts of the sequence. It has no logprobs, as nothing was drawn."""
    first = sequence.targets[0][0]
    turns = [Turn(start - first, stop - first, 0) for start, stop in sequence.targets]
    prompt, rest = sequence.token_ids[:first], sequence.token_ids[first:]
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=None, max_new_tokens=len(rest), stop_token_ids=())
    request = RolloutRequest(prompt_id, index, epoch=0, seed=0, token_ids=tuple(prompt.tolist()), sampling=sampling)
    return Rollout(
        request,
        weight_version=0,
        token_ids=rest,
        generator_logprobs=np.zeros(len(rest), dtype=np.float32),
        finish_reason="stop",
        earlier_turns=tuple(turns[:-1]),
        last_turn_start=turns[-1].start,
    )
