# SPDX-License-Identifier: Apache-2.0
import time

import pytest

from mrl.store.summary import Clock


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
