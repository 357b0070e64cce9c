# SPDX-License-Identifier: Apache-2.0
"""Curriculum by difficulty: what epochs ask, worked by hand, and what resumed runs ask, against unbroken ones."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections import Counter
from pathlib import Path
from typing import cast

import pytest

from mrl.check import examine
from mrl.cluster.rollouts import RolloutCollector
from mrl.config.schema.data import DifficultyPoolConfig
from mrl.data.order import DifficultyPools
from mrl.data.prompts import load_prompts
from mrl.loop.queue import open_queue
from mrl.recipes.tokenizer import byte_tokenizer
from mrl.store.ledger import Ledger, replay
from mrl.store.summary import Clock
from mrl.types import RunState
from tests.unit.data.test_prompts import configured, write
from tests.unit.loop.test_rollout_queue import Groups

KEY = "data.difficulty_pools"
POOLS = f"{KEY}={{hard: {{threshold: 0, weight: 0.5}}, normal: {{threshold: 0.9}}, easy: {{threshold: 1, weight: 0}}}}"
REWARDS = {"a": (1.0, 1.0), "b": (0.0, 0.0), "c": (0.0, 0.0), "d": (0.0, 1.0)}
EPOCHS = 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "train.jsonl", [{"id": name, "question": f"{name}?", "answer": "1"} for name in REWARDS])
    write(tmp_path / "validation.jsonl", [{"question": "1+1", "answer": "2"}])
    byte_tokenizer(4096).save_pretrained(tmp_path / "model")
    return tmp_path


class Attempts:
    """Attempts of a run, each a process that has just started, on the prompts of a folder."""

    def __init__(self, folder: Path, pools: str = POOLS, *, size: int = 2) -> None:
        sizes = [f"grpo.num_prompts_per_step={size}", f"grpo.max_num_epochs={EPOCHS}", "data.shuffle=false"]
        self.config = configured(folder, pools, *sizes)
        self.data, self.folder = load_prompts(self.config), folder

    def steps(self, name: str, count: int = 99, *, copy: Path | None = None, is_killed: bool = False) -> list[str]:
        """Prompts of the next steps, one text a step; a killed attempt has begun a further one."""
        return asyncio.run(self._steps(name, count, copy, is_killed=is_killed))

    async def _steps(self, name: str, count: int, copy: Path | None, *, is_killed: bool) -> list[str]:
        ledger = Ledger(self.folder / name)
        queue = open_queue(
            self.config, self.data, cast(RolloutCollector, Groups(rewards=REWARDS)), ledger, last_step=99
        )
        ledger.roll_back(len(ledger.state.trained) if copy is None else len(replay(copy).trained), copy)
        state, found = RunState(step=len(ledger.state.trained), weight_version=1), list[str]()
        await queue.go_on(state)
        for _ in range(count):
            if (supplied := await queue.take(state, Clock())) is None:
                return found
            ledger.train(state.step + 1, supplied.trained, supplied.dropped, supplied.rewards)
            found.append(" ".join(f"{epoch}{prompt_id}" for epoch, prompt_id in supplied.trained))
            state.step, state.weight_version = state.step + 1, state.weight_version + 1
            await queue.go_on(state)
        if is_killed:
            await queue.take(state, Clock())
        return found


def test_epochs_ask_solved_and_hopeless_prompts_as_often_as_their_pools_say(
    folder: Path, caplog: pytest.LogCaptureFixture
):
    """Place 0.618, of b, has 0.5 e + 0.618 pass a whole number at e = 1 and 3; that of c, 0.236, at e = 2."""
    caplog.set_level(logging.INFO)
    assert Attempts(folder).steps("ledger") == ["0a 0b", "0c 0d", "1b 1d", "2c 2d", "3b 3d"]
    told = [record.getMessage() for record in caplog.records if "Epoch" in record.message]
    assert [line.partition(" prompts")[0] for line in told] == [
        f"Epoch {epoch} asks hard 1 of 2, normal 1 of 1, easy 0 of 1" for epoch in (1, 2, 3)
    ]


def test_an_epoch_that_begins_within_a_step_is_chosen_by_the_steps_before(folder: Path):
    """Nothing is known of d, under way when epoch 1 begins. The last prompt, 3d, fills no step."""
    assert Attempts(folder, size=3).steps("ledger") == ["0a 0b 0c", "0d 1b 1d", "2c 2d 3b"]


@pytest.mark.parametrize("size", [2, 3])
def test_two_killed_attempts_ask_what_the_unbroken_run_asks(folder: Path, size: int):
    attempts = Attempts(folder, size=size)
    whole = attempts.steps("unbroken")
    for first, second in itertools.combinations_with_replacement(range(len(whole)), 2):
        name = f"killed {first} {second}"
        found = attempts.steps(name, first, is_killed=True)
        found += attempts.steps(name, second - first, is_killed=True)
        assert found + attempts.steps(name) == whole
        assert replay(folder / name).trained == replay(folder / "unbroken").trained
        assert replay(folder / name).rewards == replay(folder / "unbroken").rewards


def test_the_checkpoint_restores_what_was_chosen(folder: Path):
    attempts = Attempts(folder, size=3)
    whole = attempts.steps("unbroken")
    for step in range(1, len(whole)):
        name, copy = f"lost {step}", folder / f"copy {step}"
        attempts.steps(name, step, is_killed=True)
        Ledger(folder / name).copy_to(copy)
        attempts_after = replay(copy)
        assert attempts_after.rewards == replay(folder / name).rewards and attempts_after.begun
        (folder / name).write_bytes(b"7\n")
        assert attempts.steps(name, copy=copy) == whole[step:]


def test_a_run_without_pools_keeps_the_lines_of_its_ledger(folder: Path):
    """The same events as before there were pools, so that older versions read them."""
    attempts = Attempts(folder, f"{KEY}={{}}")
    assert len(attempts.steps("ledger")) == EPOCHS * len(REWARDS) // 2
    kinds = Counter(json.loads(line)["event"] for line in (folder / "ledger").read_text().splitlines())
    assert kinds.keys() == {"taken", "trained"}


@pytest.mark.parametrize("weight", [0.0, 0.1, 0.3, 0.5, 1.0])
def test_a_weight_is_the_share_of_epochs_of_every_prompt_and_of_prompts_of_every_epoch(weight: float):
    pools, num_prompts, num_epochs = {"all": DifficultyPoolConfig(1.0, weight)}, 40, 30
    sizes, rewards = [30, 10], {str(index): 1.0 for index in range(num_prompts)}
    one = DifficultyPools(pools, sizes, str, lambda part, epoch: (rewards, False))
    asked = [[not one.leaves_out(epoch, index) for index in range(num_prompts)] for epoch in range(1, num_epochs + 1)]
    of_sets = [[sum(epoch[:30]), sum(epoch[30:])] for epoch in asked]
    assert all(abs(found - weight * size) < 2 for of_set in of_sets for found, size in zip(of_set, sizes, strict=True))
    for prompt in zip(*asked, strict=True):
        for first, last in itertools.combinations(range(num_epochs + 1), 2):
            assert abs(sum(prompt[first:last]) - weight * (last - first)) < 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([f"{KEY}={{hard: {{threshold: 0}}, easy: {{threshold: 0}}}}"], "two pools have one threshold"),
        ([f"{KEY}={{hard: {{threshold: 0, weight: 0}}}}"], "every weight is 0"),
        ([f"{KEY}={{hard: {{threshold: 0, weight: 2}}}}"], f"{KEY}.hard.weight=2"),
        ([f"{KEY}={{hard: {{weight: 1}}}}"], f"{KEY}.hard.threshold"),
        ([POOLS, "grpo.max_num_epochs=1"], "data.difficulty_pools has no effect in the first epoch"),
    ],
)
def test_pools_without_sense_are_refused_and_those_without_effect_said(given: list[str], told: str):
    checked = examine("grpo_tiny.yaml", given, to_evaluate=False)
    assert told in "".join(map(str, checked.refused)) + "".join(checked.doubts)


def test_pools_need_rewards():
    checked = examine("distillation_tiny.yaml", [POOLS], to_evaluate=False)
    assert any(KEY in str(problem) and "trains on none" in str(problem) for problem in checked.refused)
