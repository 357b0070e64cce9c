# SPDX-License-Identifier: Apache-2.0
"""Runs of which every attempt is killed, at a kill point or by the death of a random process: they end as if nobody had.

`MRL_SOAK_STEPS` says how long they are: 100 on a host that does nothing else.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from mrl.recipes.tiny import prepare_tiny
from mrl.store.checkpoints import newest_step
from mrl.view.rows import METRIC_KEYS, METRICS, read_rows
from tests.faults import test_kill
from tests.faults.attempts import Attempt, lineage
from tests.sources import ROOT
from tests.stack.ahead.conftest import AHEAD
from tests.waiting import HANG_S

STEPS = int(os.environ.get("MRL_SOAK_STEPS", "30"))
KILL_EVERY = 10
SETTINGS = [
    *test_kill.SETTINGS,
    f"grpo.max_num_steps={STEPS}",
    "checkpointing.save_period=5",
    "checkpointing.keep_top_k=3",
    "checkpointing.metric_name=null",
]
LAYOUTS = {"sync": [], "lag 1": [setting for setting in AHEAD if not setting.startswith(("grpo.max_num_steps", "checkpointing."))]}
# With lag, rollouts that an engine takes with it are sampled again from newer weights: such a run keeps its ledger, and not its bits.
VICTIMS = {"sync": ["driver", "policy-rank-0", "engine-0", "rewards"], "lag 1": ["driver", "policy-rank-0", "rewards"]}
# How often an attempt of some steps passes each point, at least.
POINTS = {"start": 3, "refit": 6, "rollouts": 12, "commit": 4, "kept": 2, "prune": 1}


def attempt(folder: Path, run: str, number: int, mode: str, *settings: str) -> Attempt:
    prepared = ROOT / "prepared" / "tiny"
    prepare_tiny(prepared, seed=0)
    inputs = [
        f"policy.model_name={prepared / 'model'}",
        f"data.train.data_path={prepared / 'data' / 'train.jsonl'}",
        f"data.validation.data_path={prepared / 'data' / 'validation.jsonl'}",
    ]
    overrides = [*inputs, *SETTINGS, *LAYOUTS[mode], f"checkpointing.checkpoint_dir={folder / run}", *settings]
    return Attempt(folder / run, overrides, folder / f"{run}-{number}.log")


def kill_once(current: Attempt, victim: str, step: int) -> bool:
    """Kills a process once a step is trained; False: the run ended before."""
    done = f"Step {step}/{STEPS}"
    while done not in current.text():
        if current.process.poll() is not None:
            return False
        time.sleep(0.05)
    pid = current.process.pid if victim == "driver" else current.actor_pid(victim)
    os.kill(pid, signal.SIGKILL)
    return True


def broken_run(folder: Path, mode: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[float, list[str]]:
    """Attempts until the run is done; their seconds, and what ended each."""
    rng, seconds, ends, run_folder = random.Random(seed), 0.0, list[str](), folder / "broken"
    for number in range(4 * STEPS):
        newest = newest_step(run_folder) if run_folder.exists() else 0
        victim, step = rng.choice(VICTIMS[mode]), newest + rng.randint(1, KILL_EVERY)
        point = rng.choice(list(POINTS))
        is_point = rng.random() < 0.5
        monkeypatch.setenv("MRL_KILL_AT", f"{point}:{rng.randint(1, POINTS[point])}" if is_point else "")
        start = time.monotonic()
        with attempt(folder, "broken", number, mode) as current:
            killed = not is_point and step <= STEPS and kill_once(current, victim, step)
            code = current.finish()
            current.assert_nothing_survives()
        seconds += time.monotonic() - start
        found = re.search(r"killed at (\S+),", current.text())
        ends.append(f"{found[1]}" if found else f"{victim} after step {step}" if killed else f"exit {code}")
        assert code in (0, 1, -signal.SIGKILL), current.text()[-4000:]
        if code == 0:
            return seconds, ends
    raise AssertionError(f"the run is not done after {len(ends)} attempts: {ends}")


@pytest.mark.long("soak")
@pytest.mark.timeout(100 * HANG_S)
@pytest.mark.parametrize("mode", list(LAYOUTS))
def test_a_run_whose_attempts_are_all_killed_ends_as_if_nobody_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(test_kill, "STEPS", STEPS)
    with attempt(tmp_path, "unbroken", 0, mode) as whole:
        assert whole.finish() == 0, whole.text()[-4000:]
    seconds, ends = broken_run(tmp_path, mode, 0, monkeypatch)
    rows, _ = read_rows(tmp_path / "broken" / METRICS, METRIC_KEYS)
    effective = sum(row["time/total"] or 0.0 for row in rows if row["step"])
    parts = Counter[str]()
    for row in rows:
        parts.update({name: value for name, value in row.items() if name.startswith("time/start/") and value is not None})
    with capsys.disabled():
        print(f"\n{mode}: {len(ends)} attempts ({'; '.join(ends)}) of {seconds:.0f} s, {effective:.0f} s of them in steps that count:")
        print(f"effective {effective / seconds:.0%}; starts whose first step counts: { ({k: round(v, 1) for k, v in parts.items()}) }")
    regenerated = [path.read_text().count("kept rollouts are used again") for path in tmp_path.glob("broken-*.log")]
    assert mode == "sync" or sum(regenerated) > 0
    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    assert sorted(lineage(broken)) == list(range(1, STEPS + 1)) and lineage(broken) == lineage(unbroken)
    assert test_kill.rows(broken) == test_kill.rows(unbroken)
    assert test_kill.weights(broken, tmp_path) == test_kill.weights(unbroken, tmp_path)


@pytest.mark.long("soak")
@pytest.mark.timeout(20 * HANG_S)
@pytest.mark.parametrize(("kept_gb", "num_kept"), [(0, 0), (16, 4)])
def test_after_a_kill_with_lag_nothing_is_sampled_twice_though_the_next_attempt_has_other_engines_and_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_gb: int, num_kept: int
):
    """Prompts, four a step, of the step after the checkpoint were sampled before it, and are there when it is published."""
    settings = ["checkpointing.save_period=3", "grpo.max_num_steps=10", f"checkpointing.keep_rollouts_gb={kept_gb}"]
    monkeypatch.setenv("MRL_KILL_AT", "rollouts:32")
    with attempt(tmp_path, "run", 0, "lag 1", *settings) as first:
        assert first.finish() == -signal.SIGKILL, first.text()[-4000:]
    monkeypatch.delenv("MRL_KILL_AT")
    saved = newest_step(tmp_path / "run")
    assert saved in (3, 6)
    moved = {"policy.generation.num_cpu_engines": "1 -> 2", "cluster.cpu_units_per_node": "1 -> 2"}
    with attempt(tmp_path, "run", 1, "lag 1", *settings, *(f"{key}={change[-1]}" for key, change in moved.items())) as second:
        assert second.finish() == 0, second.text()[-4000:]
    for key, change in moved.items():
        assert f"Config since the last attempt: {key}={change}" in second.text()
    rows, _ = read_rows(tmp_path / "run" / METRICS, METRIC_KEYS)
    (after,) = (row for row in rows if row["step"] == saved + 1)
    assert (after.get("rollout/kept_groups") or 0) == num_kept and after["train/max_trajectory_age"] == (1.0 if kept_gb else 0.0)
    assert sorted(lineage(tmp_path / "run")) == list(range(1, 11))
