# SPDX-License-Identifier: Apache-2.0
"""Part "learning": the quickstart learns with other seeds too, and what it learns comes from the rewards."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.envs.task import Task
from mrl.loop.rollouts import prepare
from mrl.loop.run import Budget, is_due
from mrl.store.run_folder import RunFolder
from mrl.types import Verdict
from tests.drivers import do, opened, train_step
from tests.faults.attempts import tiny_inputs
from tests.learn.quickstart import accuracy_before, accuracy_of_export, run_quickstart, sampling_noise
from tests.long.record import Row, record
from tests.unit.envs.pools import Childless

pytestmark = [pytest.mark.long("learning"), pytest.mark.timeout(2400)]

RUNS = [*(("tiny", seed) for seed in (0, 1, 2)), ("tiny_dense", 0)]
MAX_ACCURACY_OF_CONTROL = 0.35
STEPS_OF_CONTROL, STEPS_BETWEEN_VALIDATIONS = 80, 20


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    """Rows that this part measures; kept also if they are not what is required."""
    measured: list[Row] = []
    yield measured
    if measured:
        record("learning", measured)


@pytest.mark.parametrize(("kind", "seed"), RUNS)
def test_every_seed_learns(tmp_path: Path, rows: list[Row], seed: int, kind: str):
    quickstart = run_quickstart(tmp_path, seed=seed, kind=kind, overrides=[f"grpo.seed={seed}"])
    (_, before), *_, (steps, after) = quickstart.accuracies
    initial, exported = accuracy_before(quickstart), accuracy_of_export(quickstart)
    rows.append(
        {
            **row(
                "math-verify" if kind == "tiny" else "math-verify, dense",
                seed,
                before,
                after,
                steps=steps,
                seconds=quickstart.seconds,
            ),
            "greedy_before": initial.greedy,
            "greedy_after": exported.greedy,
            "sampled_from_the_export": exported.sampled,
        }
    )
    assert before <= 0.30 and initial.greedy <= 0.55
    assert after >= 0.90 and exported.greedy >= 0.90
    assert abs(exported.sampled - after) <= sampling_noise([exported.sampled, after], exported.num_problems)


def test_random_rewards_teach_nothing(tmp_path: Path, rows: list[Row]):
    """The control. In this process, because no setting gives random rewards."""
    started = time.monotonic()
    overrides = [
        *tiny_inputs(tmp_path / "prepared"),
        f"checkpointing.checkpoint_dir={tmp_path / 'run'}",
        f"grpo.max_num_steps={STEPS_OF_CONTROL}",
        "checkpointing.enabled=false",
        # Validated here instead, with honest rewards.
        "grpo.val_period=0",
        "grpo.val_at_end=false",
    ]
    config = load_config("grpo_tiny.yaml", overrides)
    training = prepare(config)
    folder = RunFolder(training.config)
    folder.open()
    checkpoint = folder.newest_checkpoint()
    with folder, opened(training.open(folder, Budget(None, started=started))) as run:
        rewards = run.supplier.session.rewards
        state = do(run.resume(checkpoint))
        accuracies = [do(run.supplier.validate(state))["val/accuracy"]]
        while state.step < run.last_step:
            rewards.apply(toss_coins, state.step)
            train_step(run, state)
            if is_due(state.step, STEPS_BETWEEN_VALIDATIONS) or state.step == run.last_step:
                rewards.apply(judge_honestly)
                accuracies.append(do(run.supplier.validate(state))["val/accuracy"])
    seconds = time.monotonic() - started
    rows.append(row("coin toss", 0, accuracies[0], accuracies[-1], steps=state.step, seconds=seconds))
    assert max(accuracies) <= MAX_ACCURACY_OF_CONTROL, accuracies


def row(rewards: str, seed: int, before: float, after: float, *, steps: int, seconds: float) -> Row:
    """One line of the table."""
    return {
        "rewards": rewards,
        "seed": seed,
        "steps": steps,
        "minutes": round(seconds / 60, 1),
        "sampled_before": round(before, 4),
        "sampled_after": round(after, 4),
    }


class CoinToss(Childless):
    """An environment that looks at nothing."""

    def __init__(self, seed: int) -> None:
        self.coin = random.Random(seed)

    async def judge(self, task: Task) -> Verdict:
        return Verdict(float(self.coin.randint(0, 1)), True, "ok", "", task.text)


def toss_coins(actor, seed: int) -> None:
    actor.scorer.environments.setdefault("honest", actor.scorer.environments["math"])
    actor.scorer.environments["math"] = CoinToss(seed)


def judge_honestly(actor) -> None:
    actor.scorer.environments["math"] = actor.scorer.environments["honest"]
