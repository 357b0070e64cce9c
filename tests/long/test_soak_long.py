# SPDX-License-Identifier: Apache-2.0
"""Runs of which every attempt is killed, at a kill point or by a random process's death: they end as if nobody had.

`MRL_SOAK_STEPS` says how long they are: 100 on a host that does nothing else. There a step takes a second, a start 25
s, and a mode has some 15 attempts and an unbroken run: half an hour for the part. Each mode prints its figures; if both
pass, docs/data/soak.json has them.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from mrl.recipes.tiny import prepare_tiny
from mrl.signals import ENDED_EARLY
from mrl.store.checkpoints import MARKER, STATE, newest_step
from mrl.store.run_files import METRIC_KEYS, METRICS, read_rows
from tests.faults import test_kill
from tests.faults.attempts import Attempt, ledger, lineage
from tests.long.record import Row, record
from tests.sources import ROOT
from tests.stack.ahead.conftest import AHEAD
from tests.waiting import HANG_S

STEPS = int(os.environ.get("MRL_SOAK_STEPS", "30"))
KILL_EVERY = 10
SETTINGS = [
    *test_kill.SETTINGS,
    f"grpo.max_num_steps={STEPS}",
    "checkpointing.save_period=1",
    "checkpointing.keep_top_k=3",
    "checkpointing.metric_name=null",
]
LAYOUTS = {
    "sync": [],
    "lag 1": [setting for setting in AHEAD if not setting.startswith(("grpo.max_num_steps", "checkpointing."))],
}
RAY = ("raylet", "gcs_server")
# With lag, rollouts that an engine takes with it are sampled again from newer weights: such a run keeps its ledger, and
# not its bits.
VICTIMS = {
    "sync": ["driver", "policy-rank-0", "engine-0", "rewards", *RAY],
    "lag 1": ["driver", "policy-rank-0", "rewards", *RAY],
}
# How often an attempt of some steps passes each point, at least.
POINTS = {"start": 12, "refit": 12, "rollouts": 24, "commit": 16, "prune": 4}


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


def kill_after(current: Attempt, victim: str, step: int, pause_s: float) -> bool:
    """Kills a process a moment after a step; False: the attempt ended before."""
    done = f"Step {step}/{STEPS}"
    while done not in current.text():
        if current.process.poll() is not None:
            return False
        time.sleep(0.05)
    time.sleep(pause_s)
    with suppress(ProcessLookupError, psutil.NoSuchProcess):  # what was killed before may not be back
        if victim in RAY:
            pids = [
                found.pid
                for found in psutil.Process(current.process.pid).children(recursive=True)
                if found.name() == victim
            ]
        else:
            pids = [current.process.pid if victim == "driver" else current.actor_pid(victim)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    return True


def broken_run(folder: Path, mode: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> Costs:
    """Attempts until the run is done: each killed at a point of its start or a step, or by random processes' death."""
    rng, costs, run_folder = random.Random(seed), Costs(step_s(folder / "unbroken")), folder / "broken"
    points = POINTS | ({} if mode == "sync" else {"kept": 12})
    for number in range(4 * STEPS):
        step = newest_step(run_folder) if run_folder.exists() else 0
        point = rng.choice(list(points)) if rng.random() < 0.5 else None
        monkeypatch.setenv("MRL_KILL_AT", f"{point}:{rng.randint(1, points[point])}" if point else "")
        end, start = "", time.monotonic()
        with attempt(folder, "broken", number, mode) as current:
            while current.process.poll() is None:
                victim, step = rng.choice(VICTIMS[mode]), step + rng.randint(1, 2 * KILL_EVERY - 1)
                if step > STEPS or not kill_after(current, victim, step, rng.random() * costs.step_s):
                    break
                end += f"{victim} after step {step}, "
            code = current.finish()
            current.assert_nothing_survives()
        found = re.search(r"killed at (\S+),", current.text())
        costs.note(time.monotonic() - start, current, f"{end}{found[1] if found else f'exit {code}'}")
        assert code in (0, 1, ENDED_EARLY, -signal.SIGKILL), current.text()[-4000:]
        if code == 0:
            return costs
    raise AssertionError(f"the run is not done after {len(costs.ends)} attempts: {costs.ends}")


