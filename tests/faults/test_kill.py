# SPDX-License-Identifier: Apache-2.0
"""kill -9 of driver, rank and engine: no process stays, no prompt lost or trained twice, weights end as undisturbed."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.store.checkpoints import find_damage
from mrl.store.ledger import replay
from tests.faults.attempts import Runs, is_taken, is_trained, is_writing, lineage
from tests.stack.loop.conftest import SMALL

STEPS = 6
SETTINGS = [
    *SMALL,
    f"grpo.max_num_steps={STEPS}",
    "grpo.val_at_start=false",
    "checkpointing.save_period=1",
    "checkpointing.keep_top_k=10",
    "logger.tensorboard_enabled=false",
    # A host under load must not turn a slow verdict into a masked rollout, which would change the run.
    "env.math.timeout_s=600",
    # Two ranks are enough to lose one, and start in half the time.
    "cluster.cpu_units_per_node=2",
    "policy.megatron_cfg.tensor_model_parallel_size=1",
    "policy.megatron_cfg.sequence_parallel=false",
    # Later epochs choose their prompts by rewards, which a resumed attempt knows from its ledger alone.
    "data.train.max_samples=10",
    "grpo.max_num_epochs=30",
    "data.difficulty_pools={hard: {threshold: 0, weight: 0.5}, rest: {threshold: 1, weight: 0.7}}",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("faults"), SETTINGS)


@pytest.fixture(scope="module")
def unbroken(runs: Runs) -> Path:
    folder = runs.unbroken()
    ledger = replay(folder / "ledger.jsonl")
    first_epoch = {prompt_id for epoch, prompt_id in ledger.consumed if epoch == 0}
    second_epoch = {prompt_id for epoch, prompt_id in ledger.consumed if epoch == 1}
    assert len(first_epoch) == 10 and 0 < len(second_epoch) < 10 and (0, 2) in ledger.begun
    return folder


def rows(run_folder: Path) -> list[dict]:
    """Metrics by step, without wall time and without what counts the faults."""
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    timed = (
        *(
            "time/",
            "performance/",
            "refit/seconds",
            "rollout/tokens_per_s",
            "rollout/engine_idle_fraction",
            "refit/weight_version",
        ),
        *(
            "rollout/engine_restarts",
            "rollout/reward_",
            "rollout/kept_groups",
            "rollout/recomputed_fraction",
            "refit/drain_seconds",
            "train/buffer_size",
            "logger/attempt",
        ),
    )
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in lines]


def weights(run_folder: Path, tmp_path: Path, step: int = STEPS) -> dict[str, bytes]:
    """The exported weight files of the last step."""
    from mrl.convert import main as convert

    out = tmp_path / f"{run_folder.name}-hf"
    assert convert(["mcore-to-hf", "--mcore", str(run_folder / f"step_{step}"), "--out", str(out)]) == 0
    return {path.name: path.read_bytes() for path in out.glob("*.safetensors")}


def assert_same_run(broken: Path, unbroken: Path, tmp_path: Path) -> None:
    assert lineage(broken) == lineage(unbroken)
    assert sorted(lineage(broken)) == list(range(1, STEPS + 1))
    assert rows(broken) == rows(unbroken)
    assert weights(broken, tmp_path) == weights(unbroken, tmp_path)


Moment = Callable[[Path], bool]
MOMENTS: list[tuple[str, Moment]] = [
    ("generation of step 2", lambda folder: is_taken(folder, 2)),
    ("refit of step 3", lambda folder: is_trained(folder, 3)),
    # A write that the watcher overlooks leaves the next one, and at last a moment after both.
    (
        "background write of step 4 or 5",
        lambda folder: is_writing(folder, 4) or is_writing(folder, 5) or (folder / "step_5").exists(),
    ),
]


DRIVER, RANK, ENGINE = "driver", "policy-rank-1", "engine-0"


LONG = pytest.mark.long("kills")


@pytest.mark.parametrize(
    "victims",
    [
        (ENGINE, RANK, DRIVER),
        pytest.param((RANK, DRIVER, RANK), marks=LONG),
        pytest.param((DRIVER, RANK, DRIVER), marks=LONG),
    ],
)
def test_a_killed_driver_or_rank_costs_time_only(
    runs: Runs, unbroken: Path, tmp_path: Path, victims: tuple[str, str, str]
):
    """One victim a moment. An attempt ends with its driver or rank; an engine is replaced within it."""
    run, moments = f"{victims[0]}-first", iter(zip(victims, MOMENTS, strict=True))
    for victim, (name, has_come) in moments:
        with runs.attempt(run, name.replace(" ", "-")) as current:
            current.wait_until(lambda: has_come(current.run_folder), name)  # noqa: B023  called in this turn of the loop
            if victim == ENGINE:
                os.kill(current.actor_pid(ENGINE), signal.SIGKILL)
                current.wait_until(lambda: "engine 0 died; starting it again" in current.text(), "restart")  # noqa: B023
                victim, (name, has_come) = next(moments)
                current.wait_until(lambda: has_come(current.run_folder), name)  # noqa: B023
            pid = current.process.pid if victim == DRIVER else current.actor_pid(victim)
            os.kill(pid, signal.SIGKILL)
            assert current.finish() not in (0, 2)
            if victim == RANK:
                assert re.search(r"policy rank 1 died during \w+", current.text()), current.text()[-2000:]
            current.assert_nothing_survives()
    with runs.attempt(run, "last") as last:
        assert last.finish() == 0, last.text()
        assert "Resuming from" in last.text()
    assert all(find_damage(folder) is None for folder in last.run_folder.glob("step_*"))
    assert_same_run(last.run_folder, unbroken, tmp_path)


@LONG
def test_a_killed_engine_is_replaced_within_the_run(runs: Runs, unbroken: Path, tmp_path: Path):
    with runs.attempt("engines", "only") as current:
        for number, (name, has_come) in enumerate(MOMENTS):
            current.wait_until(lambda: has_come(current.run_folder), name)  # noqa: B023  called in this turn of the loop
            os.kill(current.actor_pid(ENGINE), signal.SIGKILL)
            said = "engine 0 died; starting it again"
            current.wait_until(lambda: current.text().count(said) == number + 1, "restart")  # noqa: B023
        assert current.finish() == 0, current.text()
    assert "Resuming" not in current.text()
    assert_same_run(current.run_folder, unbroken, tmp_path)
