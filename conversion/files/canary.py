"""Checks that two processes see the same folder: one writes a file, the other must find and answer it. Standard library only."""

from __future__ import annotations

import time
from pathlib import Path

from conversion.files.owners import owned_name

# Network file systems may show a new name late.
PATIENCE_S = 20.0
POLL_S = 0.05

CANARIES = "canaries"


def release_canary(root: Path) -> Path:
    """Creates a file below `root` for other processes to find and answer; its path.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = root / CANARIES
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / owned_name("canary")
    path.write_text(path.name, encoding="utf-8")
    return path


def answer_canary(canary: Path, answer: str, *, patience_s: float = PATIENCE_S) -> bool:
    """Whether this process finds the canary and can write an empty file named `answer` next to it."""
    if not _appears(canary, patience_s) or canary.read_text(encoding="utf-8") != canary.name:
        return False
    try:
        _answer_file(canary, answer).touch()
    except OSError:
        return False
    return True


def is_answered(canary: Path, answer: str, *, patience_s: float = PATIENCE_S) -> bool:
    """Whether this process sees the answer of another one."""
    return _appears(_answer_file(canary, answer), patience_s)


def retire_canary(canary: Path) -> None:
    """Removes the canary and its answers."""
    for path in [*canary.parent.glob(f"{canary.name}-*"), canary]:
        path.unlink(missing_ok=True)


def _answer_file(canary: Path, answer: str) -> Path:
    return canary.with_name(f"{canary.name}-{answer}")


def _appears(path: Path, patience_s: float) -> bool:
    end = time.monotonic() + patience_s
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True