def step_s(run_folder: Path) -> float:
    """Mean seconds of the steps of a run that count."""
    rows, _ = read_rows(run_folder / METRICS, METRIC_KEYS)
    seconds = [row["time/total"] or 0.0 for row in rows if row["step"]]
    return sum(seconds) / len(seconds)


@dataclass
class Costs:
    """Seconds of the attempts of a run."""

    step_s: float
    """Mean seconds of a step of the unbroken run."""
    ends: list[str] = field(default_factory=list)
    total_s: float = 0.0
    unborn_s: float = 0.0
    """Seconds of attempts that ended before their first step."""
    starts: list[dict[str, float]] = field(default_factory=list)
    publishing_s: dict[int, float] = field(default_factory=dict)
    """Step -> seconds from its end until its checkpoint is one that the next attempt would resume from."""

    def note(self, seconds: float, ended: Attempt, end: str) -> None:
        self.ends.append(end)
        self.total_s += seconds
        if laps := {phase: float(value) for value, phase in re.findall(r"Start: +([\d.]+) s  (\S+)  ", ended.text())}:
            self.starts.append(laps)
        else:
            self.unborn_s += seconds
        for marker in ended.run_folder.glob(f"step_*/{MARKER}"):
            begun_at = (marker.parent / STATE).stat().st_mtime
            self.publishing_s[int(marker.parent.name.removeprefix("step_"))] = marker.stat().st_mtime - begun_at

    def row(self, run_folder: Path, mode: str) -> tuple[list[str], Row]:
        """Measured share of time in steps that count; what a restart costs, and the share it leaves to longer steps."""
        effective = STEPS * step_s(run_folder)
        num_trained = sum(event["event"] == "trained" for event in ledger(run_folder))
        mean = {phase: sum(laps.get(phase, 0.0) for laps in self.starts) / len(self.starts) for phase in self.starts[0]}
        start_s, publishing_s = sum(mean.values()), sum(self.publishing_s.values()) / len(self.publishing_s)
        unsaved = (num_trained - STEPS) / max(1, len(self.ends) - 1)
        rest_s = self.total_s - effective - self.unborn_s - start_s * len(self.starts)

        # A kill at a random moment costs the start, half a step, and where it comes before the step's checkpoint is
        # published that step.
        share = {
            step_s: KILL_EVERY * step_s / ((KILL_EVERY + 0.5) * step_s + start_s + publishing_s)
            for step_s in (30, 60, 120, 300)
        }
        parts = ", ".join(
            f"{phase} {seconds:.1f}"
            for phase, seconds in sorted(mean.items(), key=lambda item: -item[1])
            if seconds >= 0.1
        )
        longer = ", ".join(f"{found:.1%} with steps of {step_s} s" for step_s, found in share.items())
        lines = [
            f"{len(self.ends)} attempts of {self.total_s:.0f} s: {'; '.join(self.ends)}",
            f"measured: in steps that count: {effective:.0f} s ({effective / self.total_s:.0%}), of "
            f"{effective / STEPS:.2f} s each; in {len(self.starts)} starts: {start_s * len(self.starts):.0f} s; in "
            f"{len(self.ends) - len(self.starts)} that ended before: {self.unborn_s:.0f} s; in lost steps and "
            f"ends: {rest_s:.0f} s",
            f"measured: a start takes {start_s:.1f} s ({parts}); a checkpoint is published {publishing_s:.2f} s "
            f"after its step, of {self.step_s:.2f} s in the unbroken run; a kill costs {unsaved:.2f} trained steps "
            "and the one under way",
            f"computed, {KILL_EVERY} L / ({KILL_EVERY} L + start + publishing + L/2) for steps of L s, "
            f"{KILL_EVERY} between two kills at random moments (that kept rollouts are not sampled again is not "
            f"counted): {longer}",
        ]
        return lines, {
            "mode": mode,
            "steps": STEPS,
            "attempts": len(self.ends),
            "step_s": round(self.step_s, 2),
            "start_s": round(start_s, 1),
            "published_after_s": round(publishing_s, 2),
            "steps_lost_a_kill": round(unsaved, 2),
            **{f"share_at_{step_s}_s": round(found, 3) for step_s, found in share.items()},
        }


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    """One row for each mode whose run has ended as it should."""
    measured: list[Row] = []
    yield measured
    if len(measured) == len(LAYOUTS):
        record("soak", measured)


