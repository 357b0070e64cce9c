# SPDX-License-Identifier: Apache-2.0
"""Warns of steps whose rewards teach nothing; a key ends the run after a number of them in a row."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from mrl.types import RolloutGroup, TrainSequence

logger = logging.getLogger(__name__)

NUM_EQUAL_STEPS = 3


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
        if rewards:
            what = f"all {len(counted)} rewards are {rewards.pop()[0]:g}"
        else:
            reasons = Counter(verdict.reason or verdict.status for group in groups for verdict in group.verdicts if not verdict.is_valid)
            commonest = f", most often because of: {reasons.most_common(1)[0][0]:.200}" if reasons else " as overlong"
            what = f"all {len(sequences)} rollouts are masked{commonest}"
        said = f"step {step}: {what}; steps in a row without a signal: {self.num_steps}"
        if self._limit is not None and self.num_steps >= self._limit:
            way_out = "correct rows, environment or prompt, or raise that key"
            return f"{said}. grpo.max_steps_without_signal={self._limit} ends the run: {way_out}"
        if not counted or self.num_steps >= NUM_EQUAL_STEPS:
            logger.info("No signal in %s. Nothing is learned from them: look at the environment's verdicts in the report", said)
        return None
