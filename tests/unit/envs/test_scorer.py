# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from mrl.envs.scorer import Answer, Scorer
from mrl.envs.task import Task
from mrl.types import Verdict

LIMIT_S = 20.0


class Gate:
    """An environment whose first round ends when the test says so; `rounds` has the texts of each."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.rounds: list[list[str]] = []
        self.gave_up = False

    def score(self, tasks: Sequence[Task], *, gives_up: Callable[[], bool]) -> list[Verdict]:
        self.rounds.append([task.text for task in tasks])
        self.begun.set()
        assert self.may_end.wait(LIMIT_S)
        self.gave_up = gives_up()
        return [Verdict(float(task.text == task.expected), True, "ok", "", task.text) for task in tasks]


def answers(*texts: str, env_name: str = "gate") -> list[Answer]:
    return [Answer(f"id of {text}", env_name, Task((text,), "b")) for text in texts]


def test_answers_are_handed_in_while_another_hangs_and_then_scored_together():
    gate = Gate()
    scorer = Scorer({"gate": gate}.__getitem__, ["gate"], timeout_s=LIMIT_S)
    scorer.submit(answers("a"))
    assert gate.begun.wait(LIMIT_S)
    # Neither of these waits for the first.
    scorer.submit(answers("b"))
    scorer.submit(answers("c", "d"))
    assert gate.rounds == [["a"]]
    gate.may_end.set()
    verdicts, seconds = scorer.collect(patience_s=LIMIT_S, timeout_s=LIMIT_S)
    assert gate.rounds == [["a"], ["b", "c", "d"]]
    assert {name: verdict.reward for name, verdict in verdicts.items()} == {f"id of {text}": float(text == "b") for text in "abcd"}
    assert seconds > 0 and not gate.gave_up
    assert scorer.collect(patience_s=LIMIT_S, timeout_s=LIMIT_S) == ({}, 0.0)
    scorer.close()


def test_patience_counts_from_the_end_of_the_generation():
    gate = Gate()
    gate.may_end.set()
    scorer = Scorer({"gate": gate}.__getitem__, ["gate"], timeout_s=LIMIT_S)
    scorer.submit(answers("a"))
    scorer.collect(patience_s=LIMIT_S, timeout_s=LIMIT_S)
    assert not gate.gave_up
    gate.may_end.clear()
    scorer.submit(answers("a"))
    threading.Timer(0.05, gate.may_end.set).start()
    scorer.collect(patience_s=0.0, timeout_s=LIMIT_S)
    assert gate.gave_up
    scorer.close()


def test_a_round_that_never_ends_is_an_error():
    gate = Gate()
    scorer = Scorer({"gate": gate}.__getitem__, ["gate"], timeout_s=LIMIT_S)
    scorer.submit(answers("a"))
    with pytest.raises(TimeoutError):
        scorer.collect(patience_s=0.0, timeout_s=0.01)
    gate.may_end.set()
    scorer.close()


def test_each_environment_judges_its_own_and_its_error_reaches_the_caller():
    one, other = Gate(), Gate()
    one.may_end.set()
    scorer = Scorer({"one": one, "other": other}.__getitem__, ["one"], timeout_s=LIMIT_S)
    scorer.submit(answers("a", env_name="one") + answers("b", env_name="missing"))
    with pytest.raises(KeyError, match="missing"):
        scorer.collect(patience_s=LIMIT_S, timeout_s=LIMIT_S)
    assert (one.rounds, other.rounds) == ([["a"]], [])
    scorer.close()


def test_environments_do_not_wait_for_each_other_and_start_when_needed():
    slow, quick = Gate(), Gate()
    quick.may_end.set()
    built: list[str] = []

    def build(name: str) -> Gate:
        built.append(name)
        return {"slow": slow, "quick": quick}[name]

    scorer = Scorer(build, ["slow"], timeout_s=LIMIT_S, keeps_fresh=True)
    assert built == ["slow"]
    scorer.submit(answers("a", env_name="slow") + answers("b", env_name="quick"))
    assert set(scorer.take_fresh(LIMIT_S)) == {"id of b"}
    assert built == ["slow", "quick"] and scorer.take_fresh(0.0) == {}
    slow.may_end.set()
    assert {name: verdict.text for name, verdict in scorer.take_fresh(LIMIT_S).items()} == {"id of a": "a"}
    assert set(scorer.collect(patience_s=LIMIT_S, timeout_s=LIMIT_S)[0]) == {"id of a", "id of b"}
    scorer.close()


def test_an_environment_that_does_not_start_is_told_to_whoever_waits_for_verdicts():
    scorer = Scorer({}.__getitem__, [], timeout_s=LIMIT_S)
    scorer.submit(answers("a", env_name="missing"))
    with pytest.raises(KeyError, match="missing"):
        for _ in range(200):
            scorer.take_fresh(0.1)
    scorer.close()


def test_a_rollout_that_is_not_scored_is_named(caplog: pytest.LogCaptureFixture):
    class Refusing:
        def score(self, tasks: Sequence[Task], *, gives_up: Callable[[], bool]) -> list[Verdict]:
            return [Verdict(0.0, False, "error", "", task.text, reason="the reward is nan") for task in tasks]

    scorer = Scorer({"bad": Refusing()}.__getitem__, ["bad"], timeout_s=LIMIT_S)
    scorer.submit([Answer("3/row:7/2", "bad", Task(("x",)))])
    scorer.collect(patience_s=LIMIT_S, timeout_s=LIMIT_S)
    assert all(words in caplog.text for words in ("3/row:7/2 (bad) is not scored", "the reward is nan"))
    scorer.close()


@pytest.mark.parametrize("masks", [True, False])
def test_flagged_rollouts_are_masked_if_the_config_says_so(masks: bool):
    class Flagging:
        def score(self, tasks: Sequence[Task], *, gives_up: Callable[[], bool]) -> list[Verdict]:
            return [Verdict(1.0, True, "ok", "", task.text, flags=("mask_sample",) if task.text == "a" else ()) for task in tasks]

    scorer = Scorer({"gate": Flagging()}.__getitem__, [], timeout_s=LIMIT_S, masks_flagged=masks)
    scorer.submit(answers("a", "b"))
    verdicts, _ = scorer.collect(patience_s=LIMIT_S, timeout_s=LIMIT_S)
    assert [verdicts[f"id of {text}"].is_valid for text in "ab"] == [not masks, True]
    scorer.close()
