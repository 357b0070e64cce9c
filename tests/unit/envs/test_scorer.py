# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import pytest

from mrl.envs.scorer import RewardLoad, RewardPool, Scorer
from mrl.envs.task import Environment, Task
from mrl.types import Verdict
from tests.unit.envs.pools import Childless
from tests.unit.stories import as_story, settled
from tests.waiting import HANG_S

HOSTILE = Environment("mrl.envs.own:make", {"function": "tests.unit.envs.hostile:score"}, allowances=("processes",))


class Gate(Childless):
    """Judges when the test says so, and `quick` at once; `asked` has the texts that it got."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.is_open = asyncio.Event()
        self.asked: list[str] = []
        if is_open:
            self.is_open.set()

    async def judge(self, task: Task) -> Verdict:
        self.asked.append(task.text)
        if task.text != "quick":
            await self.is_open.wait()
        return Verdict(float(task.text == task.expected), True, "ok", "", task.text)


def scorer_of(environments: Mapping[str, Childless], *, masks: bool = True) -> Scorer:
    async def build(name: str) -> RewardPool:
        return cast(RewardPool, environments[name])

    return Scorer(build, masks_flagged=masks)


def begin(scorer: Scorer, *texts: str, env_name: str = "gate") -> list[asyncio.Task[Verdict]]:
    return [asyncio.ensure_future(scorer.judge(f"id of {text}", env_name, Task((text,), "b"))) for text in texts]


@as_story
async def test_answers_are_handed_in_while_another_is_judged():
    gate = Gate()
    scorer = scorer_of({"gate": gate})
    await scorer.start(["gate"])
    judging = begin(scorer, "a")
    await settled()
    # Neither of these waits for the first.
    judging += begin(scorer, "b", "c", "d")
    await settled()
    assert gate.asked == ["a", "b", "c", "d"]
    gate.is_open.set()
    assert [(await one).reward for one in judging] == [0.0, 1.0, 0.0, 0.0]
    assert scorer.take_load().seconds > 0
    assert scorer.take_load() == RewardLoad()


@as_story
async def test_a_verdict_is_given_before_others_and_the_load_counts_what_still_waits():
    scorer = scorer_of({"gate": Gate()})
    slow, quick = begin(scorer, "a", "quick")
    assert (await quick).text == "quick" and not slow.done()
    scorer.take_load()
    await settled()
    assert scorer.take_load().seconds > 0
    slow.cancel()


@as_story
async def test_more_slow_rollouts_than_workers_are_all_judged():
    """Ten times as many as workers: none is masked, and all waits are counted. `test_pool.py` holds each deadline."""

    async def build(name: str) -> RewardPool:
        return await RewardPool(replace(HOSTILE, num_workers=2, timeout_s=HANG_S)).start()

    scorer = Scorer(build)
    await scorer.start(["slow"])
    judging = [scorer.judge(str(index), "slow", Task(("nap",), str(index))) for index in range(20)]
    assert [verdict.status for verdict in await asyncio.gather(*judging)] == ["ok"] * 20
    load = scorer.take_load()
    assert load.num_judged == load.num_begun == 20 == load.longest_queue
    # A nap takes at least 0.05 s: nine pairs of them before the last, and on average as many before a rollout as the
    # half of that.
    assert load.longest_wait_s > 9 * 0.05 and load.wait_s > 20 * 4.5 * 0.05
    # Those that are remembered have waited for nobody.
    await scorer.judge("again", "slow", Task(("nap",), "7"))
    load = scorer.take_load()
    assert (load.num_judged, load.num_begun) == (0, 0)
    scorer.environments["slow"].close()


@as_story
async def test_each_environment_judges_its_own_and_its_error_reaches_the_caller():
    one, other = Gate(is_open=True), Gate()
    scorer = scorer_of({"one": one, "other": other})
    (judged,) = begin(scorer, "a", env_name="one")
    (missing,) = begin(scorer, "b", env_name="missing")
    with pytest.raises(KeyError, match="missing"):
        await missing
    assert (await judged).text == "a" and (one.asked, other.asked) == (["a"], [])


@as_story
async def test_environments_do_not_wait_for_each_other_and_start_when_needed():
    slow, quick = Gate(), Gate(is_open=True)
    scorer = scorer_of({"slow": slow, "quick": quick})
    await scorer.start(["slow"])
    assert list(scorer.environments) == ["slow"]
    (waiting,) = begin(scorer, "a", env_name="slow")
    (judged,) = begin(scorer, "b", env_name="quick")
    assert (await judged).text == "b" and not waiting.done()
    assert list(scorer.environments) == ["slow", "quick"]
    slow.is_open.set()
    assert (await waiting).text == "a"


@as_story
async def test_a_rollout_that_is_not_scored_is_named(caplog: pytest.LogCaptureFixture):
    class Refusing(Childless):
        async def judge(self, task: Task) -> Verdict:
            return Verdict(0.0, False, "error", "", task.text, reason="the reward is nan")

    await scorer_of({"bad": Refusing()}).judge("3/row:7/2", "bad", Task(("x",)))
    assert "Rollout 2 of prompt row:7 in epoch 3 (bad) is not scored: the reward is nan" in caplog.text


@pytest.mark.parametrize("masks", [True, False])
@as_story
async def test_flagged_rollouts_are_masked_if_the_config_says_so(masks: bool):
    class Flagging(Childless):
        async def judge(self, task: Task) -> Verdict:
            return Verdict(1.0, True, "ok", "", task.text, flags=("mask_sample",) if task.text == "a" else ())

    verdicts = await asyncio.gather(*begin(scorer_of({"gate": Flagging()}, masks=masks), "a", "b"))
    assert [verdict.is_valid for verdict in verdicts] == [not masks, True]
