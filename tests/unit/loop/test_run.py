# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mrl.loop import learning, run
from mrl.loop.run import Budget, Step, Stopped, TooManySkipped, stop_of
from mrl.metrics import SKIPPED_IN_A_ROW, metrics_of_passes
from mrl.signals import STOP_SIGNALS, Listener
from mrl.store.summary import Clock
from mrl.types import RunState
from tests.unit.stories import as_story


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


def test_a_signal_before_the_first_step_promises_no_checkpoint(caplog: pytest.LogCaptureFixture):
    for has_steps, num_steps, said in (
        (False, 0, "the run ends; it saves a checkpoint once its first step is done"),
        (False, 1, "the run saves a checkpoint and ends"),
        (True, 0, "the run saves a checkpoint and ends"),
    ):
        listener = Listener()
        budget = Budget(None, started=time.monotonic(), listener=listener)
        budget.begin(saves=True, has_steps=has_steps)
        for _ in range(num_steps):
            budget.count_step()
        with caplog.at_level(logging.INFO):
            listener.take(signal.SIGTERM, 0)
        assert caplog.messages[-1] == f"SIGTERM: {said}"


def test_a_signal_ends_a_budget_at_the_next_step_and_at_once_where_it_may():
    for number in STOP_SIGNALS:
        listener = Listener()
        budget = Budget(None, started=time.monotonic(), listener=listener)
        budget.begin(saves=True, has_steps=True)
        budget.check()
        assert not budget.is_over
        listener.take(number, 0)
        assert budget.is_over
        with pytest.raises(Stopped):
            budget.check()


@pytest.mark.parametrize(
    ("error", "record_steps", "skipped", "recorded"),
    [
        (
            "policy rank 0 failed in train_step: the train step gave loss nan: not finite; no parameter was changed",
            0,
            0.0,
            ["loss nan"],
        ),
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
    monkeypatch.setattr(learning, "record_step", lambda *_, problem, **__: problem)
    monkeypatch.setattr(run, "write_step", lambda folder, problem, keeps: found.append(problem))
    parts = SimpleNamespace(
        config=SimpleNamespace(
            logger=SimpleNamespace(record_steps=record_steps), policy=SimpleNamespace(max_skipped_steps=10)
        ),
        folder=SimpleNamespace(path=Path()),
        session=None,
    )
    parts._record = partial(run.Run._record, cast("run.Run", parts))

    def step() -> None:
        with run.Run.recorded(cast("run.Run", parts), Step(3, Clock()), []) as metrics:
            metrics["train/num_skipped_updates"] = skipped
            if error:
                raise RuntimeError(error)

    if error:
        with pytest.raises(RuntimeError, match="failed in train_step"):
            step()
    else:
        step()
    assert len(found) == len(recorded) and all(part in problem for part, problem in zip(recorded, found, strict=True))


def skipping_steps(state: RunState, limit: int, skipped: list[float], *, is_over: bool = False) -> None:
    """Makes steps with so many skipped updates each, as the loop does."""
    parts = SimpleNamespace(
        config=SimpleNamespace(logger=SimpleNamespace(record_steps=0), policy=SimpleNamespace(max_skipped_steps=limit)),
        folder=SimpleNamespace(path=Path("run")),
        is_over=is_over,
        _record=lambda *_: None,
    )
    for count in skipped:
        step = Step.after(state)
        with run.Run.recorded(cast("run.Run", parts), step, []) as metrics:
            metrics["train/num_skipped_updates"] = count
        step.metrics |= metrics
        state.step, state.metrics = step.number, step.metrics
        run.Run.check_skipped(cast("run.Run", parts), step)


def test_a_run_whose_every_step_is_skipped_ends_also_over_several_attempts(caplog: pytest.LogCaptureFixture):
    state = RunState()
    skipping_steps(state, 3, [1, 1, 0, 2, 1])
    assert state.metrics[SKIPPED_IN_A_ROW] == 2 and "in a row: 2 of at most policy.max_skipped_steps=3" in caplog.text
    for step in (6, 7):  # of two attempts: neither counts anew, and each looks at one more step
        state = RunState(step - 1, 0, json.loads(json.dumps(state.metrics)))
        with pytest.raises(Stopped) as caught:
            skipping_steps(state, 3, [1, 1])
        cause = caught.value.__cause__
        assert isinstance(
            cause, TooManySkipped
        ) and f"step {step}: loss or gradient of {step - 3} steps in a row" in str(cause)
        assert "policy.max_skipped_steps=3 ends the run: look at the batches in run/recorded" in str(cause)
    skipping_steps(state, 3, [1], is_over=True)  # which a signal ends, or which has made its last step
    skipping_steps(state, 3, [0, 1, 1])
    skipping_steps(state, 9, [1, 1])


def test_skipped_updates_of_all_passes_are_counted():
    updates = [{"train/loss": float(index), "train/num_skipped_updates": float(index < 3)} for index in range(4)]
    assert metrics_of_passes(updates, 2) == {"train/loss": 2.5, "train/num_skipped_updates": 3.0}


def test_a_stop_in_a_task_group_is_one():
    stop = Stopped()
    nested = BaseExceptionGroup("outer", [BaseExceptionGroup("inner", [stop])])
    assert stop_of(stop) is stop and stop_of(nested) is stop
    assert stop_of(ExceptionGroup("", [stop, ValueError()])) is None and stop_of(ValueError()) is None


@as_story
async def test_engines_make_room_only_for_a_save_that_is_due():
    rooms, saved = list[bool](), list[int]()

    @asynccontextmanager
    async def room(*, is_needed: bool) -> AsyncIterator[None]:
        rooms.append(is_needed)
        yield

    saver = SimpleNamespace(
        finish=lambda: None, lacks=lambda state: state.step > 2, save_last=lambda state: saved.append(state.step)
    )
    for step, enabled in ((2, True), (3, False), (3, True)):
        config = SimpleNamespace(checkpointing=SimpleNamespace(enabled=enabled))
        supplier = SimpleNamespace(session=SimpleNamespace(room=room))
        now = run.Run(*cast(Any, (config, None, supplier, saver, None)), last_step=9)
        async with now.saved(RunState(step=step)):
            raise Stopped
        assert now.is_over
    assert (rooms, saved) == ([False], [3])
