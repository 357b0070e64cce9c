"""Rollouts as text: some of each step for the report, all as NeMo RL's `*_data_stepN.jsonl`, and validation samples for readers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

from mrl.store.loggers.sink import Sample
from mrl.types import RolloutGroup, TrainSequence

Split = Literal["train", "validation"]

NUM_REPORT_SAMPLES = 4
RULE = "-" * 62


def append_report_samples(path: Path, step: int, split: Split, groups: Sequence[RolloutGroup]) -> None:
    """Appends the first rollout of the first groups for the report, one JSON line each."""
    rows = [
        {
            "step": step,
            "split": split,
            "prompt": group.prompt.text,
            "expected": group.prompt.expected_answer,
            "text": group.verdicts[0].text,
            "extracted": group.verdicts[0].extracted,
            "reward": group.verdicts[0].reward,
            "status": group.verdicts[0].status,
        }
        for group in groups[:NUM_REPORT_SAMPLES]
    ]
    with path.open("ab+") as file:
        # A full disk may have torn the last line; the next one starts on a line of its own.
        is_torn = file.tell() > 0 and _last_byte(file) != b"\n"
        file.write(b"\n" * is_torn + "".join(json.dumps(row) + "\n" for row in rows).encode("ascii"))


def _last_byte(file: BinaryIO) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)


def write_step_data(folder: Path, step: int, split: Split, groups: Sequence[RolloutGroup], sequences: Sequence[TrainSequence]) -> None:
    """Writes every rollout of a step as one JSON line, by NeMo RL's names and keys; `sequences` of the same rollouts, none in validation.

    Tokens and logprobs never reach the driver, so these files have no `token_ids`, `generation_logprobs` or `prev_logprobs`.
    """
    name = {"train": "train", "validation": "val"}[split]
    with (folder / f"{name}_data_step{step}.jsonl").open("w", encoding="utf-8") as file:
        for index, row in enumerate(_rows(groups)):
            if sequences:
                row |= {"advantages": sequences[index].advantage, "sample_loss_mask": float(sequences[index].is_valid)}
            file.write(json.dumps({**row, "idx": index}) + "\n")


def _rows(groups: Sequence[RolloutGroup]) -> Iterator[dict[str, object]]:
    for group in groups:
        for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True):
            yield {"content": [group.prompt.text, verdict.text], "rewards": verdict.reward, "input_lengths": rollout.num_tokens}


def best_and_worst(groups: Sequence[RolloutGroup], count: int) -> list[Sample]:
    """`count` rollouts by reward: the best half, then the worst half, and one of the middle if `count` is odd; all if there are no more."""
    ranked = sorted(
        (
            Sample(group.prompt.text, verdict.text, group.prompt.expected_answer, verdict.reward)
            for group in groups
            for verdict in group.verdicts
        ),
        key=lambda sample: -sample.reward,
    )
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
