"""Wall time by phase of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up seconds by phase; `metrics()` gives `time/<phase>` and `time/total` since the clock was made.

    Of work that began beside earlier phases, `time/<phase>` is the part that the run waited for, and `time/<phase>_hidden` the rest.
    """

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._work: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time inside the `with` block towards `name`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    def overlap(self, name: str, work_s: float) -> None:
        """Notes that the work of phase `name` took `work_s` in all, some of it during other phases."""
        self._work[name] = self._work.get(name, 0.0) + work_s

    def seconds(self, name: str) -> float:
        """Seconds counted towards `name` so far."""
        return self._seconds[name]

    def metrics(self) -> dict[str, float]:
        """Seconds by phase, hidden and in all."""
        hidden = {f"time/{name}_hidden": max(0.0, work_s - self._seconds[name]) for name, work_s in self._work.items()}
        exposed = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        return exposed | hidden | {"time/total": time.monotonic() - self._start}
