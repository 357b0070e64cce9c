# SPDX-License-Identifier: Apache-2.0
"""Requests dealt out to actors that are plain functions, and carried by the event loop's tasks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mrl.cluster.errors import ActorLost, ActorName
from mrl.cluster.tasks import ActorWork, BackgroundTasks, RequestBook
from mrl.types import RolloutRequest, SamplingParams
from tests.unit.stories import as_story, settled
from tests.waiting import HANG_S

LOG = Path("logs/engine.log")
SAMPLING = SamplingParams(1.0, 1.0, None, 8, ())


def request(prompt_id: str) -> RolloutRequest:
    return RolloutRequest(prompt_id, 0, 0, 0, (1,), SAMPLING)


@dataclass
class Engines:
    """Each call waits until the test answers it, with ids or an error."""

    num_engines: int
    max_fruitless: int = 3
    num_calls: int = 1
    sent: list[tuple[int, list[str]]] = field(default_factory=list)
    calls: dict[int, list[asyncio.Future[list[str]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = {"max_fruitless_restarts": self.max_fruitless, "num_calls": self.num_calls}
        self.tasks = BackgroundTasks()
        self.book = RequestBook[RolloutRequest, str](
            "engine", self.num_engines, self.call, self.lose, tasks=self.tasks, **limits
        )
        self.answers: dict[str, str] = {}

    async def call(self, index: int, requests: list[RolloutRequest]) -> dict[str, str]:
        self.sent.append((index, [one.prompt_id for one in requests]))
        self.calls.setdefault(index, []).append(call := asyncio.get_running_loop().create_future())
        return {f"0/{name}/0": f"{name} by {index}" for name in await call}

    def lose(self, index: int, lost: ActorLost) -> None:
        self.book.lost.add(index)

    async def ask(self, *names: str) -> None:
        """Asks, and returns when the requests have been sent."""

        async def one(name: str) -> None:
            self.answers[name] = await self.book.ask(request(name).request_id, request(name))

        for name in names:
            asyncio.ensure_future(one(name))
        await settled()

    async def answer(self, index: int, *names: str) -> None:
        self.calls[index].pop(0).set_result(list(names))
        await settled()

    async def die(self, index: int) -> None:
        self.calls[index].pop(0).set_exception(ActorLost(ActorName("engine", index), "generation", "killed"))
        await settled()


@as_story
async def test_a_request_goes_to_the_engine_with_the_fewest_unfinished_ones():
    engines = Engines(2)
    for index in range(2):
        engines.book.begin(index)
    await engines.ask("a", "b", "c")
    assert engines.sent == [(0, ["a", "c"]), (1, ["b"])] and engines.book.called() == ["engine 0", "engine 1"]
    await engines.answer(0, "c", "a")
    assert engines.answers == {"a": "a by 0", "c": "c by 0"}
    # An engine without work is not called; one that is called gets what is new with its next call.
    assert engines.book.called() == ["engine 1"] and len(engines.sent) == 2
    await engines.ask("d", "e")
    assert engines.sent[2:] == [(0, ["d", "e"])]
    await engines.ask("f")
    assert engines.book.missing() == "4 rollouts (0/d/0 of engine 0 and others)"
    assert engines.book.missing("; math: 4") == "4 rollouts (0/d/0 of engine 0 and others; math: 4)"
    assert sorted(one.prompt_id for one in engines.book.unanswered()) == ["b", "d", "e", "f"]
    await engines.answer(1)
    assert engines.sent[-1] == (1, ["f"])
    assert (engines.book.num_unfinished, engines.book.num_lost) == (4, 0)


@as_story
async def test_a_second_call_brings_new_requests_while_the_first_waits():
    engines = Engines(1, num_calls=2)
    engines.book.begin(0)
    await engines.ask("a")
    await engines.ask("b")
    await engines.ask("c")
    assert engines.sent == [(0, ["a"]), (0, ["b"])]
    await engines.answer(0, "b")
    assert engines.sent[2:] == [(0, ["c"])] and engines.answers == {"b": "b by 0"}
    await engines.answer(0)
    await engines.answer(0, "a", "c")
    assert engines.answers.keys() == {"a", "b", "c"} and engines.book.called() == []


@as_story
async def test_nothing_is_sent_to_engines_that_are_held():
    engines = Engines(1)
    engines.book.begin(0)
    await engines.ask("a")
    engines.book.hold(True)
    await engines.answer(0)
    await engines.ask("b")
    assert len(engines.sent) == 1
    engines.book.hold(False)
    await settled()
    assert engines.sent[1:] == [(0, ["b"])]


@as_story
async def test_a_restarted_engine_is_asked_its_unfinished_requests_again():
    engines = Engines(2)
    for index in range(2):
        engines.book.begin(index)
    await engines.ask("a", "b", "c")
    await engines.answer(0, "a")
    await engines.die(0)
    assert engines.book.lost == {0} and (engines.book.num_unfinished, engines.book.num_lost) == (2, 1)
    assert engines.book.end(0, LOG) == 1
    assert not engines.book.lost and engines.book.num_restarts == 1 and len(engines.sent) == 3
    engines.book.begin(0)
    await settled()
    assert engines.sent[3:] == [(0, ["c"])]
    await engines.answer(0, "c")
    assert engines.answers == {"a": "a by 0", "c": "c by 0"}


@as_story
async def test_the_others_are_asked_for_the_rollouts_of_an_engine_that_left():
    engines = Engines(2, max_fruitless=2)
    for index in range(2):
        engines.book.begin(index)
    await engines.ask("a", "b", "c")
    assert engines.book.leave(0) == (2, True)
    await settled()
    await engines.answer(1, "b")
    assert engines.sent == [(0, ["a", "c"]), (1, ["b"]), (1, ["a", "c"])]
    await engines.ask("d")
    assert engines.book.leave(1) == (3, True) and engines.book.num_restarts == 2
    await engines.ask("e")
    # Nobody is left: they wait, and who waits for all that can still come does not wait for them.
    assert engines.book.num_unfinished == engines.book.num_lost == 4
    assert {one.prompt_id for one in engines.book.unanswered()} == {"a", "c", "d", "e"}
    engines.book.join(0)
    await settled()
    assert engines.sent[3:] == [(0, ["a", "c", "d", "e"])]
    engines.calls[0] = engines.calls[0][-1:]
    await engines.answer(0, "a", "c", "d", "e")
    assert engines.answers == {"b": "b by 1", **{name: f"{name} by 0" for name in "acde"}}
    assert engines.book.num_unfinished == engines.book.num_lost == 0
    assert [engines.book.leave(1)[1] for _ in range(2)] == [True, False]


@as_story
async def test_an_engine_that_keeps_dying_without_a_rollout_ends_the_run():
    engines = Engines(1, max_fruitless=2)
    engines.book.begin(0)
    await engines.ask("a", "b")
    for _ in range(2):
        engines.book.end(0, LOG)
        engines.book.begin(0)
        await settled()
    engines.calls[0] = engines.calls[0][-1:]
    await engines.answer(0, "a")
    for _ in range(2):
        engines.book.end(0, LOG)
    with pytest.raises(RuntimeError, match=r"engine 0 died 3 times in a row .* see logs/engine\.log"):
        engines.book.end(0, LOG)
    assert engines.book.num_restarts == 4


@as_story
async def test_an_error_of_an_engine_reaches_who_waits():
    engines = Engines(1)
    engines.book.begin(0)
    await engines.ask("a")
    engines.calls[0].pop(0).set_exception(ValueError("engine 0 failed"))
    await settled()
    with pytest.raises(ValueError, match="engine 0 failed"):
        await engines.tasks.wait(lambda: False, what="generation", who=list, limit_s=HANG_S)


@as_story
async def test_answers_are_taken_together_and_a_call_ends_the_wait_of_an_earlier_one():
    work, may_end = ActorWork[str](), asyncio.Event()

    async def one(name: str, *, waits: bool = False) -> None:
        if waits:
            await may_end.wait()
        work.answer(name, f"{name} is done")

    for name in "abc":
        work.begin(one(name))
    # All that is worked on is done: nobody waits for more.
    assert await work.take(HANG_S, gather_s=HANG_S) == {name: f"{name} is done" for name in "abc"}
    # What does not end is not waited for longer than asked.
    work.begin(one("late", waits=True))
    assert await work.take(0.0, gather_s=HANG_S) == {}
    work.begin(one("quick"))
    assert await work.take(HANG_S, gather_s=0.0) == {"quick": "quick is done"}
    earlier = asyncio.ensure_future(work.take(HANG_S, gather_s=HANG_S))
    await settled()
    later = asyncio.ensure_future(work.take(HANG_S, gather_s=HANG_S))
    assert await earlier == {}
    may_end.set()
    assert await later == {"late": "late is done"}


@as_story
async def test_an_error_of_the_work_reaches_who_takes_answers():
    work = ActorWork[str]()

    async def fail() -> None:
        raise KeyError("no such environment")

    work.begin(asyncio.sleep(HANG_S))
    work.begin(fail())
    with pytest.raises(KeyError, match="no such environment"):
        await work.take(HANG_S, gather_s=HANG_S)


@as_story
async def test_a_request_may_name_the_actors_that_can_answer_it():
    engines = Engines(3)
    for index in range(3):
        engines.book.begin(index)

    async def one(name: str, among: tuple[int, ...]) -> None:
        engines.answers[name] = await engines.book.ask(request(name).request_id, request(name), among)

    for name, among in (("a", (2,)), ("b", (2,)), ("c", (1, 2)), ("d", (1, 2)), ("e", (0,))):
        asyncio.ensure_future(one(name, among))
    await settled()
    assert sorted(engines.sent) == [(0, ["e"]), (1, ["c", "d"]), (2, ["a", "b"])]
    # One that dies gets its own again.
    await engines.die(2)
    engines.book.end(2, Path("engine.log"))
    engines.book.begin(2)
    await settled()
    assert engines.sent[-1] == (2, ["a", "b"])
