"""Metrics of a run: one JSON object a step in `metrics.jsonl`, and TensorBoard."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class Logger(Protocol):
    """Where metrics go. Each logger is optional and works without a network."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records one step's metrics."""
        ...

    def close(self) -> None:
        """Flushes what is buffered."""
        ...


class JsonlLogger:
    """One line per step, flushed at once."""

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
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = [line for line in lines if _step_of(line) <= step]
    path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    return any(_step_of(line) == step for line in kept)


def _step_of(line: str) -> float:
    """The step of a line; a torn last line counts as beyond every checkpoint."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


class TensorBoardLogger:
    """TensorBoard event files, under `<folder>/tensorboard`."""

    def __init__(self, folder: Path) -> None:
        # Imported here: it takes a second and is wanted only where tensorboard_enabled.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()
