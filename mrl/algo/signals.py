"""Judged rollouts to sequences for training: reward, advantage, whether it counts, and tokens with an advantage of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mrl.algo.advantages import batch_advantages
from mrl.algo.rewards import num_out_of_range, shaped_rewards, shaped_rewards_of
from mrl.types import FixedAdvantage, FlawKind, RolloutGroup, RolloutInfo, TrainSequence, Verdict

if TYPE_CHECKING:
    from mrl.config.schema.algo import GrpoConfig


def train_sequences(groups: Sequence[RolloutGroup], config: GrpoConfig) -> tuple[list[TrainSequence], dict[str, float]]:
    """Every rollout of a step as a sequence to train on, in the order of the groups; and metrics of rewards and masks.

    Rollouts that do not count keep their place, with advantage 0. Whatever needs logprobs comes later: see `mrl.algo.token_advantages`.

    Raises:
        ValueError: see `batch_advantages`.
    """
    sequences = []
    for group, advantages in zip(groups, batch_advantages(groups, config), strict=True):
        rewards = shaped_rewards(group, config)
        for rollout, verdict, reward, advantage in zip(group.rollouts, group.verdicts, rewards, advantages, strict=True):
            counts = verdict.is_valid and not _is_filtered(rollout, config)
            fixed = _fixed_advantages(verdict, config) if counts else ()
            sequences.append(TrainSequence(rollout, advantage if counts else 0.0, counts, reward, fixed))
    return sequences, _metrics(groups, sequences, config)


def _is_filtered(rollout: RolloutInfo, config: GrpoConfig) -> bool:
    return config.overlong_filtering and rollout.finish_reason == "length"


def _fixed_advantages(verdict: Verdict, config: GrpoConfig) -> tuple[FixedAdvantage, ...]:
    """Malformed thinking comes first: in a turn with both flaws, the later one counts, its invalid tool call."""
    by_kind: dict[FlawKind, float | None] = {
        "malformed_thinking": config.malformed_thinking_advantage,
        "invalid_tool_call": config.invalid_tool_call_advantage,
    }
    return tuple(
        FixedAdvantage(flaw.start, flaw.stop, advantage)
        for kind, advantage in by_kind.items()
        if advantage is not None
        for flaw in verdict.flaws
        if flaw.kind == kind
    )


def _metrics(groups: Sequence[RolloutGroup], sequences: Sequence[TrainSequence], config: GrpoConfig) -> dict[str, float]:
    judged = [(rollout, verdict) for group in groups for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True)]
    metrics = {}
    if config.use_dynamic_sampling:
        rewards = shaped_rewards_of(groups, config)
        metrics["train/filtered_reward"] = sum(rewards) / max(1, len(rewards))
    if config.overlong_filtering:
        num_filtered = sum(verdict.is_valid and _is_filtered(rollout, config) for rollout, verdict in judged)
        metrics["train/num_overlong_filtered"] = float(num_filtered)
    if config.reward_scaling.enabled:
        metrics["train/num_rewards_out_of_range"] = float(sum(num_out_of_range(group, config.reward_scaling) for group in groups))
    return metrics | _flaw_metrics(judged, config)


def _flaw_metrics(judged: Sequence[tuple[RolloutInfo, Verdict]], config: GrpoConfig) -> dict[str, float]:
    """Turns with a fixed advantage, and their shares of all turns. A turn with both flaws counts as an invalid tool call."""
    if config.invalid_tool_call_advantage is None and config.malformed_thinking_advantage is None:
        return {}
    num_invalid = num_malformed = 0
    for _, verdict in judged:
        invalid, malformed = (
            {(flaw.start, flaw.stop) for flaw in verdict.flaws if flaw.kind == kind and advantage is not None}
            for kind, advantage in (
                ("invalid_tool_call", config.invalid_tool_call_advantage),
                ("malformed_thinking", config.malformed_thinking_advantage),
            )
        )
        num_invalid += len(invalid)
        num_malformed += len(malformed - invalid)
    num_turns = sum(rollout.num_turns for rollout, _ in judged)
    return {
        "train/num_invalid_tool_calls": float(num_invalid),
        "train/invalid_tool_call_rate": num_invalid / max(1, num_turns),
        "train/num_malformed_thinking": float(num_malformed),
        "train/malformed_thinking_rate": num_malformed / max(1, num_turns),
        "train/num_assistant_messages": float(num_turns),
    }
