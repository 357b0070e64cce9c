# SPDX-License-Identifier: Apache-2.0
"""The tests' one clock: waits for conditions, with a limit that only a hang reaches, and growth of processor time.

`tests/unit/test_clocks.py` refuses comparisons with a clock, and limits in seconds, anywhere else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

PATIENCE = float(os.environ.get("MRL_TEST_PATIENCE", "1"))
"""Factor on every limit of the tests, for hosts that are very slow."""
HANG_S = 300.0 * PATIENCE
"""Limit of a wait that ends by itself on a sound host, however slow; a test that reaches it hangs."""
SOON_S = 0.2
"""Deadline that passes, because whoever has it does or awaits what never ends. Never for work that must make it."""
NUM_TRIES = 10
NEGLIGIBLE_S = 0.005
"""Processor time below which caches of the host decide; what is quadratic takes more for the sizes of the tests."""


def wait_until(
    condition: Callable[[], object],
    what: str,
    limit_s: float = HANG_S,
    *,
    explain: Callable[[], object] = str,
    longest_pause_s: float = 0.05,
) -> None:
    """Returns when `condition` is true; after `limit_s` AssertionError names `what`, with what `explain` says then."""
    end = time.monotonic() + limit_s
    pause_s = 0.001
    while not condition():
        assert time.monotonic() < end, (
            f"no {what} within {limit_s:g} s (MRL_TEST_PATIENCE={PATIENCE:g} scales this) {explain()}"
        )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_pause_s)


class Clock:
    """A clock to put in the place of a module's `time`: only the test, and who sleeps by it, moves it on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1_700_000_000.0 + self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def growth(run: Callable[[int], object], size: int) -> float:
    """Processor time of `run(4 * size)` by that of `run(size)`: 4 if it is linear, 16 if it is quadratic.

    Other work on the host only adds to a time, and so the least of several tries counts; they end early once they look
    linear.
    """
    run(max(1, size // 16))  # what is made once: caches, compiled patterns
    small_s, large_s = float("inf"), float("inf")
    for _ in range(NUM_TRIES):
        small_s, large_s = min(small_s, _processor_s(run, size)), min(large_s, _processor_s(run, 4 * size))
        if large_s < max(6 * small_s, NEGLIGIBLE_S):
            break
    return large_s / max(small_s, NEGLIGIBLE_S / 4)


def _processor_s(run: Callable[[int], object], size: int) -> float:
    started = time.process_time()
    run(size)
    return time.process_time() - started
