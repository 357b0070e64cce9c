# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

import pytest

from mrl.envs.pool import Job, RewardPool
from mrl.envs.scorer import Answer, Load, Scorer
from mrl.envs.task import Environment, Task
from mrl.types import Verdict
from tests.unit.envs.pools import Childless
from tests.waiting import HANG_S, wait_until

HOSTILE = Environment("mrl.envs.own:make", {"function": "tests.unit.envs.hostile:score"}, allowances=("processes",))


class Gate(Childless):
    """Judges when the test says so, and `quick` at once; `rounds` has the texts that it got together."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.is_open = is_open
        self.rounds: list[list[str]] = []

    def submit(self, tasks: Sequence[Task]) -> list[Job]:
        self.rounds.append([task.text for task in tasks])
        return super().submit(tasks)

    async def judge(self, task: Task) -> Verdict:
        while not self.is_open and task.text != "quick":
            await asyncio.sleep(0.01)
        return Verdict(float(task.text == task.expected), True, "ok", "", task.text)


@contextmanager
def scoring(environments: Mapping[str, Childless], *, masks: bool = True, started: Sequence[str] = ()) -> Iterator[Scorer]:
    async def build(name: str) -> RewardPool:
        return cast(RewardPool, environments[name])

    scorer = Scorer(build, masks_flagged=masks)
    scorer.start(started, timeout_s=HANG_S)
    yield scorer
    scorer.close()


def answers(*texts: str, env_name: str = "gate") -> list[Answer]:
    return [Answer(f"id of {text}", env_name, Task((text,), "b")) for text in texts]


def take_all(scorer: Scorer, num_answers: int) -> dict[str, Verdict]:
    verdicts: dict[str, Verdict] = {}
    while len(verdicts) < num_answers:
        verdicts |= scorer.take(HANG_S, gather_s=HANG_S)[0]
    return verdicts


def test_answers_are_handed_in_while_another_is_judged():
    gate = Gate()
    with scoring({"gate": gate}, started=["gate"]) as scorer:
        scorer.submit(answers("a"))
        # Neither of these waits for the first.
        scorer.submit(answers("b"))
        scorer.submit(answers("c", "d"))
        wait_until(lambda: gate.rounds == [["a"], ["b"], ["c", "d"]], "answers")
        gate.is_open = True
        verdicts, load = scorer.take(HANG_S, gather_s=HANG_S)
        assert {name: verdict.reward for name, verdict in verdicts.items()} == {f"id of {text}": float(text == "b") for text in "abcd"}
        assert load.seconds > 0
        assert scorer.take(0.0) == ({}, Load())


def test_a_verdict_is_given_before_others_and_a_call_ends_the_wait_of_an_earlier_one():
    gate = Gate()
    with scoring({"gate": gate}) as scorer:
        scorer.submit(answers("a", "quick"))
        assert set(scorer.take(HANG_S)[0]) == {"id of quick"}
        assert scorer.take(0.0)[0] == {}
        earlier = asyncio.run_coroutine_threadsafe(scorer._take(HANG_S, 0.0), scorer._loop)
        wait_until(lambda: scorer._num_calls == 3, "call that waits")
        assert scorer.take(0.0)[1].seconds > 0
        assert earlier.result(HANG_S)[0] == {}
        gate.is_open = True
        assert set(scorer.take(HANG_S)[0]) == {"id of a"}


def test_more_slow_rollouts_than_workers_are_all_judged():
    """Ten times as many as workers: none is masked, and the waits of all are counted. `test_pool.py` holds the deadline of each."""

    async def build(name: str) -> RewardPool:
        return await RewardPool(replace(HOSTILE, num_workers=2, timeout_s=HANG_S)).start()

    scorer = Scorer(build)
    scorer.start(["slow"], timeout_s=HANG_S)
    scorer.submit([Answer(str(index), "slow", Task(("nap",), str(index))) for index in range(20)])
    verdicts, load = scorer.take(HANG_S, gather_s=HANG_S)
    assert [verdict.status for verdict in verdicts.values()] == ["ok"] * 20
    assert load.num_judged == load.num_begun == 20 == load.longest_queue
    # A nap takes at least 0.05 s: nine pairs of them before the last, and on average as many before a rollout as the half of that.
    assert load.longest_wait_s > 9 * 0.05 and load.wait_s > 20 * 4.5 * 0.05
    # Those that are remembered have waited for nobody.
    scorer.submit([Answer("again", "slow", Task(("nap",), "7"))])
    verdicts, load = scorer.take(HANG_S)
    assert (set(verdicts), load.num_judged, load.num_begun) == ({"again"}, 0, 0)
    scorer.close()


def test_what_hangs_is_not_waited_for_longer_than_asked():
    with scoring({"gate": Gate()}) as scorer:
        scorer.submit(answers("a"))
        assert scorer.take(0.01)[0] == {}


def test_each_environment_judges_its_own_and_its_error_reaches_the_caller():
    one, other = Gate(is_open=True), Gate()
    with scoring({"one": one, "other": other}, started=["one"]) as scorer:
        scorer.submit(answers("a", env_name="one") + answers("b", env_name="missing"))
        with pytest.raises(KeyError, match="missing"):
            while True:
                scorer.take(HANG_S)
        assert (one.rounds, other.rounds) == ([["a"]], [])


def test_environments_do_not_wait_for_each_other_and_start_when_needed():
    slow, quick = Gate(), Gate(is_open=True)
    with scoring({"slow": slow, "quick": quick}, started=["slow"]) as scorer:
        assert list(scorer.environments) == ["slow"]
        scorer.submit(answers("a", env_name="slow") + answers("b", env_name="quick"))
        assert set(scorer.take(HANG_S)[0]) == {"id of b"}
        assert list(scorer.environments) == ["slow", "quick"] and scorer.take(0.0)[0] == {}
        slow.is_open = True
        assert {name: verdict.text for name, verdict in take_all(scorer, 1).items()} == {"id of a": "a"}


def test_a_rollout_that_is_not_scored_is_named(caplog: pytest.LogCaptureFixture):
    class Refusing(Childless):
        async def judge(self, task: Task) -> Verdict:
            return Verdict(0.0, False, "error", "", task.text, reason="the reward is nan")

    with scoring({"bad": Refusing()}) as scorer:
        scorer.submit([Answer("3/row:7/2", "bad", Task(("x",)))])
        scorer.take(HANG_S)
    assert all(words in caplog.text for words in ("3/row:7/2 (bad) is not scored", "the reward is nan"))


@pytest.mark.parametrize("masks", [True, False])
def test_flagged_rollouts_are_masked_if_the_config_says_so(masks: bool):
    class Flagging(Childless):
        async def judge(self, task: Task) -> Verdict:
            return Verdict(1.0, True, "ok", "", task.text, flags=("mask_sample",) if task.text == "a" else ())

    with scoring({"gate": Flagging()}, masks=masks) as scorer:
        scorer.submit(answers("a", "b"))
        verdicts = take_all(scorer, 2)
    assert [verdicts[f"id of {text}"].is_valid for text in "ab"] == [not masks, True]
