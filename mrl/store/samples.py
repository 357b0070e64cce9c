"""Rollouts as text: some of each step for the report, all as NeMo RL's `*_data_stepN.jsonl`, and validation samples for readers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from mrl.store.loggers.sink import Sample
from mrl.types import RolloutGroup, TrainSequence

Split = Literal["train", "validation"]

NUM_REPORT_SAMPLES = 4
RULE = "-" * 62


def append_report_samples(path: Path, step: int, split: Split, groups: Sequence[RolloutGroup]) -> None:
    """Appends the first rollout of the first groups for the report, one JSON line each."""
    lines = ""
    for group in groups[:NUM_REPORT_SAMPLES]:
        prompt, first = group.prompt, group.verdicts[0]
        row = {"step": step, "split": split, "prompt": prompt.text, "expected": prompt.expected_answer, "text": first.text}
        lines += json.dumps(row | {"extracted": first.extracted, "reward": first.reward, "status": first.status}) + "\n"
    with path.open("ab+") as file:
        # A full disk may have torn the last line; the next one starts on a line of its own.
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            lines = lines if file.read(1) == b"\n" else "\n" + lines
        file.write(lines.encode("ascii"))


def write_step_data(folder: Path, step: int, split: Split, groups: Sequence[RolloutGroup], sequences: Sequence[TrainSequence]) -> None:
    """Writes every rollout of a step as one JSON line, by NeMo RL's names and keys; `sequences` of the same rollouts, none in validation.

    Tokens and logprobs never reach the driver, so these files have no `token_ids`, `generation_logprobs` or `prev_logprobs`.
    """
    name = {"train": "train", "validation": "val"}[split]
    judged = [(group, *pair) for group in groups for pair in zip(group.rollouts, group.verdicts, strict=True)]
    with (folder / f"{name}_data_step{step}.jsonl").open("w", encoding="utf-8") as file:
        for index, (group, rollout, verdict) in enumerate(judged):
            row: dict[str, object] = {"content": [group.prompt.text, verdict.text], "rewards": verdict.reward}
            row["input_lengths"] = rollout.num_tokens
            if sequences:
                row |= {"advantages": sequences[index].advantage, "sample_loss_mask": float(sequences[index].is_valid)}
            file.write(json.dumps({**row, "idx": index}) + "\n")


def best_and_worst(groups: Sequence[RolloutGroup], count: int) -> list[Sample]:
    """`count` rollouts by reward: the best half, then the worst half, and one of the middle if `count` is odd; all if there are no more."""
    texts = [(group.prompt, verdict) for group in groups for verdict in group.verdicts]
    samples = [Sample(prompt.text, verdict.text, prompt.expected_answer, verdict.reward) for prompt, verdict in texts]
    ranked = sorted(samples, key=lambda sample: -sample.reward)
    if count >= len(ranked):
        return ranked
    half = count // 2
    middle = ranked[len(ranked) // 2 : len(ranked) // 2 + count % 2]
    return ranked[:half] + middle + ranked[len(ranked) - half :]


def sample_lines(samples: Sequence[Sample], step: int) -> list[str]:
    """The lines that show validation samples on the console."""
    lines = []
    for number, sample in enumerate(samples, start=1):
        lines += [f"{RULE}\nValidation sample {number} of {len(samples)} at step {step}\n{sample.block()}"]
    return [*lines, RULE] if lines else []
