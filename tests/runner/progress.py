# SPDX-License-Identifier: Apache-2.0
"""A file of events that pytest writes while it runs, one JSON object a line, and what they add up to."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Progress:
    """Progress of a run of pytest."""

    num_tests: int = 0
    current: str = ""
    """Node id of the test under way."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """passed, failed, skipped -> tests."""
    failed: list[str] = field(default_factory=list)
    """Node ids."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason -> tests."""

    @property
    def num_done(self) -> int:
        return self.outcomes.total()


class EventWriter:
    """Writes events to a file that another process reads; without a file, nothing."""

    def __init__(self, path: str | None) -> None:
        self._file = open(path, "a", encoding="utf-8", buffering=1) if path else None  # noqa: SIM115

    def write(self, **event: object) -> None:
        """Appends one event; a line is whole, or not there."""
        if self._file:
            self._file.write(json.dumps(event) + "\n")

    def close(self) -> None:
        if self._file:
            self._file.close()


def read_progress(path: Path) -> Progress:
    """The sum of the events in `path` so far; an unfinished last line is left for the next time."""
    progress = Progress()
    if not path.exists():
        return progress
    outcomes: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        event = json.loads(line)
        if "collected" in event:
            progress.num_tests = event["collected"]
        elif "outcome" not in event:
            progress.current = event["test"]
        else:
            # A test that passed may still fail in its teardown.
            outcomes[event["test"]] = max(
                outcomes.get(event["test"], ""), event["outcome"], key=("", "passed", "skipped", "failed").index
            )
            if event["outcome"] == "skipped":
                progress.skipped[event["reason"]] += 1
    progress.outcomes = Counter(outcomes.values())
    progress.failed = [test for test, outcome in outcomes.items() if outcome == "failed"]
    return progress
