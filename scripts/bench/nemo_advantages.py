# SPDX-License-Identifier: Apache-2.0
"""Rewards and advantages, ours and NeMo RL's, on random batches. For `scripts.bench.nemo_parity`.

G rollouts of a prompt, B rollouts of a batch, S tokens of the longest one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mrl.algo.advantages import train_sequences
from mrl.algo.rewards import has_signal, shaped_rewards
from mrl.algo.token_advantages import kl_penalty, teacher_gap, token_advantages
from mrl.config.schema.algo import AdvantageEstimatorConfig, Estimator, GrpoConfig, LossConfig, RewardScalingConfig, RewardShapingConfig
from mrl.types import Flaw, FlawKind, Prompt, RolloutGroup, RolloutInfo, Status, Verdict
from scripts.bench.nemo_code import NemoRl

PROMPT_LENGTH = 2
FLAWS: tuple[FlawKind, ...] = ("invalid_tool_call", "malformed_thinking")
Pairs = list[tuple[str, Tensor, Tensor]]
"""Results of both, by name, ours first."""


def float32(value: float) -> float:
    """Rewards are float32 in NeMo RL."""
    return float(torch.tensor(value))


REWARDS: dict[str, Callable[[random.Random, int], list[float]]] = {
    "right or wrong": lambda draw, size: [float(draw.random() < 0.5) for _ in range(size)],
    "one right": lambda draw, size: [float(i == 0) for i in range(size)],
    "equal": lambda draw, size: [float32(0.1)] * size,
    "any": lambda draw, size: [float32(draw.uniform(-2, 2)) for _ in range(size)],
    "1e-8 apart": lambda draw, size: [float32(draw.choice([0.0, 1e-8])) for _ in range(size)],
    "eighths": lambda draw, size: [draw.randrange(9) / 8 for _ in range(size)],
}


@dataclass(frozen=True)
class Batch:
    """Rollouts of two turns: the prompt, what the model says, a token of the environment, what the model says."""

    groups: list[RolloutGroup]
    turns: list[tuple[int, int]]
    """Tokens of each rollout's turns; the second may have none."""
    logprobs_BS: Tensor
    reference_BS: Tensor
    """Logprobs of the reference model, or of a teacher."""

    @property
    def verdicts(self) -> list[Verdict]:
        """Verdicts of all groups."""
        return [verdict for group in self.groups for verdict in group.verdicts]

    @property
    def token_mask_BS(self) -> Tensor:
        """1 on what the model said, 0 on prompt, environment and padding."""
        mask = torch.zeros_like(self.logprobs_BS)
        for row, (first, second) in zip(mask, self.turns, strict=True):
            row[PROMPT_LENGTH : PROMPT_LENGTH + first] = 1
            row[PROMPT_LENGTH + first + 1 : PROMPT_LENGTH + first + 1 + second] = 1
        return mask


@dataclass(frozen=True)
class Shares:
    """Shares of a batch's rollouts that are special, 0 to 1."""

    flagged: float = 0.0
    cut_off: float = 0.0
    flawed: float = 0.0
    """Share of turns."""


