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
    """
    # Malformed thinking comes first: in a turn with both flaws, the later one counts, its invalid tool call.
    fixed: dict[FlawKind, float | None] = {
        "malformed_thinking": config.malformed_thinking_advantage,
        "invalid_tool_call": config.invalid_tool_call_advantage,
    }
    advantage_of = {kind: advantage for kind, advantage in fixed.items() if advantage is not None}
    sequences, judged, num_overlong = list[TrainSequence](), list[tuple[RolloutInfo, Verdict]](), 0
    for group, advantages in zip(groups, batch_advantages(groups, config), strict=True):
        rewards = shaped_rewards(group, config)
        for rollout, verdict, reward, advantage in zip(group.rollouts, group.verdicts, rewards, advantages, strict=True):
            judged.append((rollout, verdict))
            is_overlong = config.overlong_filtering and rollout.finish_reason == "length"
            num_overlong += verdict.is_valid and is_overlong
            if verdict.is_valid and not is_overlong:
                flaws = [(flaw, value) for kind, value in advantage_of.items() for flaw in verdict.flaws if flaw.kind == kind]
                own = tuple(FixedAdvantage(flaw.start, flaw.stop, value) for flaw, value in flaws)
                sequences.append(TrainSequence(rollout, advantage, True, reward, own))
            else:
                sequences.append(TrainSequence(rollout, 0.0, False, reward, ()))
    metrics = {}
    if config.use_dynamic_sampling:
        shaped = shaped_rewards_of(groups, config)
        metrics["train/filtered_reward"] = sum(shaped) / max(1, len(shaped))
    if config.overlong_filtering:
        metrics["train/num_overlong_filtered"] = float(num_overlong)
    if config.reward_scaling.enabled:
        metrics["train/num_rewards_out_of_range"] = float(sum(num_out_of_range(group, config.reward_scaling) for group in groups))
    return sequences, metrics | (_flaw_metrics(judged, advantage_of) if advantage_of else {})


def _flaw_metrics(judged: Sequence[tuple[RolloutInfo, Verdict]], advantage_of: dict[FlawKind, float]) -> dict[str, float]:
    num_invalid = num_malformed = 0
    for _, verdict in judged:
        spans = [(flaw.kind, (flaw.start, flaw.stop)) for flaw in verdict.flaws if flaw.kind in advantage_of]
        invalid = {span for kind, span in spans if kind == "invalid_tool_call"}
        num_invalid += len(invalid)
        # A turn with both flaws counts as an invalid tool call.
        num_malformed += len({span for kind, span in spans if kind == "malformed_thinking"} - invalid)
    num_turns = sum(rollout.num_turns for rollout, _ in judged)
    return {
        "train/num_invalid_tool_calls": float(num_invalid),
        "train/invalid_tool_call_rate": num_invalid / max(1, num_turns),
        "train/num_malformed_thinking": float(num_malformed),
        "train/malformed_thinking_rate": num_malformed / max(1, num_turns),
        "train/num_assistant_messages": float(num_turns),
    }
