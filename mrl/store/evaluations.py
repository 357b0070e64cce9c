"""Results of an evaluation: scores, a table of them, and a JSON file with every answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from conversion.files.durable import write_atomic
from mrl.algo.evaluation import consensus_at_k, pass_at_k
from mrl.types import RolloutGroup

ALL = "all"
CORRECT_REWARD = 1.0
"""Reward of a right answer. An answer with a smaller reward, or with none, is wrong."""

Scores = dict[str, float]


def scores_by_environment(groups: Sequence[RolloutGroup], *, k: int) -> dict[str, Scores]:
    """Scores over the prompts of each environment, and over all of them as `all`.

    `pass@1` and `pass@k`; `cons@k` where answers are extracted; the means of reward and of generated tokens; and how many failed.
    """
    names = list(dict.fromkeys(group.prompt.env_name for group in groups))
    parts = {name: [group for group in groups if group.prompt.env_name == name] for name in names}
    return {name: _scores(mine, k) for name, mine in (parts if len(parts) > 1 else {}).items()} | {ALL: _scores(groups, k)}


def _scores(groups: Sequence[RolloutGroup], k: int) -> Scores:
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    correct = [is_correct(group) for group in groups]
    scores = {"prompts": float(len(groups)), "answers": float(len(verdicts))}
    for size in dict.fromkeys((1, k)):
        scores[f"pass@{size}"] = _mean([pass_at_k(len(mine), sum(mine), size) for mine in correct])
    votes = [consensus_at_k(extracted(group), mine, k) for group, mine in zip(groups, correct, strict=True)]
    if any(vote is not None for vote in votes):
        scores[f"cons@{k}"] = _mean([vote or 0.0 for vote in votes])
    scores["reward"] = _mean([verdict.reward if verdict.has_reward else 0.0 for verdict in verdicts])
    scores["mean_length"] = _mean([float(rollout.num_generated) for group in groups for rollout in group.rollouts])
    scores["failed"] = float(sum(not verdict.is_valid for verdict in verdicts))
    return scores


def is_correct(group: RolloutGroup) -> list[bool]:
    """Whether each answer is right."""
    return [verdict.has_reward and verdict.reward >= CORRECT_REWARD for verdict in group.verdicts]


def extracted(group: RolloutGroup) -> list[str]:
    """The short answer that the environment extracted from each answer."""
    return [verdict.extracted for verdict in group.verdicts]


def table_lines(scores: dict[str, Scores], *, first: str) -> list[str]:
    """The scores as a table, one line per environment, the column `first` in front."""
    names = list(dict.fromkeys(name for mine in scores.values() for name in mine))
    names.sort(key=lambda name: name != first)
    rows = [["environment", *names], *([name, *(_text(mine.get(column)) for column in names)] for name, mine in scores.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]


def write_results(path: Path, *, described: dict[str, object], scores: dict[str, Scores], groups: Sequence[RolloutGroup]) -> None:
    """Writes `described`, the scores, and every answer with its verdict; replaces an older file at once."""
    prompts = [
        {
            "prompt_id": group.prompt.prompt_id,
            "environment": group.prompt.env_name,
            "prompt": group.prompt.text,
            "expected": group.prompt.expected_answer,
            "answers": [
                {"text": verdict.text, "extracted": verdict.extracted, "reward": verdict.reward, "status": verdict.status}
                for verdict in group.verdicts
            ],
        }
        for group in groups
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps({**described, "scores": scores, "prompts": prompts}, indent=1))


def _text(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value == int(value) and value > 1 else f"{value:.4f}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
