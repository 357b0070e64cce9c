# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time

import pytest

from mrl.loop.run import Budget, Stopped
from mrl.signals import STOP_SIGNALS, Listener


def test_a_run_ends_before_the_step_that_would_end_too_late():
    now = time.monotonic()
    assert not Budget(None, started=now - 1e9).is_over
    assert Budget(100.0, started=now - 101).is_over
    budget = Budget(0.5, started=now - 0.2)
    assert not budget.is_over
    time.sleep(0.2)
    budget.count_step()
    # 0.4 s are gone, and a step takes 0.2 s.
    assert budget.is_over
    budget = Budget(10.0, started=now)
    budget.count_step()
    assert not budget.is_over


def test_a_signal_ends_a_budget_at_the_next_step_and_at_once_where_it_may():
    for number in STOP_SIGNALS:
        listener = Listener()
        budget = Budget(None, started=time.monotonic(), listener=listener)
        budget.begin(saves=True)
        budget.check()
        assert not budget.is_over
        listener.take(number, 0)
        assert budget.is_over
        with pytest.raises(Stopped):
            budget.check()
