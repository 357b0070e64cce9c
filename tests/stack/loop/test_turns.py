# SPDX-License-Identifier: Apache-2.0
"""Rollouts of two turns in the real loop: an environment that answers, engines that go on, ranks that train on them."""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mrl.envs.task import Task
from mrl.types import Verdict
from tests.drivers import train_step
from tests.stack.loop.conftest import CoinToss, LiveRun


class Again(CoinToss):
    """Answers every first turn; what is said then is judged by a coin."""

    async def judge(self, task: Task) -> Verdict:
        again = ({"role": "tool", "content": "again"},)
        return replace(await super().judge(task), observation=again if len(task.turns) == 1 else ())


def set_turns(actor, max_turns: int, environment: object) -> None:
    actor.max_turns = max_turns
    actor.scorer.environments["math"] = environment


@pytest.fixture
def two_turns(live: LiveRun) -> Iterator[None]:
    """Runs as with grpo.max_rollout_turns=2, and with letters for stop strings: a random model says one soon."""
    run, sampling = live.run, live.run.supplier.queue._sampling
    run.supplier.session.rewards.apply(set_turns, 2, Again())
    run.supplier.session.rewards.decides = True
    run.supplier.queue._sampling = replace(sampling, stop_strings=tuple(string.ascii_letters))
    yield
    run.supplier.queue._sampling = sampling
    run.supplier.session.rewards.decides = False
    run.supplier.session.rewards.apply(set_turns, 1, CoinToss())


def set_room(actor, max_model_len: int) -> int:
    """Returns what it was."""
    before, actor.max_model_len = actor.max_model_len, max_model_len
    return before


def test_a_rollout_whose_next_turn_does_not_fit_is_truncated(live: LiveRun, two_turns: None):
    train_step(live.run, live.state)
    assert live.state.metrics["rollout/truncated_fraction"] < 1.0
    (before,) = live.run.supplier.session.rewards.apply(set_room, 1)
    train_step(live.run, live.state)
    live.run.supplier.session.rewards.apply(set_room, before)
    assert live.state.metrics["rollout/math/turns"] == live.state.metrics["rollout/truncated_fraction"] == 1.0


def test_both_turns_are_trained_on_and_the_observation_is_not(live: LiveRun, two_turns: None):
    train_step(live.run, live.state)
    metrics = live.state.metrics
    assert 1.5 < metrics["rollout/math/turns"] <= 2.0
    assert metrics["rollout/failed"] == 0 and live.run.supplier.session.rewards.num_undecided == 0
    # Trainer and generator agree on every token of both turns; a token of the environment, of logprob 0, would stand
    # out.
    assert metrics["train/token_mult_prob_error"] <= 1.001
    assert metrics["train/mean_abs_dlogp"] < 1e-5
