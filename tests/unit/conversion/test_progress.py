# SPDX-License-Identifier: Apache-2.0
"""Reports of a conversion's progress."""

from __future__ import annotations

import logging
import time

import pytest

from conversion.progress import counter, log_progress


def test_bytes_rate_and_time_left_are_told_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    add = counter(log_progress("there"), 8 * 10**9)
    with caplog.at_level(logging.INFO):
        # What is only kept says nothing of how fast the rest will go.
        add(4 * 10**9, is_kept=True)
        for _ in range(20):
            clock[0] += 1
            add(100_000_000)
    assert caplog.messages == [
        "there: 4.50 of 8.00 GB (56 %), 0.10 GB/s, 35 s left",
        "there: 5.00 of 8.00 GB (62 %), 0.10 GB/s, 30 s left",
        "there: 5.50 of 8.00 GB (68 %), 0.10 GB/s, 25 s left",
        "there: 6.00 of 8.00 GB (75 %), 0.10 GB/s, 20 s left",
    ]
