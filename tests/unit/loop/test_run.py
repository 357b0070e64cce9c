# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from mrl.loop import run
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


@pytest.mark.parametrize(
    ("error", "record_steps", "skipped", "recorded"),
    [
        ("policy rank 0 failed in train_step: the train step gave loss nan: not finite; no parameter was changed", 0, 0.0, ["loss nan"]),
        ("policy rank 0 failed in train_step: CUDA error", 2, 0.0, []),  # ranks may hang
        ("", 0, 0.0, []),
        ("", 2, 0.0, [""]),
        ("", 0, 1.0, ["1 updates are skipped"]),
        ("", 2, 1.0, ["1 updates are skipped", ""]),
    ],
)
def test_a_step_is_recorded_before_the_run_ends_if_all_ranks_say_that_it_is_not_finite(
    monkeypatch: pytest.MonkeyPatch, error: str, record_steps: int, skipped: float, recorded: list[str]
):
    found: list[str] = []
    monkeypatch.setattr(run, "record_step", lambda *_, problem, **__: problem)
    monkeypatch.setattr(run, "write_step", lambda folder, problem, keeps: found.append(problem))
    parts = SimpleNamespace(
        config=SimpleNamespace(logger=SimpleNamespace(record_steps=record_steps)),
        supplier=SimpleNamespace(data=SimpleNamespace(pad_token_id=0)),
        folder=SimpleNamespace(path=Path()),
        session=None,
    )
    parts._record = partial(run.Run._record, cast("run.Run", parts))

    def step() -> None:
        with run.Run.recorded(cast("run.Run", parts), 3, []) as metrics:
            metrics["train/num_skipped_updates"] = skipped
            if error:
                raise RuntimeError(error)

    if error:
        with pytest.raises(RuntimeError, match="failed in train_step"):
            step()
    else:
        step()
    assert len(found) == len(recorded) and all(part in problem for part, problem in zip(recorded, found, strict=True))
