# SPDX-License-Identifier: Apache-2.0
"""Steps where no rollout counts are warnings with reasons, change no weight, and end the run after some in a row."""

from __future__ import annotations

import pytest

from mrl.loop.run import Stopped
from mrl.loop.signal_watch import NoSignal
from tests.drivers import train_step
from tests.stack.loop.conftest import LiveRun


def threshold_of(policy, value: float | None) -> None:
    policy._config.grpo.seq_logprob_error_threshold = value


def test_steps_without_a_rollout_that_counts_end_the_run(
    live: LiveRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    run, state = live.run, live.state
    monkeypatch.setattr(run.config.rollouts, "max_masked_steps", 2)
    # No mean of exp(|difference|) is below 1: the ranks mask all sequences.
    monkeypatch.setattr(run.config.rollouts, "seq_logprob_error_threshold", 0.5)
    live.on_ranks(lambda policy: threshold_of(policy, 0.5))
    train_step(run, state)
    assert state.metrics["train/num_masked_steps"] == 1 and state.metrics["train/num_valid_tokens"] == 0
    assert (
        f"No signal in step {state.step}: none of its" in caplog.text
        and "because of: grpo.seq_logprob_error_threshold=0.5" in caplog.text
    )
    with pytest.raises(Stopped) as ended:
        train_step(run, state)
    assert isinstance(ended.value.__cause__, NoSignal) and "grpo.max_masked_steps=2 ends the run" in str(
        ended.value.__cause__
    )
    live.on_ranks(lambda policy: threshold_of(policy, None))
    assert run.is_over
    run.is_over = False  # the folder's tests share the run
    train_step(run, state)
    assert "train/num_masked_steps" not in state.metrics and state.metrics["train/num_valid_tokens"] > 0