def random_batch(seed: int, shares: Shares | None = None, *, components: int = 0) -> Batch:
    """One to four groups of 2, 3, 4, 8 or 16; rewards of so many components, or of none."""
    shares = shares or Shares()
    draw, groups, turns = random.Random(seed), [], []
    for name in map(str, range(draw.randint(1, 4))):
        size = draw.choice([2, 3, 4, 8, 16])
        lengths = [(draw.randint(1, 4), draw.randint(0, 3)) for _ in range(size)]
        kinds = [draw.choice(list(REWARDS)) for _ in range(components or 1)]
        parts = [REWARDS[kind](draw, size) for kind in kinds]
        verdicts = []
        for index, values in enumerate(zip(*parts, strict=True)):
            is_flagged = draw.random() < shares.flagged
            first, second = lengths[index]
            spans = [(0, first), (first + 1, first + 1 + second)]
            flaws = tuple(Flaw(kind, *span) for kind in FLAWS for span in spans if draw.random() < shares.flawed)
            named = {f"part{number}": value for number, value in enumerate(values)} if components else {}
            status: Status = "flagged" if is_flagged else "ok"
            verdicts.append(Verdict(sum(values), not is_flagged, status, "", "", components=named, flaws=flaws))
        infos = [
            RolloutInfo(
                f"0/{name}/{index}",
                name,
                index,
                1,
                prompt_length=PROMPT_LENGTH,
                length=first + 1 + second,
                finish_reason="length" if draw.random() < shares.cut_off else "stop",
                payload=None,
                num_observed=1,
                num_turns=2,
            )
            for index, (first, second) in enumerate(lengths)
        ]
        groups.append(RolloutGroup(Prompt(name, (1, 2), "q", "a", "math"), tuple(infos), tuple(verdicts)))
        turns += lengths
    length = PROMPT_LENGTH + max(first + 1 + second for first, second in turns)
    logprobs, noise = torch.randn(2, len(turns), length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Batch(groups, turns, logprobs - 3, logprobs - 3 + 0.5 * noise)


def estimator(
    name: Estimator = "grpo",
    *,
    std: bool = True,
    leave_one_out: bool = True,
    minus_baseline: bool = True,
    weights: list[float] | None = None,
) -> GrpoConfig:
    """`grpo` with this `adv_estimator`."""
    return GrpoConfig(
        adv_estimator=AdvantageEstimatorConfig(
            name, normalize_rewards=std, use_leave_one_out_baseline=leave_one_out, minus_baseline=minus_baseline, reward_weights=weights
        )
    )


ESTIMATORS: dict[str, GrpoConfig] = {
    "GRPO, leave one out, std": estimator(),
    "GRPO, leave one out (RLOO)": estimator(std=False),
    "GRPO, group mean, std": estimator(leave_one_out=False),
    "GRPO, group mean (Dr. GRPO)": estimator(leave_one_out=False, std=False),
    "REINFORCE++": estimator("reinforce_plus_plus", minus_baseline=False),
    "REINFORCE++, minus baseline": estimator("reinforce_plus_plus"),
    "GDPO, leave one out, std": estimator("gdpo"),
    "GDPO, group mean, weights": estimator("gdpo", leave_one_out=False, weights=[2.0, 0.5]),
    "On-policy distillation": estimator("opd"),
}


def bounded(grpo: GrpoConfig) -> GrpoConfig:
    """With bounds of advantages."""
    return replace(grpo, advantage_clip_low=-0.5, advantage_clip_high=1.5)


def fixed(grpo: GrpoConfig) -> GrpoConfig:
    """With advantages of flawed turns."""
    return replace(grpo, invalid_tool_call_advantage=-5.0, malformed_thinking_advantage=-0.3)


def our_advantages(batch: Batch, grpo: GrpoConfig, loss: LossConfig) -> tuple[Tensor, dict[str, float]]:
    """Advantage of every token, [B, S], one row for each rollout, and the metrics of the step."""
    is_taught = grpo.adv_estimator.name == "opd"
    sequences, metrics = train_sequences(batch.groups, grpo, compares_rollouts=not is_taught)
    mask_BS = batch.token_mask_BS * torch.tensor([sequence.is_valid for sequence in sequences]).double()[:, None]
    fixed_BS = torch.full_like(mask_BS, torch.nan)
    for row, sequence in zip(fixed_BS, sequences, strict=True):
        for span in sequence.fixed_advantages:
            row[PROMPT_LENGTH + span.start : PROMPT_LENGTH + span.stop] = span.advantage
    values_BS = torch.tensor([sequence.advantage for sequence in sequences], dtype=torch.float64)[:, None].expand_as(mask_BS)
    penalties = None
    if loss.use_kl_in_reward:
        penalties = list(kl_penalty(batch.logprobs_BS, batch.reference_BS, mask_BS, loss))
    if is_taught:
        penalties = list(-teacher_gap(batch.reference_BS, batch.logprobs_BS, mask_BS))
    found = token_advantages(list(values_BS), list(fixed_BS), list(mask_BS), penalties, grpo, lambda total: total)
    return torch.stack(found).double(), metrics


def their_advantages(nemo: NemoRl, batch: Batch, grpo: GrpoConfig, loss: LossConfig) -> tuple[Tensor, dict[str, float]]:
    """Advantages as their driver computes them: estimator, fixed advantages, bounds. What does not count is 0."""
    infos = [rollout for group in batch.groups for rollout in group.rollouts]
    prompt_ids = torch.tensor([int(rollout.prompt_id) for rollout in infos])[:, None]
    is_kept = torch.tensor(
        [
            verdict.is_valid and not (grpo.overlong_filtering and info.finish_reason == "length")
            for verdict, info in zip(batch.verdicts, infos, strict=True)
        ]
    )
    mask_BS = batch.token_mask_BS * is_kept[:, None]
    estimators = {
        "grpo": nemo.advantages.GRPOAdvantageEstimator,
        "gdpo": nemo.advantages.GDPOAdvantageEstimator,
        "reinforce_plus_plus": nemo.advantages.ReinforcePlusPlusAdvantageEstimator,
        "opd": nemo.advantages.OPDAdvantageEstimator,
    }
    settings = {name: getattr(grpo.adv_estimator, name) for name in nemo.advantages.AdvEstimatorConfig.model_fields}
    loss_settings = {name: getattr(loss, name) for name in ("use_kl_in_reward", "reference_policy_kl_penalty", "reference_policy_kl_type")}
    theirs = estimators[grpo.adv_estimator.name](
        nemo.advantages.AdvEstimatorConfig(**settings), nemo.losses.ClippedPGLossConfig(**loss_settings)
    )
    components = {name: [verdict.components[name] for verdict in batch.verdicts] for name in batch.verdicts[0].components}
    data = {
        "advantages": theirs.compute_advantage(
            prompt_ids=prompt_ids,
            rewards=torch.tensor([verdict.reward for verdict in batch.verdicts]),
            mask=mask_BS,
            repeated_batch={f"reward/{name}": torch.tensor(values) for name, values in components.items()},
            logprobs_policy=batch.logprobs_BS,
            logprobs_reference=batch.reference_BS,
            # Of the estimators only on-policy distillation reads these.
            teacher_logprobs=batch.reference_BS,
            prev_logprobs=batch.logprobs_BS,
        )
    }
    metrics = nemo.driver._apply_message_level_advantage_penalties(
        data, _messages(batch), grpo.invalid_tool_call_advantage, grpo.malformed_thinking_advantage
    )
    # Their REINFORCE++ of a batch that is masked as a whole is NaN, which the loss multiplies by 0.
    return torch.where(mask_BS > 0, nemo.driver._clip_grpo_advantages(data["advantages"], grpo), 0.0), metrics


def _messages(batch: Batch) -> list[list[dict[str, object]]]:
    logs = []
    for verdict, (first, second) in zip(batch.verdicts, batch.turns, strict=True):
        log: list[dict[str, object]] = [{"role": "user", "token_ids": torch.zeros(PROMPT_LENGTH)}]
        for start, length in ((0, first), (first + 1, second)):
            kinds = {flaw.kind for flaw in verdict.flaws if flaw.start == start}
            message: dict[str, object] = {
                "role": "assistant",
                "token_ids": torch.zeros(length),
                "generation_logprobs": torch.zeros(length),
                "is_invalid_tool_call": "invalid_tool_call" in kinds,
                "has_malformed_thinking": "malformed_thinking" in kinds,
            }
            log += [message, {"role": "environment", "token_ids": torch.zeros(1)}]
        logs.append(log)
    return logs


def compare_advantages(nemo: NemoRl, batch: Batch, grpo: GrpoConfig, loss: LossConfig | None = None) -> Pairs:
    """Advantages of all tokens, and the metrics of flawed turns. Theirs are computed in float64."""
    loss = loss or LossConfig()
    ours, metrics = our_advantages(batch, grpo, loss)
    torch.set_default_dtype(torch.float64)
    try:
        theirs, their_metrics = their_advantages(nemo, batch, grpo, loss)
    finally:
        torch.set_default_dtype(torch.float32)
    names = [name for name in their_metrics if f"train/{name}" in metrics]
    return [
        ("advantages", ours, theirs),
        *((f"metric {name}", torch.tensor(metrics[f"train/{name}"]), torch.tensor(float(their_metrics[name]))) for name in names),
    ]


def compare_rewards(nemo: NemoRl, batch: Batch, scaling: RewardScalingConfig, shaping: RewardShapingConfig) -> Pairs:
    """Rewards after scaling and shaping."""
    infos = [rollout for group in batch.groups for rollout in group.rollouts]
    data = {
        "total_reward": torch.tensor([verdict.reward for verdict in batch.verdicts], dtype=torch.float64),
        "truncated": torch.tensor([rollout.finish_reason == "length" for rollout in infos]),
        "response_token_lengths": torch.tensor([rollout.num_generated for rollout in infos]),
    }
    data = nemo.rewards.apply_reward_shaping(nemo.driver.scale_rewards(data, scaling), shaping)
    config = GrpoConfig(reward_scaling=scaling, reward_shaping=shaping)
    ours = [reward for group in batch.groups for reward in shaped_rewards(group, config)]
    return [("rewards", torch.tensor(ours, dtype=torch.float64), data["total_reward"])]


def compare_signal(nemo: NemoRl, batch: Batch) -> Pairs:
    """Groups that dynamic sampling keeps, by the std of the whole group."""
    kept = []
    for group in batch.groups:
        rewards = torch.tensor(group.rewards)
        ids, ones = torch.zeros(len(rewards), 1), torch.ones_like(rewards)
        _, std = nemo.utils.calculate_baseline_and_std_per_prompt(ids, rewards, ones, leave_one_out_baseline=False)
        kept.append(bool((std != 0).any()))
    ours = [has_signal(group, GrpoConfig()) for group in batch.groups]
    return [("groups kept", torch.tensor(ours).double(), torch.tensor(kept).double())]


def spike(seed: int) -> Batch:
    """Groups where one reward differs from all the others, which are equal and no binary fraction."""
    draw, batch = random.Random(seed), random_batch(seed)
    groups = []
    for group in batch.groups:
        others, own = float32(draw.uniform(0.1, 0.9)), float32(draw.uniform(-1, 0))
        verdicts = [replace(verdict, reward=others if index else own) for index, verdict in enumerate(group.verdicts)]
        groups.append(replace(group, verdicts=tuple(verdicts)))
    return replace(batch, groups=groups)


def compare_in_float32(nemo: NemoRl, batch: Batch, grpo: GrpoConfig) -> Pairs:
    """Compares as `compare_advantages`, with theirs in float32, as their runs compute them."""
    theirs, _ = their_advantages(nemo, batch, grpo, LossConfig())
    return [("advantages", our_advantages(batch, grpo, LossConfig())[0], theirs)]
