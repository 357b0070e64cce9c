"""How far a conversion is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total) now and then."""

REPORT_S = 5.0


def counter(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Adds up numbers of bytes and tells `progress`."""
    done = 0

    def add(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, total)

    return add


def log_progress(what: str) -> Progress:
    """Logs a line with bytes, rate and time left every few seconds; nothing for what is done sooner."""
    started = reported = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal reported
        now = time.monotonic()
        if now - reported < REPORT_S:
            return
        reported = now
        rate = done / (now - started)
        logger.info(
            "%s: %.2f of %.2f GB (%d %%), %.2f GB/s, %.0f s left", what, done / 1e9, total / 1e9, 100 * done // max(total, 1), rate / 1e9,
            (total - done) / max(rate, 1),
        )  # fmt: skip

    return report
