# SPDX-License-Identifier: Apache-2.0
"""Results of an evaluation: scores (pass@k, majority), a table of them, and a JSON file with every answer."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from conversion.files.durable import make_folder, write_atomic
from mrl.metrics import NUM_JUDGED
from mrl.types import RolloutGroup

ALL = "all"
CORRECT_REWARD = 1.0
"""Reward of a right answer. An answer with a smaller reward, or with none, is wrong."""


def is_correct(reward: float) -> bool:
    """True if a reward is that of a right answer as float32, in which NeMo RL holds it: 0.6 + 0.3 + 0.1 is."""
    return bool(np.float32(reward) >= CORRECT_REWARD)


Scores = dict[str, float]


def reward_metrics(rewards: Sequence[float]) -> dict[str, float]:
    """Mean and spread of the rewards of the judged rollouts, and their number: the rule of all metrics of rewards.

    A rollout without a reward (its function, agent or machine failed) is in no mean; where none has one, there is none.
    """
    measured = {"reward": float(np.mean(rewards)), "reward_std": float(np.std(rewards))} if rewards else {}
    return {**measured, NUM_JUDGED: float(len(rewards))}


def scores_by_environment(groups: Sequence[RolloutGroup], *, k: int) -> dict[str, Scores]:
    """Scores over the prompts of each environment, and over all of them as `all`.

    `pass@1` and `pass@k`; `cons@k` where answers are extracted; the means of reward, as `reward_metrics` says, and of
    generated tokens; and how many failed.
    """
    names = list(dict.fromkeys(group.prompt.env_name for group in groups))
    parts = (
        {name: [group for group in groups if group.prompt.env_name == name] for name in names} if len(names) > 1 else {}
    )
    scores: dict[str, Scores] = {}
    for name, mine in {**parts, ALL: groups}.items():
        verdicts = [verdict for group in mine for verdict in group.verdicts]
        correct = [[verdict.has_reward and is_correct(verdict.reward) for verdict in group.verdicts] for group in mine]
        found = {"prompts": float(len(mine)), "answers": float(len(verdicts))}
        for size in dict.fromkeys((1, k)):
            found[f"pass@{size}"] = mean([pass_at_k(len(right), sum(right), size) for right in correct])
        extracted = [[verdict.extracted for verdict in group.verdicts] for group in mine]
        votes = [consensus_at_k(answers, right, k) for answers, right in zip(extracted, correct, strict=True)]
        if any(vote is not None for vote in votes):
            found[f"cons@{k}"] = mean([vote or 0.0 for vote in votes])
        rewards = reward_metrics([verdict.reward for verdict in verdicts if verdict.has_reward])
        found |= {name: rewards[name] for name in ("reward", NUM_JUDGED) if name in rewards}
        found["mean_length"] = mean([float(rollout.num_trained) for group in mine for rollout in group.rollouts])
        found["failed"] = float(sum(not verdict.is_valid for verdict in verdicts))
        scores[name] = found
    return scores


def note_on_rewards(groups: Sequence[RolloutGroup]) -> str:
    """A line for readers of the table, if some rewards are neither 0 nor 1; else empty."""
    rewards = [verdict.reward for group in groups for verdict in group.verdicts if verdict.has_reward]
    if set(rewards) <= {0.0, CORRECT_REWARD}:
        return ""
    return (
        f"Rewards are between {min(rewards):.4g} and {max(rewards):.4g}, and `reward` is their mean; `pass@` and "
        f"`cons@` take an answer with a reward of {CORRECT_REWARD:g} or more for right, any other for wrong"
    )


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def table_lines(scores: dict[str, Scores], *, first: str) -> list[str]:
    """The scores as a table, one line per environment, the column `first` in front."""
    names = list(dict.fromkeys(name for mine in scores.values() for name in mine))
    names.sort(key=lambda name: name != first)

    def text(value: float | None) -> str:
        if value is None:
            return "-"
        return f"{value:,.0f}" if value == int(value) and value > 1 else f"{value:.4f}"

    rows = [
        ["environment", *names],
        *([name, *(text(mine.get(column)) for column in names)] for name, mine in scores.items()),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]


def write_results(
    path: Path, *, described: dict[str, object], scores: dict[str, Scores], groups: Sequence[RolloutGroup]
) -> None:
    """Writes `described`, the scores, and every answer with its verdict; replaces an older file at once."""
    prompts = [
        {
            "prompt_id": group.prompt.prompt_id,
            "environment": group.prompt.env_name,
            "prompt": group.prompt.text,
            "expected": group.prompt.expected_answer,
            "answers": [
                {
                    "text": verdict.text,
                    "extracted": verdict.extracted,
                    "reward": verdict.reward,
                    "status": verdict.status,
                }
                | ({"conversations": verdict.conversations} if verdict.conversations else {})
                for verdict in group.verdicts
            ],
        }
        for group in groups
    ]
    make_folder(path.parent)
    write_atomic(path, json.dumps({**described, "scores": scores, "prompts": prompts}, indent=1))


def pass_at_k(num_rollouts: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of pass@k: the share of all subsets of k rollouts that contain a correct one.

    1 - C(n - c, k) / C(n, k), arXiv:2107.03374, equation 1.
    """
    _check_count(num_rollouts, k)
    return 1.0 - math.comb(num_rollouts - num_correct, k) / math.comb(num_rollouts, k)


def mean_pass_at_k(correct: Sequence[Sequence[bool]], k: int) -> float:
    """Mean over prompts of `pass_at_k`; `correct[i][j]`: rollout j of prompt i."""
    return sum(pass_at_k(len(one), sum(one), k) for one in correct) / len(correct)


def consensus_at_k(answers: Sequence[str], correct: Sequence[bool], k: int) -> float | None:
    """Share of groups of `k` consecutive answers whose majority is correct (arXiv:2203.11171). Only whole groups count.

    The earlier answer wins a tie. Empty answers do not vote; a group without votes is wrong. None if no answer votes at
    all.
    """
    _check_count(len(answers), k)
    if not any(answers):
        return None
    starts, num_right = range(0, len(answers) - k + 1, k), 0
    for start in starts:
        group = answers[start : start + k]
        if votes := Counter(filter(None, group)):
            winner = votes.most_common(1)[0][0]
            num_right += correct[start + group.index(winner)]
    return num_right / len(starts)


def _check_count(num_rollouts: int, k: int) -> None:
    if num_rollouts < k:
        raise ValueError(
            f"a score at k={k} needs as many rollouts of a prompt, not {num_rollouts}; sample more, or lower k"
        )
