# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from mrl.envs.pool import Feed, RewardPool
from mrl.envs.scorer import Answer, Load, Scorer
from mrl.envs.task import Environment, Task
from mrl.types import Verdict
from tests.waiting import HANG_S

HOSTILE = Environment("mrl.envs.own:make", {"function": "tests.unit.envs.hostile:score"}, allowances=("processes",))


class Gate:
    """An environment whose first round ends when the test says so; `rounds` has the texts of each. It judges `quick` at once."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.rounds: list[list[str]] = []

    def score(self, tasks: Sequence[Task], feed: Feed) -> list[Verdict]:
        self.rounds.append([task.text for task in tasks])
        verdicts = [Verdict(float(task.text == task.expected), True, "ok", "", task.text) for task in tasks]
        for task, verdict in zip(tasks, verdicts, strict=True):
            if task.text == "quick":
                feed.tell(task, None)
                feed.tell(task, verdict)
        self.begun.set()
        assert self.may_end.wait(HANG_S)
        return verdicts


def answers(*texts: str, env_name: str = "gate") -> list[Answer]:
    return [Answer(f"id of {text}", env_name, Task((text,), "b")) for text in texts]


def test_answers_are_handed_in_while_another_hangs_and_then_scored_together():
    gate = Gate()
    scorer = Scorer({"gate": gate}.__getitem__, ["gate"], timeout_s=HANG_S)
    scorer.submit(answers("a"))
    assert gate.begun.wait(HANG_S)
    # Neither of these waits for the first.
    scorer.submit(answers("b"))
    scorer.submit(answers("c", "d"))
    assert gate.rounds == [["a"]]
    gate.may_end.set()
    scored = scorer.take(HANG_S, waits_for_all=True)
    assert gate.rounds == [["a"], ["b", "c", "d"]]
    assert {name: verdict.reward for name, verdict in scored.verdicts.items()} == {f"id of {text}": float(text == "b") for text in "abcd"}
    assert scored.seconds > 0
    after = scorer.take(HANG_S, waits_for_all=True)
    assert (after.verdicts, after.load) == ({}, Load())
    scorer.close()


def test_a_verdict_is_given_before_its_round_ends_and_those_that_wait_are_counted():
    gate = Gate()
    scorer = Scorer({"gate": gate}.__getitem__, ["gate"], timeout_s=HANG_S)
    scorer.submit(answers("a", "quick"))
    scored = scorer.take(HANG_S, waits_for_all=False)
    assert set(scored.verdicts) == {"id of quick"} and scored.seconds > 0
    assert (scored.load.longest_queue, scored.load.num_begun) == (2, 1)
    assert 0 < scored.load.wait_s == scored.load.longest_wait_s < HANG_S
    assert scorer.take(0.0, waits_for_all=True).load == Load(longest_queue=1)
    gate.may_end.set()
    assert set(scorer.take(HANG_S, waits_for_all=True).verdicts) == {"id of a"}
    scorer.close()


def test_a_round_takes_along_what_comes_while_it_lasts():
    class Hungry(Gate):
        def score(self, tasks: Sequence[Task], feed: Feed) -> list[Verdict]:
            verdicts = super().score(tasks, feed)
            for task in feed.more():
                feed.tell(task, Verdict(1.0, True, "ok", "", task.text))
            return verdicts

    hungry = Hungry()
    scorer = Scorer({"gate": hungry}.__getitem__, ["gate"], timeout_s=HANG_S)
    scorer.submit(answers("a"))
    assert hungry.begun.wait(HANG_S)
    scorer.submit(answers("c"))
    hungry.may_end.set()
    rewards = {name: verdict.reward for name, verdict in scorer.take(HANG_S, waits_for_all=True).verdicts.items()}
    assert rewards == {"id of a": 0.0, "id of c": 1.0} and hungry.rounds == [["a"]]
    scorer.close()


def test_more_slow_rollouts_than_workers_are_all_judged():
    """Ten times as many as workers: none is masked, and the waits of all are counted. `test_pool.py` holds the deadline of each."""

    def build(name: str) -> RewardPool:
        return RewardPool(replace(HOSTILE, num_workers=2, timeout_s=HANG_S))

    scorer = Scorer(build, ["slow"], timeout_s=HANG_S)
    scorer.submit([Answer(str(index), "slow", Task(("nap",), str(index))) for index in range(20)])
    scored = scorer.take(HANG_S, waits_for_all=True)
    assert [verdict.status for verdict in scored.verdicts.values()] == ["ok"] * 20
    assert scored.load.num_begun == 20 == scored.load.longest_queue
    # A nap takes at least 0.05 s: nine pairs of them before the last, and on average as many before a rollout as the half of that.
    assert scored.load.longest_wait_s > 9 * 0.05 and scored.load.wait_s > 20 * 4.5 * 0.05
    scorer.close()


def test_equal_answers_get_one_verdict_each():
    gate = Gate()
    gate.may_end.set()
    scorer = Scorer({"gate": gate}.__getitem__, ["gate"], timeout_s=HANG_S)
    scorer.submit([Answer(name, "gate", Task(("quick",))) for name in "xyz"])
    assert set(scorer.take(HANG_S, waits_for_all=True).verdicts) == {"x", "y", "z"}
    scorer.close()


def test_what_hangs_is_not_waited_for_longer_than_asked():
    gate = Gate()
    scorer = Scorer({"gate": gate}.__getitem__, ["gate"], timeout_s=HANG_S)
    scorer.submit(answers("a"))
    assert scorer.take(0.01, waits_for_all=True).verdicts == {}
    gate.may_end.set()
    scorer.close()


def test_each_environment_judges_its_own_and_its_error_reaches_the_caller():
    one, other = Gate(), Gate()
    one.may_end.set()
    scorer = Scorer({"one": one, "other": other}.__getitem__, ["one"], timeout_s=HANG_S)
    scorer.submit(answers("a", env_name="one") + answers("b", env_name="missing"))
    with pytest.raises(KeyError, match="missing"):
        while True:
            scorer.take(HANG_S, waits_for_all=True)
    assert one.begun.wait(HANG_S)
    assert (one.rounds, other.rounds) == ([["a"]], [])
    scorer.close()


def test_environments_do_not_wait_for_each_other_and_start_when_needed():
    slow, quick = Gate(), Gate()
    quick.may_end.set()
    built: list[str] = []

    def build(name: str) -> Gate:
        built.append(name)
        return {"slow": slow, "quick": quick}[name]

    scorer = Scorer(build, ["slow"], timeout_s=HANG_S)
    assert built == ["slow"]
    scorer.submit(answers("a", env_name="slow") + answers("b", env_name="quick"))
    assert set(scorer.take(HANG_S, waits_for_all=False).verdicts) == {"id of b"}
    assert built == ["slow", "quick"] and scorer.take(0.0, waits_for_all=False).verdicts == {}
    slow.may_end.set()
    scored = scorer.take(HANG_S, waits_for_all=True)
    assert {name: verdict.text for name, verdict in scored.verdicts.items()} == {"id of a": "a"}
    scorer.close()


def test_a_rollout_that_is_not_scored_is_named(caplog: pytest.LogCaptureFixture):
    class Refusing:
        def score(self, tasks: Sequence[Task], feed: Feed) -> list[Verdict]:
            return [Verdict(0.0, False, "error", "", task.text, reason="the reward is nan") for task in tasks]

    scorer = Scorer({"bad": Refusing()}.__getitem__, ["bad"], timeout_s=HANG_S)
    scorer.submit([Answer("3/row:7/2", "bad", Task(("x",)))])
    scorer.take(HANG_S, waits_for_all=True)
    assert all(words in caplog.text for words in ("3/row:7/2 (bad) is not scored", "the reward is nan"))
    scorer.close()


@pytest.mark.parametrize("masks", [True, False])
def test_flagged_rollouts_are_masked_if_the_config_says_so(masks: bool):
    class Flagging:
        def score(self, tasks: Sequence[Task], feed: Feed) -> list[Verdict]:
            return [Verdict(1.0, True, "ok", "", task.text, flags=("mask_sample",) if task.text == "a" else ()) for task in tasks]

    scorer = Scorer({"gate": Flagging()}.__getitem__, [], timeout_s=HANG_S, masks_flagged=masks)
    scorer.submit(answers("a", "b"))
    verdicts = scorer.take(HANG_S, waits_for_all=True).verdicts
    assert [verdicts[f"id of {text}"].is_valid for text in "ab"] == [not masks, True]
    scorer.close()
