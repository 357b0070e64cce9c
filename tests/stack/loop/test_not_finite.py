# SPDX-License-Identifier: Apache-2.0
"""A step with a NaN in a run that skips such updates: its batch is on disk, weights are as before, the run goes on."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mrl.cluster.verbs import PolicyVerbs
from mrl.store.rollout_files import RecordedStep, read_record
from tests.drivers import train_step
from tests.stack.loop.conftest import LiveRun


def poison(policy) -> None:
    if policy.dp_rank == 1:
        policy._batches[0].rows[0].advantages_T[:] = math.nan


def test_a_step_with_a_nan_is_recorded_and_skipped(
    live: LiveRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    run, state = live.run, live.state
    call = run.session.policies.call

    def poisoned(verb, *arguments, **options):
        if verb is PolicyVerbs.train_step:
            live.on_ranks(poison)
        return call(verb, *arguments, **options)

    before = live.on_engines(lambda engine: engine.live_digest())
    with monkeypatch.context() as patch:
        patch.setattr(run.session.policies, "call", poisoned)
        train_step(run, state)
    assert state.metrics["train/num_skipped_updates"] == state.metrics["train/num_skipped_in_a_row"] == 1
    assert math.isnan(state.metrics["train/loss"])
    assert live.on_engines(lambda engine: engine.live_digest()) == before
    path = run.folder.path / "recorded" / f"not_finite_step_{state.step}.mrl"
    assert str(path) in caplog.text
    record = read_record(path, RecordedStep)
    sequences = [sequence.rollout for batch in record.batches for sequence in batch.sequences]
    computed = [of_batch[index] for of_batch in record.computed for index in range(len(of_batch))]
    trained = run.folder.ledger.state.trained[state.step]
    assert sorted({one.key for one in sequences}) == sorted(trained) and "skipped" in record.problem
    assert [len(tensors["old_logprobs"]) for _, tensors in computed] == [one.num_tokens for one in sequences]
    is_poisoned = [bool(np.isnan(tensors["advantages"]).any()) for _, tensors in computed]
    # By name of the rank: one that answers for the second data-parallel rank.
    assert (
        any(is_poisoned)
        and not all(is_poisoned)
        and {rank for (rank, _), bad in zip(computed, is_poisoned, strict=True) if bad} == {2}
    )
    train_step(run, state)
    assert state.metrics["train/num_skipped_updates"] == state.metrics["train/num_skipped_in_a_row"] == 0
    assert math.isfinite(state.metrics["train/loss"])
