# SPDX-License-Identifier: Apache-2.0
"""Dumps of rollouts, `logs/exp_*/*_data_stepN.jsonl.gz`, for the page."""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from conversion.files.reading import open_file, read_file
from mrl.config.conversations import read_conversations

NAME = re.compile(r"(train|val)_data_step(\d+)\.jsonl(?:\.gz)?")
SPLITS = {"train": "train", "val": "validation"}

NUM_INLINED_STEPS = 16
NUM_INLINED_PROMPTS = 8
NUM_EVALUATED_PROMPTS = 64
MAX_CHARACTERS = 4_000
MAX_CONVERSATION_CHARACTERS = 8_000
MAX_LINE_BYTES = 2**26
MAX_DUMP_BYTES = 2**32
INLINED_BYTES = 3 * 2**20
"""Limit of all texts in a page, compressed, so that the page of a long run stays below 8 MB."""


@dataclass(frozen=True)
class Dump:
    """The file of a step's rollouts."""

    name: str
    step: int
    split: str
    path: Path


def list_dumps(folder: Path) -> list[Dump]:
    """The dumps of a run by step, each from its last attempt."""
    found: dict[str, Dump] = {}
    for path in sorted((folder / "logs").glob("exp_*/*_data_step*.jsonl*")):
        if matched := NAME.fullmatch(path.name):
            name = f"{matched[1]}_data_step{matched[2]}"
            found[name] = Dump(name, int(matched[2]), SPLITS[matched[1]], path)
    return sorted(found.values(), key=lambda dump: (dump.step, dump.split))


def read_dump(path: Path, *, max_prompts: int | None = None) -> list[dict]:
    """The rollouts of a dump, or those of its first prompts, with long texts cut. What is torn or gone is left out."""
    rows: list[dict] = []
    prompts: set[str] = set()
    try:
        for row in _rows(path):
            prompts.add(str(row.get("prompt_id") or row["content"][0]))
            if max_prompts is not None and len(prompts) > max_prompts:
                break
            rows.append(row)
    except (OSError, EOFError, ValueError, zlib.error):
        # A disk may lose a file that a page still lists; a killed writer leaves none.
        return rows
    return rows


def _rows(path: Path) -> Iterator[dict]:
    with os.fdopen(open_file(path), "rb") as plain, gzip.open(plain) if path.suffix == ".gz" else plain as file:
        num_bytes = 0
        # A few KB unpack to lines without an end.
        while num_bytes < MAX_DUMP_BYTES and (line := file.readline(MAX_LINE_BYTES)):
            num_bytes += len(line)
            try:
                row = json.loads(line.decode("utf-8", "replace"))
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and isinstance(row.get("content"), list) and len(row["content"]) == 2:
                yield _shown(row)


def _shown(row: dict) -> dict:
    """A row with long texts cut."""
    row = row | {"content": [_cut(str(text)) for text in row["content"]]}
    if found := read_conversations(row.pop("conversations", None), MAX_CONVERSATION_CHARACTERS):
        row["conversations"] = found
    return row


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + " …"


def sampled_dumps(dumps: Sequence[Dump]) -> dict[str, list[dict]]:
    """Rollouts of some steps from first to last, by dump name, within `INLINED_BYTES`. The newest steps come first."""
    chosen: list[Dump] = []
    for split in SPLITS.values():
        mine = [dump for dump in dumps if dump.split == split]
        places = (
            {round(i * (len(mine) - 1) / (NUM_INLINED_STEPS - 1)) for i in range(NUM_INLINED_STEPS)} if mine else set()
        )
        chosen += [mine[place] for place in places]
    found, left = {}, INLINED_BYTES
    for dump in sorted(chosen, key=lambda dump: -dump.step):
        rows = read_dump(dump.path, max_prompts=NUM_INLINED_PROMPTS)
        left -= len(zlib.compress(json.dumps(rows).encode(), 1))
        if left < 0:
            break
        found[dump.name] = rows
    return found


def read_evaluations(folder: Path) -> list[dict]:
    """The results of `mrl.evaluate` in a folder or its `evaluations`: name, metric, scores, and rows as in a dump."""
    found = []
    for path in sorted((*folder.glob("evaluations/*.json"), *folder.glob("*.json"))):
        try:
            results = json.loads(read_file(path))
            if isinstance(results, dict) and {"metric", "scores", "prompts"} <= results.keys():
                rows = list(_evaluated_rows(results["prompts"][:NUM_EVALUATED_PROMPTS]))
                found.append(
                    {"name": path.stem, "metric": results["metric"], "scores": results["scores"], "rows": rows}
                )
        except (OSError, ValueError, RecursionError, LookupError, TypeError):  # another program's
            continue
    return found


def _evaluated_rows(prompts: Sequence[dict]) -> Iterator[dict]:
    for prompt in prompts:
        for answer in prompt["answers"]:
            row = {
                "content": [prompt["prompt"], answer["text"]],
                "rewards": answer["reward"],
                "extracted": answer["extracted"],
            }
            row |= {
                "prompt_id": prompt["prompt_id"],
                "environment": prompt["environment"],
                "expected": prompt["expected"],
                "conversations": answer.get("conversations"),
            }
            yield _shown(row | {"masked": None if answer["status"] == "ok" else answer["status"]})