@pytest.mark.long("soak")
@pytest.mark.timeout(100 * HANG_S)
@pytest.mark.parametrize("mode", list(LAYOUTS))
def test_a_run_whose_attempts_are_all_killed_ends_as_if_nobody_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, rows: list[Row], capsys: pytest.CaptureFixture[str]
):
    with attempt(tmp_path, "unbroken", 0, mode) as whole:
        assert whole.finish() == 0, whole.text()[-4000:]
    costs = broken_run(tmp_path, mode, 0, monkeypatch)
    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    lines, row = costs.row(broken, mode)
    with capsys.disabled():
        print("", *(f"{mode}: {line}" for line in lines), sep="\n")
    regenerated = [path.read_text().count("kept rollouts are used again") for path in tmp_path.glob("broken-*.log")]
    assert mode == "sync" or sum(regenerated) > 0
    assert sorted(lineage(broken)) == list(range(1, STEPS + 1)) and lineage(broken) == lineage(unbroken)
    assert test_kill.rows(broken) == test_kill.rows(unbroken)
    assert test_kill.weights(broken, tmp_path, STEPS) == test_kill.weights(unbroken, tmp_path, STEPS)
    rows.append(row)


@pytest.mark.long("elsewhere")
@pytest.mark.timeout(20 * HANG_S)
@pytest.mark.parametrize(("kept_gb", "num_kept"), [(0, 0), (16, 4)])
def test_after_a_kill_with_lag_nothing_is_sampled_twice_though_the_next_attempt_has_other_engines_and_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_gb: int, num_kept: int
):
    """Prompts, four a step, of the step after the checkpoint were sampled before it, and are there once published."""
    settings = ["checkpointing.save_period=3", "grpo.max_num_steps=10", f"checkpointing.keep_rollouts_gb={kept_gb}"]
    monkeypatch.setenv("MRL_KILL_AT", "rollouts:32")
    with attempt(tmp_path, "run", 0, "lag 1", *settings) as first:
        assert first.finish() == -signal.SIGKILL, first.text()[-4000:]
    monkeypatch.delenv("MRL_KILL_AT")
    saved = newest_step(tmp_path / "run")
    assert saved in (3, 6)
    moved = {"policy.generation.num_cpu_engines": "1 -> 2", "cluster.cpu_units_per_node": "1 -> 2"}
    with attempt(
        tmp_path, "run", 1, "lag 1", *settings, *(f"{key}={change[-1]}" for key, change in moved.items())
    ) as second:
        assert second.finish() == 0, second.text()[-4000:]
    for key, change in moved.items():
        assert f"Config since the last attempt: {key}={change}" in second.text()
    rows, _ = read_rows(tmp_path / "run" / METRICS, METRIC_KEYS)
    (after,) = (row for row in rows if row["step"] == saved + 1)
    assert (after.get("rollout/kept_groups") or 0) == num_kept and after["train/max_trajectory_age"] == (
        1.0 if kept_gb else 0.0
    )
    assert sorted(lineage(tmp_path / "run")) == list(range(1, 11))
