# SPDX-License-Identifier: Apache-2.0
"""Files of a run's folder that others read: their names, and lines of JSONL files, however an attempt ended."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Literal, TypeAlias, cast

from conversion.files.reading import open_file, parse_json

Row: TypeAlias = Mapping[str, float | None]
"""The metrics of one step; None where the value was not finite."""

Json = dict[str, object]
State = Literal["running", "over"]

OWNER = "owner.json"
ABOUT = "about.json"
REFIT = "refit.json"
ENDED = "ended.json"
"""In an attempt's folder: its exit code, and how it ended."""
MASKED = "masked.json"
"""In an attempt's folder: the commonest reasons of each kind of its masked rollouts."""
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
MAX_STEPS = 2**53
METRIC_KEYS = {"step"}
SAMPLE_KEYS = {"step", "split", "prompt", "text", "extracted", "expected", "reward", "status"}


def attempts_of(folder: Path) -> list[Path]:
    """The folders of the attempts that have a config, in order."""
    found = [path.parent for path in folder.glob("logs/exp_*/config.yaml") if path.parent.name[4:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[4:]))


def setting(config: Mapping[str, object], path: str) -> object:
    """A value of a config by its dotted name; None if a section on the way is missing."""
    found: object = config
    for part in path.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def parse_row(line: bytes | str) -> dict | None:
    """The object of a line whose `step` counts steps; None for any other line."""
    try:
        row = parse_json(line, allows_nan=True)
    except ValueError:
        return None
    # True is an int.
    is_row = isinstance(row, dict) and type(step := row.get("step")) is int and 0 <= step < MAX_STEPS
    return cast(dict, row) if is_row else None


def _metrics(row: Row) -> dict:
    numbers = {
        name: value
        for name, value in row.items()
        if value is None or (isinstance(value, int | float) and value is not True)
    }
    return {name: value if value is not None and math.isfinite(value) else None for name, value in numbers.items()}


def read_rows(path: Path, keys: Set[str], *, last_bytes: int | None = None) -> tuple[list[dict], int]:
    """Objects of a file that have these keys, and the number of other lines, which a full disk or power cut tore."""
    found, num_torn, lines = [], 0, list[bytes]()
    if path.exists():
        with os.fdopen(open_file(path), "rb") as file:
            start = max(0, path.stat().st_size - last_bytes) if last_bytes else 0
            file.seek(start)
            lines = file.read().splitlines()[1 if start else 0 :]
    for line in lines:
        row = parse_row(line)
        if row is not None and keys <= row.keys():
            found.append(row if keys == SAMPLE_KEYS else _metrics(row))
        else:
            num_torn += 1
    return found, num_torn
