"""Wall time by phase of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Adds up seconds by phase; `metrics()` gives `time/<phase>` and `time/total` since the clock was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time inside the `with` block towards `name`."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    def seconds(self, name: str) -> float:
        """Seconds counted towards `name` so far."""
        return self._seconds[name]

    def metrics(self) -> dict[str, float]:
        """Seconds by phase, and in all."""
        return {f"time/{name}": seconds for name, seconds in self._seconds.items()} | {"time/total": time.monotonic() - self._start}
