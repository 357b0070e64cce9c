"""Examples to a global batch: which row of which data-parallel rank each sequence goes to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from mrl.config.schema.policy import DynamicBatchingConfig, SequencePackingConfig
from mrl.data.batch import plan_batch, plan_metrics
from mrl.data.packing import padded_length
from mrl.data.planning import RowPlan
from mrl.types import Rollout, RolloutRequest, SamplingParams, Turn

if TYPE_CHECKING:
    from mrl.config.schema.policy import PolicyConfig
    from mrl.data.conversations import TokenSequence
    from mrl.data.cost import SequenceCost
    from mrl.data.supervised import Example


Section = TypeVar("Section", SequencePackingConfig, DynamicBatchingConfig)


@dataclass(frozen=True)
class ExampleBatch:
    """The sequences of a batch as if they had been sampled, and where each is trained, see `mrl.types.Batch`."""

    rollouts: tuple[Rollout, ...]
    rows: RowPlan
    logprob_rows: RowPlan
    metrics: dict[str, float]
    """How full the rows are and how even the ranks: `train/*`."""


def batch_examples(examples: Sequence[Example], policy: PolicyConfig, *, dp_size: int, cost: SequenceCost) -> ExampleBatch:
    """The batch of these examples, a pure function of their order. The sequences of an example follow each other in one row.

    All examples have the same number of sequences, one at least. Where they have two, a row holds twice the tokens: its limit is that of
    the preferred answers, and as many again of the others.
    """
    rollouts = tuple(
        as_rollout(sequence, example.example_id, index) for example in examples for index, sequence in enumerate(example.sequences)
    )
    size = len(examples[0].sequences)
    lengths = [
        sum(padded_length(len(sequence.token_ids), policy.sequence_multiple) for sequence in example.sequences) for example in examples
    ]
    policy = _for_several(policy, size)
    plans = plan_batch(lengths, policy, dp_size=dp_size, cost=cost)
    rows, logprob_rows = (tuple(tuple(_expanded(row, size) for row in rows) for rows in plan) for plan in plans)
    return ExampleBatch(rollouts, rows, logprob_rows, plan_metrics(plans[0], lengths, policy, cost))


def _expanded(row: Sequence[int], size: int) -> tuple[int, ...]:
    """Indices of sequences, from those of examples."""
    return tuple(size * example + index for example in row for index in range(size))


def _for_several(policy: PolicyConfig, size: int) -> PolicyConfig:
    """The policy with rows of `size` times the tokens."""

    def widened(section: Section) -> Section:
        return dataclasses.replace(
            section, train_mb_tokens=size * section.train_mb_tokens, logprob_mb_tokens=size * section.logprob_mb_tokens
        )

    return dataclasses.replace(
        policy,
        max_total_sequence_length=size * policy.max_total_sequence_length,
        sequence_packing=widened(policy.sequence_packing),
        dynamic_batching=widened(policy.dynamic_batching),
    )


def as_rollout(sequence: TokenSequence, prompt_id: str, index: int) -> Rollout:
    """A rollout whose turns are the parts of the sequence that are learned. It has no logprobs, as nothing was drawn."""
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


def as_in_validation(policy: PolicyConfig, micro_batch_size: int) -> PolicyConfig:
    """The policy with this many examples in a row, where rows have a number of them."""
    return dataclasses.replace(policy, train_micro_batch_size=micro_batch_size)
