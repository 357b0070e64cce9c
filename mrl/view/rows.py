# SPDX-License-Identifier: Apache-2.0
"""Lines of a run's JSONL files, however an attempt ended."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TypeAlias

from conversion.files.reading import open_file

Row: TypeAlias = Mapping[str, float | None]
"""The metrics of one step; None where the value was not finite."""

METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
METRIC_KEYS = {"step"}
SAMPLE_KEYS = {"step", "split", "prompt", "text", "extracted", "expected", "reward", "status"}


def read_rows(path: Path, keys: Set[str], *, last_bytes: int | None = None) -> tuple[list[dict], int]:
    """The objects of a file that have these keys, and the number of other lines, which a full disk or a power cut has torn."""
    found, num_torn, lines = [], 0, list[bytes]()
    if path.exists():
        with os.fdopen(open_file(path), "rb") as file:
            start = max(0, path.stat().st_size - last_bytes) if last_bytes else 0
            file.seek(start)
            lines = file.read().splitlines()[1 if start else 0 :]
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and keys <= row.keys():
            found.append(row)
        else:
            num_torn += 1
    return found, num_torn
