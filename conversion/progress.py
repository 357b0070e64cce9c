# SPDX-License-Identifier: Apache-2.0
"""Progress of a conversion: counts bytes, and logs rate and time left."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)

Progress = Callable[[int, int, int], None]

REPORT_S = 5.0


class Report(Protocol):
    """Counts bytes as they are done."""

    def __call__(self, num_bytes: int, *, is_kept: bool = False) -> None:
        """Counts bytes; `is_kept`: an earlier attempt had converted them."""
        ...


def counter(progress: Progress | None, total: int) -> Report:
    """Adds up bytes and calls `progress` with the sums."""
    done = kept = 0

    def add(num_bytes: int, *, is_kept: bool = False) -> None:
        nonlocal done, kept
        done += num_bytes
        kept += num_bytes if is_kept else 0
        if progress is not None:
            progress(done, total, kept)

    return add


def log_progress(what: str) -> Progress:
    """Logs bytes, rate and time left every few seconds."""
    started = reported = time.monotonic()

    def report(done: int, total: int, kept: int) -> None:
        nonlocal reported
        now = time.monotonic()
        if now - reported < REPORT_S:
            return
        reported = now
        rate = (done - kept) / (now - started)
        logger.info(
            "%s: %.2f of %.2f GB (%d %%), %.2f GB/s, %.0f s left", what, done / 1e9, total / 1e9,
            100 * done // max(total, 1), rate / 1e9,
            (total - done) / max(rate, 1),
        )  # fmt: skip

    return report
