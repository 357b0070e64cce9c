import time

import pytest

from mrl.store.clock import Clock, TimeBudget


def test_hidden_is_the_work_of_a_phase_that_the_loop_did_not_wait_for():
    clock = Clock()
    with clock.phase("generation"):
        pass
    with clock.phase("reward"):
        time.sleep(0.02)
    clock.overlap("reward", 1.0)
    clock.overlap("reward", 2.0)
    metrics = clock.metrics()
    assert set(metrics) == {"time/generation", "time/reward", "time/reward_hidden", "time/total"}
    assert metrics["time/reward"] >= 0.02
    assert metrics["time/reward"] + metrics["time/reward_hidden"] == pytest.approx(3.0)


def test_work_that_is_less_than_the_wait_hides_nothing():
    clock = Clock()
    with clock.phase("reward"):
        time.sleep(0.01)
    clock.overlap("reward", 0.001)
    assert clock.metrics()["time/reward_hidden"] == 0.0


def test_a_run_ends_before_the_step_that_would_end_too_late():
    now = time.monotonic()
    assert not TimeBudget(None, started=now - 1e9).is_over
    assert TimeBudget(100.0, started=now - 101).is_over
    budget = TimeBudget(0.5, started=now - 0.2)
    assert not budget.is_over
    time.sleep(0.2)
    budget.count_step()
    # 0.4 s are gone, and a step takes 0.2 s.
    assert budget.is_over
    budget = TimeBudget(10.0, started=now)
    budget.count_step()
    assert not budget.is_over
