# SPDX-License-Identifier: Apache-2.0
"""Finds steps that teach nothing: no rollout counts, or all rewards are equal. Keys end the run after some in a row."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mrl.types import RolloutGroup, Status, TrainSequence, Verdict

if TYPE_CHECKING:
    from mrl.config.schema.algo import GrpoConfig

logger = logging.getLogger(__name__)

NUM_EQUAL_STEPS = 3
MAX_REASON = 300
MAX_REASONS = 3
"""Reasons that are said of all masked rollouts, and of each kind."""


class NoSignal(ValueError):
    """Dynamic sampling did not find enough groups whose rewards differ, or too many steps in a row taught nothing."""


class SignalWatch:
    """Counts the steps in a row whose rollouts are all masked, or have all the same reward."""

    def __init__(self, limit: int | None) -> None:
        """`limit` of such steps end the run; None: none do."""
        self._limit = limit
        self.num_steps = 0
        """Steps in a row without a signal. A resumed run sets it to what its checkpoint says."""

    def note(self, step: int, groups: Sequence[RolloutGroup], sequences: Sequence[TrainSequence]) -> str | None:
        """Warns if a step has no signal; returns why the run must end if too many in a row had none."""
        counted = [sequence for sequence in sequences if sequence.is_valid]
        # Of equal rewards, the components may differ, with which GDPO makes advantages.
        rewards = {(sequence.reward, sequence.advantage) for sequence in counted}
        if len(rewards) > 1 or any(sequence.fixed_advantages for sequence in counted):
            self.num_steps = 0
            return None
        self.num_steps += 1
        # An agent's rollout may be several sequences, of one reward.
        num_counted, num_rollouts = (sum(not one.rollout.is_further for one in part) for part in (counted, sequences))
        what = (
            f"all {num_counted} rewards are {rewards.pop()[0]:g}"
            if rewards
            else f"all {num_rollouts} rollouts are masked"
        )
        if counted and (masked := MaskTally().count(groups).text()):
            what = f"{what}, and {masked}"
        said = f"step {step}: {what}; steps in a row without a signal: {self.num_steps}"
        if self._limit is not None and self.num_steps >= self._limit:
            way_out = "correct rows, environment or prompt, or raise that key"
            return f"{said}. grpo.max_steps_without_signal={self._limit} ends the run: {way_out}"
        if counted and self.num_steps >= NUM_EQUAL_STEPS:
            logger.warning(
                "No signal in %s. Nothing is learned from them: look at the environment's verdicts in the report", said
            )
        return None


@dataclass
class MaskTally:
    """Counts masked rollouts, whose function, agent or machine failed or which are flagged, and the reasons."""

    num_rollouts: int = 0
    kinds: Counter[tuple[Status, str]] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)
    """The first reason of each kind."""

    def count(self, groups: Sequence[RolloutGroup]) -> MaskTally:
        """Adds the rollouts of these groups; returns itself."""
        self.num_rollouts += sum(len(group.verdicts) for group in groups)
        for verdict in masked_of(groups):
            self.kinds[verdict.status, verdict.trace_kind] += 1
            self.reasons.setdefault(verdict.trace_kind, verdict.reason)
        return self

    def text(self) -> str:
        """Share and commonest reasons; empty if every rollout has a reward."""
        without = Counter({key: count for key, count in self.kinds.items() if key[0] != "flagged"})
        if not (num_masked := without.total()):
            return ""
        share = f"{num_masked:,} of {self.num_rollouts:,} rollouts ({num_masked / self.num_rollouts:.1%})"
        because = [
            f"{count:,} because of: {(self.reasons[kind] or status)[:MAX_REASON]}"
            for (status, kind), count in without.most_common(MAX_REASONS)
        ]
        return f"{share} are masked, and not trained on; {'; '.join(because)}"

    def by_kind(self) -> dict[Status, str]:
        """The commonest reasons of each kind, if it has some."""
        found = dict[Status, list[str]]()
        for (status, kind), _ in self.kinds.most_common():
            if reason := self.reasons[kind]:
                found.setdefault(status, []).append(reason[:MAX_REASON])
        return {status: "; ".join(reasons[:MAX_REASONS]) for status, reasons in found.items()}


def reasons_of(groups: Sequence[RolloutGroup]) -> Counter[str]:
    """Counts of the reasons why verdicts are not valid; the first reason stands for all of its kind."""
    first = dict[str, str]()
    return Counter(first.setdefault(v.trace_kind, v.reason or v.status) for v in masked_of(groups))


def masked_of(groups: Sequence[RolloutGroup]) -> list[Verdict]:
    """The verdicts that are not valid."""
    return [verdict for group in groups for verdict in group.verdicts if not verdict.is_valid]


def reason_of_masks(
    groups: Sequence[RolloutGroup], sequences: Sequence[TrainSequence], metrics: Mapping[str, float], config: GrpoConfig
) -> str | None:
    """The reason why no rollout of a step counts, with numbers; None if one does. `metrics` are those of its update."""
    is_empty = metrics.get("train/num_valid_tokens") == 0.0
    if not groups or (not is_empty and any(sequence.is_valid for sequence in sequences)):
        return None
    verdicts, reasons = [verdict for group in groups for verdict in group.verdicts], reasons_of(groups)
    if config.overlong_filtering:
        # As in `mrl.algo.advantages.train_sequences`, of those whose verdict counts.
        pairs = [pair for group in groups for pair in zip(group.rollouts, group.verdicts, strict=True)]
        reasons["grpo.overlong_filtering"] = sum(
            v.is_valid and rollout.finish_reason == "length" for rollout, v in pairs
        )
    if (num_far := metrics.get("train/num_masked_seqs_by_logprob_error", 0.0)) > 0:
        reasons[f"grpo.seq_logprob_error_threshold={config.seq_logprob_error_threshold:g}"] = round(num_far)
    reason, count = (reasons or Counter({"no token of theirs counts": len(verdicts)})).most_common(1)[0]
    return f"none of its {len(verdicts)} rollouts counts; {count} because of: {reason:.300}"
