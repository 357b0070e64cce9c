# SPDX-License-Identifier: Apache-2.0
"""The queue against groups of plain data: a tick clock for engines, each rollout takes as many as its group says."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.cluster.rollouts import RolloutCollector
from mrl.cluster.tasks import BackgroundTasks
from mrl.data.prompts import load_prompts
from mrl.loop.queue import QueuePlan, RolloutQueue, Supplied, open_queue
from mrl.loop.run import Stopped
from mrl.loop.signal_watch import NoSignal
from mrl.metrics import EngineWork
from mrl.recipes.tokenizer import byte_tokenizer
from mrl.store.console import step_lines
from mrl.store.ledger import Ledger, replay
from mrl.store.summary import Clock
from mrl.types import Prompt, PromptKey, RolloutGroup, RolloutInfo, RunState, SamplingParams, Verdict
from tests.unit.data.test_prompts import configured, write

SAMPLING = SamplingParams(1.0, 1.0, None, 8, ())
NUM_GENERATIONS, do = 2, asyncio.run


@dataclass
class Groups:
    """Hands out groups `ticks[prompt id]` ticks (1 by default) after they were asked for; a wait lets one tick pass.

    A rollout has a token of each tick.
    """

    ticks: Mapping[str, int] = field(default_factory=dict)
    rewards: Mapping[str, Sequence[float]] = field(default_factory=dict)
    now: int = 0
    under_way: dict[PromptKey, tuple[RolloutGroup, int]] = field(default_factory=dict)
    """With the moment when it is done."""
    tasks: BackgroundTasks = field(default_factory=BackgroundTasks)
    asked: list[tuple[PromptKey, int]] = field(default_factory=list)

    def ask(
        self,
        asked: Sequence[tuple[int, Prompt]],
        sampling: SamplingParams,
        *,
        num_generations: int,
        weight_version: int,
    ) -> list[RolloutGroup]:
        groups = [new_group(epoch, prompt, weight_version) for epoch, prompt in asked]
        assert not {group.key for group in groups} & self.under_way.keys()
        for group in groups:
            self.under_way[group.key] = (group, self.now + self.ticks.get(group.prompt.prompt_id, 1))
            self.asked.append((group.key, weight_version))
        return groups

    def pass_time(self, now: int) -> None:
        self.now = now
        for group, done in self.under_way.values():
            if done <= now and group.num_missing:
                prompt_id = group.prompt.prompt_id
                finish(group, self.rewards.get(prompt_id, (0.0, 1.0)), length=self.ticks.get(prompt_id, 1))

    async def wait(self, is_enough: Callable[[], bool], look: Callable[[], None]) -> None:
        while not is_enough():
            self.pass_time(self.now + 1)
            self.tasks.check()
            look()

    async def drain(self) -> None:
        self.tasks.check()
        self.pass_time(max([self.now, *(done for _, done in self.under_way.values())]))

    async def judge(self, groups: Sequence[RolloutGroup]) -> tuple[list[RolloutGroup], float]:
        self.tasks.check()
        for group in groups:
            del self.under_way[group.key]
        return list(groups), 0.0

    work: EngineWork = EngineWork()

    def take_work(self) -> EngineWork:
        return self.work


def finish(group: RolloutGroup, rewards: Sequence[float], *, length: int = 4) -> None:
    epoch, prompt_id = group.key
    for i, reward in enumerate(rewards):
        version = group.weight_version
        name = f"{epoch}/{prompt_id}/{i}"
        group.note_sampled(RolloutInfo(name, prompt_id, i, version, 1, length, "stop", None, epoch=epoch))
        group.note_judged(i, Verdict(reward, True, "ok", "", ""))


def new_group(epoch: int, prompt: Prompt, weight_version: int, *, is_kept: bool = False) -> RolloutGroup:
    return RolloutGroup(
        prompt, epoch=epoch, num_generations=NUM_GENERATIONS, weight_version=weight_version, is_kept=is_kept
    )


def queue_of(plan: QueuePlan, source: Groups, *arguments: Any, **options: Any) -> RolloutQueue:
    return RolloutQueue(plan, cast(RolloutCollector, source), *arguments, **options)


def prompts(count: int, *, epochs: int = 1) -> list[tuple[int, Prompt]]:
    return [(epoch, Prompt(f"p{i}", (1,), "", "", "math")) for epoch in range(epochs) for i in range(count)]


def plan(lag: int = 0, **other: int | bool | None) -> QueuePlan:
    usual = QueuePlan(
        num_prompts=2,
        num_generations=NUM_GENERATIONS,
        batch=2,
        max_batches=None,
        under_way=99,
        lag=lag,
        samples_ahead=lag > 0,
        waits_for_refit=lag > 0,
        freshest_first=False,
        takes_first=False,
        min_length_ratio=None,
    )
    return replace(usual, **other)


def differs(group: RolloutGroup) -> bool:
    return len(set(group.rewards)) > 1


def run(queue: RolloutQueue, ledger: Ledger, *, steps: int, state: RunState | None = None) -> list[Supplied]:
    """The loop of mrl.train, as far as the queue sees it."""
    state = state or RunState(step=0, weight_version=1)
    do(queue.go_on(state))
    taken = []
    for _ in range(steps):
        supplied = do(queue.take(state, Clock()))
        if supplied is None:
            break
        taken.append(supplied)
        ledger.train(state.step + 1, supplied.trained, supplied.dropped)
        state.step += 1
        do(queue.pause())
        state.weight_version += 1
        do(queue.go_on(state))
    return taken


def names(supplied: Sequence[Supplied]) -> list[list[str]]:
    return [[prompt_id for _, prompt_id in one.trained] for one in supplied]


def ages(supplied: Sequence[Supplied]) -> list[list[int]]:
    return [[index + 1 - group.oldest_version for group in one.groups] for index, one in enumerate(supplied)]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


def test_a_synchronous_step_asks_for_its_own_prompts_alone(ledger: Ledger):
    source = Groups()
    taken = run(queue_of(plan(), source, ledger, prompts(6), SAMPLING, last_step=3), ledger, steps=3)
    assert names(taken) == [["p0", "p1"], ["p2", "p3"], ["p4", "p5"]]
    assert source.asked == [((0, f"p{i}"), 1 + i // 2) for i in range(6)]
    assert ages(taken) == [[0, 0]] * 3
    assert ledger.path.read_text().count("\n") == 6


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_lag_asks_ahead_and_nothing_is_older(ledger: Ledger, lag: int):
    source = Groups({"p2": 9})
    taken = run(queue_of(plan(lag), source, ledger, prompts(20), SAMPLING, last_step=6), ledger, steps=6)
    # Whoever is slow: the prompts of a step are those of a synchronous run, drawn `lag` steps before.
    assert names(taken) == [[f"p{2 * i}", f"p{2 * i + 1}"] for i in range(6)]
    assert ages(taken) == [[min(step, lag)] * 2 for step in range(6)]
    assert [one.metrics["train/max_trajectory_age"] for one in taken] == [min(step, lag) for step in range(6)]
    assert len(source.asked) == 12 and not source.under_way and not replay(ledger.path).taken


def test_the_work_of_engines_that_only_agents_ask_is_unknown(tmp_path: Path):
    found = []
    for work in (EngineWork(), EngineWork(1e-9, 200, 3)):
        ledger = Ledger(tmp_path / f"{work.num_drawn}.jsonl")
        source = Groups(work=work)
        (supplied,) = run(queue_of(plan(), source, ledger, prompts(2), SAMPLING, last_step=1), ledger, steps=1)
        found.append((supplied.num_drawn, supplied.metrics.get("rollout/recomputed_fraction")))
        share = supplied.metrics.get("rollout/engine_idle_fraction")
        assert share is None if not work.seconds else share is not None and 0 <= share < 1
    assert found == [(0, None), (200, 3 / 200)]


def test_in_flight_updates_do_not_wait(ledger: Ledger):
    source = Groups({"p2": 9})
    queue = queue_of(plan(1, waits_for_refit=False), source, ledger, prompts(8), SAMPLING, last_step=4)
    do(queue.go_on(RunState(weight_version=1)))
    assert do(queue.pause()) == {} and source.now == 0
    assert plan(1).waits_for_refit


def test_freshest_first_goes_on_without_the_slow_and_draws_them_again_when_too_old(ledger: Ledger):
    source = Groups({"p0": 4, "p1": 4})
    queue = queue_of(
        plan(1, waits_for_refit=False, freshest_first=True), source, ledger, prompts(20), SAMPLING, last_step=5
    )
    taken = run(queue, ledger, steps=5)
    assert names(taken)[0] == ["p2", "p3"]
    assert max(itertools.chain(*ages(taken))) <= 1
    assert sum(one.metrics["rollout/regenerated_groups"] for one in taken) == 2
    # Drawn twice, taken once by the ledger.
    assert [key for key, _ in source.asked].count((0, "p0")) == 2
    assert "p0" in itertools.chain(*names(taken))


def test_a_prompt_that_is_slower_than_the_lag_is_waited_for_at_the_third_time(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
):
    source = Groups({"p0": 50, "p5": 50})
    queue = queue_of(
        plan(1, waits_for_refit=False, freshest_first=True), source, ledger, prompts(400), SAMPLING, last_step=150
    )
    taken = run(queue, ledger, steps=150)
    assert max(itertools.chain(*ages(taken))) <= 1
    asked = Counter(prompt_id for (_, prompt_id), _ in source.asked)
    assert max(asked.values()) == asked["p0"] == asked["p5"] == 3
    trained = list(itertools.chain(*names(taken)))
    assert {"p0", "p5"} <= set(trained) and len(trained) == len(set(trained))
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told[0].startswith("1 prompts (p0 of math and others) were sampled 2 times")
    assert "max_trajectory_age_steps=1 steps" in told[0]
    assert queue._num_too_old.keys() <= queue._asked.keys()


def test_freshest_first_takes_the_youngest(ledger: Ledger):
    source = Groups({"p0": 1, "p1": 1, "p2": 1, "p3": 1})
    queue = queue_of(
        plan(2, waits_for_refit=False, freshest_first=True), source, ledger, prompts(20), SAMPLING, last_step=9
    )
    state = RunState(step=0, weight_version=1)
    do(queue.go_on(state))
    first = do(queue.take(state, Clock()))
    assert first is not None
    ledger.train(1, first.trained)
    state.step, state.weight_version = 1, 2
    do(queue.go_on(state))
    source.pass_time(source.now + 1)
    second = do(queue.take(state, Clock()))
    assert second is not None and [group.oldest_version for group in second.groups] == [2, 2]


def test_dynamic_sampling_refills_until_enough_groups_differ(ledger: Ledger):
    same = {f"p{i}": (1.0, 1.0) for i in (0, 1, 2, 5)}
    source = Groups(rewards=same)
    queue = queue_of(plan(max_batches=4), source, ledger, prompts(12), SAMPLING, last_step=2, has_signal=differs)
    first, second = run(queue, ledger, steps=2)
    # Batches (p0 p1), (p2 p3), (p4 p5).
    assert names([first]) == [["p3", "p4"]] and first.dropped == [(0, "p0"), (0, "p1"), (0, "p2"), (0, "p5")]
    assert first.metrics["train/dynamic_sampling_num_gen_batches"] == 3
    assert len(first.sampled) == 6
    assert names([second]) == [["p6", "p7"]] and second.metrics["train/dynamic_sampling_num_gen_batches"] == 1
    assert replay(ledger.path).dropped == {1: ((0, "p0"), (0, "p1"), (0, "p2"), (0, "p5"))}


def test_surplus_of_a_synchronous_step_is_drawn_again_by_the_next_weights(ledger: Ledger):
    source = Groups()
    queue = queue_of(
        plan(batch=3, max_batches=4), source, ledger, prompts(12), SAMPLING, last_step=3, has_signal=differs
    )
    taken = run(queue, ledger, steps=3)
    assert names(taken) == [["p0", "p1"], ["p2", "p3"], ["p4", "p5"]]
    assert ages(taken) == [[0, 0]] * 3
    assert [one.metrics["train/dynamic_sampling_num_discarded_valid_samples"] for one in taken] == [2, 2, 2]
    assert [version for key, version in source.asked if key == (0, "p2")] == [1, 2]


def test_surplus_of_a_step_with_lag_is_kept_as_it_is(ledger: Ledger):
    source = Groups()
    queue = queue_of(
        plan(2, batch=3, max_batches=4), source, ledger, prompts(20), SAMPLING, last_step=3, has_signal=differs
    )
    first, second, _ = run(queue, ledger, steps=3)
    assert first.metrics["train/dynamic_sampling_num_discarded_valid_samples"] == 0
    assert names([first, second]) == [["p0", "p1"], ["p2", "p3"]]
    assert [version for key, version in source.asked if key == (0, "p2")] == [1]


def test_too_few_groups_that_differ_end_the_run_with_a_way_out(ledger: Ledger):
    source = Groups(rewards={f"p{i}": (0.0, 0.0) for i in range(1, 12)})
    queue = queue_of(plan(max_batches=3), source, ledger, prompts(12), SAMPLING, last_step=2, has_signal=differs)
    with pytest.raises(Stopped) as ended:  # which saves the last step
        run(queue, ledger, steps=1)
    assert isinstance(ended.value.__cause__, NoSignal)
    assert re.search(
        r"max_gen_batches=3: after so many batches of 2 prompts step 1 has 1 of 2 .* raise", str(ended.value.__cause__)
    )
    assert len(source.asked) == 6


def test_a_step_of_groups_left_over_asks_for_none_and_has_its_lines(ledger: Ledger):
    queue = queue_of(
        plan(1, batch=4, max_batches=4), Groups(), ledger, prompts(20), SAMPLING, last_step=4, has_signal=differs
    )
    _, second = run(queue, ledger, steps=2)
    assert names([second]) == [["p2", "p3"]] and second.metrics["train/dynamic_sampling_num_gen_batches"] == 0
    lines = step_lines(second.metrics | {"time/total": 1.0}, num_prompts=2, num_generations=NUM_GENERATIONS)
    assert lines[0] == "[Generate] 2 prompts x 2 generations = 4 responses (0.0s)"


@pytest.mark.parametrize("waits", ["verdicts", "drain"])
def test_a_signal_ends_every_wait_of_a_step(ledger: Ledger, waits: str):
    ticks: list[int] = []

    def stop_at_once() -> None:
        ticks.append(len(ticks))
        if len(ticks) > 1:
            raise Stopped

    class Ready(Groups):
        async def wait(self, is_enough: Callable[[], bool], look: Callable[[], None]) -> None:
            self.pass_time(self.now + 1)

    queue = queue_of(plan(1), source := Ready(), ledger, prompts(8), SAMPLING, last_step=4)
    do(queue.go_on(RunState(step=0, weight_version=1)))
    if waits == "drain":
        ticks.append(0)
    source.tasks.checks.append(stop_at_once)
    with pytest.raises(Stopped):
        do(queue.pause() if waits == "drain" else queue.take(RunState(step=0, weight_version=1), Clock()))


def test_prompts_that_are_used_up_end_the_run(ledger: Ledger):
    source = Groups(rewards={"p1": (0.0, 0.0)})
    queue = queue_of(plan(max_batches=9), source, ledger, prompts(4), SAMPLING, last_step=2, has_signal=differs)
    assert names(run(queue, ledger, steps=2)) == [["p0", "p2"]]


def test_other_prompts_are_sampled_beside_what_is_under_way(ledger: Ledger):
    source = Groups()
    queue = queue_of(plan(1), source, ledger, prompts(8), SAMPLING, last_step=4)
    do(queue.go_on(RunState(weight_version=1)))
    held_out = [(-1, prompt) for _, prompt in prompts(2)]
    groups = do(queue.sample(held_out, SAMPLING, num_generations=NUM_GENERATIONS, weight_version=1, clock=Clock()))
    assert [group.prompt.prompt_id for group in groups] == ["p0", "p1"]
    first = do(queue.take(RunState(weight_version=1), Clock()))
    assert first is not None and names([first]) == [["p0", "p1"]]


def test_a_resumed_run_asks_for_the_prompts_that_its_ledger_has_not_consumed(tmp_path: Path):
    write(tmp_path / "train.jsonl", [{"question": f"{i}+1", "answer": str(i + 1)} for i in range(8)])
    write(tmp_path / "validation.jsonl", [{"question": "1+1", "answer": "2"}])
    byte_tokenizer(4096).save_pretrained(tmp_path / "model")
    config = configured(tmp_path, "grpo.num_prompts_per_step=2")
    data = load_prompts(config)

    def steps(name: str, count: int, *, copy: Path | None = None) -> list[list[str]]:
        """The prompts of the next steps of the run with this ledger, as a process that has just started takes them."""
        ledger = Ledger(tmp_path / name)
        queue = open_queue(config, data, cast(RolloutCollector, Groups()), ledger, last_step=4)
        if copy is not None:  # the queue is there when a checkpoint is loaded
            ledger.roll_back(1, copy)
        return names(run(queue, ledger, steps=count, state=RunState(step=len(ledger.state.trained), weight_version=1)))

    whole = steps("unbroken", 4)
    assert sorted(itertools.chain(*whole)) == [f"train:{number}" for number in range(1, 9)]
    assert steps("resumed", 1) + steps("resumed", 2) + steps("resumed", 1) == whole
    assert steps("damaged", 1) == whole[:1]
    Ledger(tmp_path / "damaged").copy_to(tmp_path / "copy")
    (tmp_path / "damaged").write_bytes(b"7\n")
    assert steps("damaged", 3, copy=tmp_path / "copy") == whole[1:]


def test_a_group_that_is_revived_is_not_asked_for_and_regenerated_when_it_is_too_old(ledger: Ledger):
    source = Groups()

    def revive(epoch: int, prompt: Prompt) -> RolloutGroup | None:
        if prompt.prompt_id not in ("p0", "p3"):
            return None
        group = new_group(epoch, prompt, 0 if prompt.prompt_id != "p3" else -1, is_kept=True)
        finish(group, (0.0, 1.0))
        source.under_way[group.key] = (group, 0)  # so that it can be judged
        return group

    queue = queue_of(plan(1), source, ledger, prompts(8), SAMPLING, last_step=4, revive=revive)
    taken = run(queue, ledger, steps=4)
    assert sorted(itertools.chain(*names(taken))) == [f"p{index}" for index in range(8)]
    # p0 is a step older than the weights, as it may be; p3 is too old for its step, and asked for once.
    assert ages(taken)[0] == [1, 0] and max(itertools.chain(*ages(taken))) == 1
    assert sorted(key[1] for key, _ in source.asked) == [f"p{index}" for index in range(1, 8)]
    assert [[group.prompt.prompt_id for group in one.sampled if group.is_kept] for one in taken] == [["p0"], [], [], []]
    assert sum(one.metrics["rollout/regenerated_groups"] for one in taken) == 1


@settings(deadline=None, max_examples=40)
@given(
    lag=st.integers(0, 3),
    batch=st.integers(2, 5),
    freshest=st.booleans(),
    first=st.booleans(),
    waits=st.booleans(),
    ticks=st.lists(st.integers(1, 12), min_size=30, max_size=30),
    same=st.sets(st.integers(0, 29)),
    killed_at=st.integers(0, 8),
    saved_at=st.integers(0, 8),
    kept=st.dictionaries(st.integers(0, 29), st.integers(0, 3)),
)
def test_nothing_is_lost_or_trained_twice_over_a_kill(
    tmp_path_factory: pytest.TempPathFactory,
    lag: int,
    batch: int,
    freshest: bool,
    first: bool,
    waits: bool,
    ticks: list[int],
    same: set[int],
    killed_at: int,
    saved_at: int,
    kept: dict[int, int],
):
    """The second attempt finds rollouts of some prompts kept, so many steps old."""
    ledger = Ledger(tmp_path_factory.mktemp("queue") / "ledger.jsonl")
    every = prompts(30)

    def queue() -> RolloutQueue:
        source = Groups({f"p{i}": count for i, count in enumerate(ticks)}, {f"p{i}": (1.0, 1.0) for i in same})

        def revive(epoch: int, prompt: Prompt) -> RolloutGroup | None:
            age = kept.get(int(prompt.prompt_id[1:]), 9)
            if age > lag or not ledger.path.exists():
                return None
            group = new_group(epoch, prompt, 1 - age, is_kept=True)
            finish(group, source.rewards.get(prompt.prompt_id, (0.0, 1.0)))
            source.under_way[group.key] = (group, 0)
            return group

        numbers = plan(
            lag,
            batch=batch,
            under_way=2 * batch if first and lag > 0 else batch * (1 + lag),
            max_batches=30,
            samples_ahead=lag > 0 and not first,
            freshest_first=freshest and lag > 0 and not first,
            waits_for_refit=waits and lag > 0 and not first,
            takes_first=first and lag > 0,
        )
        left = [pair for pair in every if (pair[0], pair[1].prompt_id) not in ledger.state.consumed]
        return queue_of(numbers, source, ledger, left, SAMPLING, last_step=99, has_signal=differs, revive=revive)

    run(queue(), ledger, steps=killed_at)
    to_step = min(saved_at, len(ledger.state.trained))
    ledger.roll_back(to_step)
    taken = run(queue(), ledger, steps=99, state=RunState(step=to_step, weight_version=1))
    assert all(0 <= age <= lag for age in itertools.chain(*ages(taken)))
    trained = [key for keys in ledger.state.trained.values() for key in keys]
    dropped = [key for keys in ledger.state.dropped.values() for key in keys]
    consumed = [*trained, *dropped]
    assert len(consumed) == len(set(consumed))
    assert {f"p{i}" for i in same} >= {prompt_id for _, prompt_id in dropped}
    # What is left is not enough for a step.
    assert (
        len(
            [
                pair
                for pair in every
                if (0, pair[1].prompt_id) not in set(consumed) and int(pair[1].prompt_id[1:]) not in same
            ]
        )
        < 2
    )
    assert replay(ledger.path) == ledger.state
