"""`metrics.jsonl`: one JSON object a step, and what a resumed run does to it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path


class JsonlLogger:
    """One line per step, flushed at once. After an error the next line brings those that did not reach the disk."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes `{"step": step, ...}`; a value that is not finite is written as null, which JSON has."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def drop_later_steps(path: Path, step: int) -> bool:
    """Drops lines of steps after `step` from a file of JSON lines: they are run again. Returns whether `step` itself has a line."""
    lines = _lines(path)
    kept = [line for line in lines if _step_of(line) <= step]
    path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    return any(_step_of(line) == step for line in kept)


def last_step_in(path: Path) -> int:
    """The last step with a whole line; -1 if there is none."""
    steps = [step for line in _lines(path) if (step := _step_of(line)) < math.inf]
    return int(max(steps, default=-1))


def _lines(path: Path) -> list[str]:
    # A power cut may leave anything; our lines are ASCII.
    return path.read_text(encoding="ascii", errors="replace").splitlines() if path.exists() else []


def _step_of(line: str) -> float:
    """The step of a line; a torn last line counts as beyond every checkpoint."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
