# SPDX-License-Identifier: Apache-2.0
"""Rollouts as text: a few lines a step for reports, NeMo RL's `*_data_stepN.jsonl`, validation samples for readers."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from isal import igzip

from conversion.files.durable import sync_file
from mrl.config.conversations import as_text
from mrl.config.schema.logger import LoggerConfig
from mrl.store.loggers.sink import Sample
from mrl.types import RolloutGroup, RolloutInfo, TokenSample, TrainSequence, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "validation"]

NUM_SAMPLES = 4
MAX_SEQUENCES = 8
"""Limit of the sequences of an agent's rollout whose tokens are written."""
MAX_REPORT_CHARACTERS, MAX_REPORT_CONVERSATION = 600, 3_000
DUMP_NAMES: dict[Split, str] = {"train": "train", "validation": "val"}
RULE = "-" * 62


def append_report_samples(path: Path, step: int, split: Split, groups: Sequence[RolloutGroup]) -> None:
    """Appends the first rollout of the first groups for the report, one JSON line each, its texts shortened."""
    lines = ""
    for group in groups[:NUM_SAMPLES]:
        prompt, first = group.prompt, group.verdicts[0]
        texts = {
            "prompt": prompt.text,
            "expected": prompt.expected_answer,
            "text": first.text,
            "extracted": first.extracted,
        }
        row = {"step": step, "split": split, **{name: _shorten(text) for name, text in texts.items()}}
        if first.conversations:
            row["text"] = as_text(first.conversations, MAX_REPORT_CONVERSATION)
        lines += json.dumps(row | {"reward": first.reward, "status": first.status}) + "\n"
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            lines = lines if file.read(1) == b"\n" else "\n" + lines
        file.write(lines.encode("ascii"))


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_REPORT_CHARACTERS else text[:MAX_REPORT_CHARACTERS] + " …"


def write_step_data(
    folder: Path,
    step: int,
    split: Split,
    groups: Sequence[RolloutGroup],
    sequences: Sequence[TrainSequence],
    config: LoggerConfig,
    token_rows: Mapping[str, Mapping[str, object]] | None = None,
) -> None:
    """Writes the step's rollouts that `logger.rollouts` wants as compressed JSON lines, with NeMo RL's keys and ours.

    `sequences` are those that were trained on, none in validation. Only those of `token_rows`, by request id, have
    tokens and logprobs, since the others never reach the driver. An error leaves no part of the file.
    """
    if config.rollouts == "none":
        return
    path = folder / f"{DUMP_NAMES[split]}_data_step{step}.jsonl.gz"
    aside = path.with_name(f".{path.name}")
    sequences = [sequence for sequence in sequences if not sequence.rollout.is_further]
    judged = [(group.prompt, *pair) for group in groups for pair in zip(group.rollouts, group.verdicts, strict=True)]
    if config.rollouts == "sample":
        judged = judged[: sum(len(group.rollouts) for group in groups[:NUM_SAMPLES])]
    trained = {sequence.rollout.request_id: sequence for sequence in sequences}
    try:
        with igzip.IGzipFile(aside, "wb") as file:
            for index, (prompt, rollout, verdict) in enumerate(judged):
                sequence = trained.get(rollout.request_id)
                row: dict[str, object] = {"content": [prompt.text, verdict.text], "rewards": verdict.reward}
                row["input_lengths"] = rollout.num_tokens
                if sequence is not None:
                    row |= {"advantages": sequence.advantage, "sample_loss_mask": float(sequence.is_valid)}
                row |= {
                    "prompt_id": prompt.prompt_id,
                    "environment": prompt.env_name,
                    "reward_components": dict(verdict.components),
                }
                row |= {"finish_reason": rollout.finish_reason, "masked": _mask_reason(verdict, sequence)}
                row |= {"expected": prompt.expected_answer, "extracted": verdict.extracted}
                row |= {"columns": dict(verdict.columns)} if verdict.columns else {}
                row |= {"conversations": verdict.conversations} if verdict.conversations else {}
                row |= {"weight_version": rollout.weight_version, "num_turns": rollout.num_turns, "idx": index}
                row |= (token_rows or {}).get(rollout.request_id, {})
                file.write((json.dumps(row) + "\n").encode("ascii"))
        sync_file(aside)  # after a loss of power the name would be that of an empty file
        aside.rename(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def token_row(sample: TokenSample, tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """The keys of a dump's line that describe its tokens, NeMo RL's names where it has them."""
    special = set(tokenizer.all_special_ids)
    return {
        "token_ids": sample.token_ids,
        "token_texts": [tokenizer.decode([token_id]) for token_id in sample.token_ids],
        "token_special": [int(token_id in special) for token_id in sample.token_ids],
        "token_generated": sample.is_generated,
        "token_loss_mask": sample.loss_mask,
        "token_advantages": _short(sample.advantages),
        "token_entropies": _short(sample.entropies),
        "generation_logprobs": _short(sample.generator_logprobs),
        "prev_logprobs": None if sample.old_logprobs is None else _short(sample.old_logprobs),
    }


def token_rows(
    samples: Sequence[tuple[RolloutInfo, TokenSample]], tokenizer: PreTrainedTokenizerBase
) -> dict[str, object]:
    """Keys of a rollout's tokens: its first sequence's, others' in `further`, and in each the turns left untrained."""
    spans = [[(turn.start, turn.stop, turn.reason) for turn in info.untrained] for info, _ in samples]
    first, *further = [
        token_row(sample, tokenizer) | {"token_untrained": own} for (_, sample), own in zip(samples, spans, strict=True)
    ]
    return first | ({"further": further} if further else {})


def _short(values: Sequence[float]) -> list[float | None]:
    return [float(f"{value:.9g}") if math.isfinite(value) else None for value in values]


def _mask_reason(verdict: Verdict, sequence: TrainSequence | None) -> str | None:
    """Reason why the driver keeps a rollout out of the loss; None if it does not."""
    if not verdict.is_valid:
        return f"{verdict.status}: {verdict.reason}" if verdict.reason else verdict.status
    return "grpo.overlong_filtering" if sequence is not None and not sequence.is_valid else None


def drop_old_step_data(attempts: Path, step: int, config: LoggerConfig) -> None:
    """Removes files of rollouts of any attempt of a run that are `logger.rollouts_keep_steps` or more before `step`."""
    if config.rollouts_keep_steps is None:
        return
    for path in attempts.glob("exp_*/*_data_step*.jsonl.gz"):
        if int(re.findall(r"\d+", path.name)[-1]) <= step - config.rollouts_keep_steps:
            path.unlink(missing_ok=True)


def best_and_worst(groups: Sequence[RolloutGroup], count: int) -> list[Sample]:
    """`count` rollouts by reward: the best half, then the worst, a middle one if `count` is odd; all if no more."""
    samples = [
        Sample(
            group.prompt.text,
            as_text(verdict.conversations) or verdict.text,
            group.prompt.expected_answer,
            verdict.reward,
        )
        for group in groups
        for verdict in group.verdicts
    ]
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
