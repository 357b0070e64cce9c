# SPDX-License-Identifier: Apache-2.0
"""Signals to a real run, to its driver, process group or all processes, in every phase: as docs/cluster.md says.

Attempts of a walk share one run folder, so that each shows what the ones before it have left.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mrl.signals import BURST_S, ENDED_AT_ONCE, ENDED_EARLY, MARK
from mrl.store.checkpoints import find_damage
from tests.faults.attempts import Attempt, is_taken, is_trained, is_writing, ledger, lineage
from tests.stack.loop.conftest import SMALL, write_inputs
from tests.stack.pipeline.test_pipeline_run import OWN_LOOP
from tests.waiting import HANG_S

SETTINGS = [
    *SMALL,
    "grpo.val_at_start=false",
    "checkpointing.save_period=1000",
    "checkpointing.keep_top_k=100",
    "logger.tensorboard_enabled=false",
    "cluster.cpu_units_per_node=2",
    "policy.megatron_cfg.tensor_model_parallel_size=1",
    "policy.megatron_cfg.sequence_parallel=false",
]
GOES_ON = "the same command goes on"


@dataclass(frozen=True)
class Phase:
    """A phase of an attempt, and how one ends that gets a signal in it."""

    has_come: Callable[[Attempt, int], bool]
    """Condition on an attempt and the step that it resumes from."""
    trains: bool = False
    """True when it has trained a step, which it saves."""
    code: int = ENDED_EARLY
    overrides: Callable[[int], list[str]] = lambda _: []


def is_listening(attempt: Attempt) -> bool:
    """True when the driver's first line has run."""
    status = Path(f"/proc/{attempt.process.pid}/status").read_text()
    return bool(int(status.partition("SigBlk:")[2].split()[0], 16) & 1 << signal.SIGTERM - 1)


def says(text: str) -> Callable[[Attempt, int], bool]:
    return lambda attempt, _: text in attempt.text()


PHASES = {
    "import": Phase(lambda attempt, _: is_listening(attempt)),
    "input": Phase(says("Config: ")),
    "Ray": Phase(says("Next: start ")),
    "build": Phase(says("start deadline ")),
    "refit zero": Phase(says("Refit schedule: ")),
    "rollouts": Phase(lambda attempt, first: is_taken(attempt.run_folder, first + 2), trains=True),
    "train": Phase(lambda attempt, first: is_trained(attempt.run_folder, first + 1), trains=True),
    "save": Phase(
        lambda attempt, first: (
            any(is_writing(attempt.run_folder, first + step) for step in (1, 2, 3)) or says("Step 4/")(attempt, first)
        ),
        trains=True,
        overrides=lambda _: ["checkpointing.save_period=1"],
    ),
    "validation": Phase(says("[Validate] step"), trains=True, overrides=lambda _: ["grpo.val_period=1"]),
    "end": Phase(
        lambda attempt, first: f"Step {first + 2}/{first + 2}" in attempt.text(),
        trains=True,
        code=0,
        overrides=lambda first: [f"grpo.max_num_steps={first + 2}"],
    ),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_inputs(tmp_path_factory.mktemp("signals"))


def newest(run_folder: Path) -> int:
    return max((int(marker.parent.name[5:]) for marker in run_folder.glob("step_*/COMPLETE")), default=0)


def disturb(inputs: list[str], run_folder: Path, name: str, number: signal.Signals, target: str) -> None:
    """One attempt that gets a signal in the phase `name`, and ends as the table says."""
    phase, first = PHASES[name], newest(run_folder)
    overrides = [*inputs, *SETTINGS, *phase.overrides(first), f"checkpointing.checkpoint_dir={run_folder}"]
    log = run_folder.with_name(f"{run_folder.name}-{name}-{number.name}-{target}.log".replace(" ", "-"))
    with Attempt(run_folder, overrides, log) as attempt:
        attempt.wait_until(lambda: phase.has_come(attempt, first), name)
        attempt.send(number, target)
        code, text = attempt.finish(), attempt.text()
        assert code == phase.code, text
        assert "Traceback" not in text and "died" not in text, text
        assert (text.count(GOES_ON), number.name in text) == ((1, True) if code else (0, number.name in text)), text
        attempt.assert_nothing_survives()
    assert not (run_folder / "owner.json").exists()
    trained = max(lineage(run_folder), default=0)
    assert newest(run_folder) == trained and trained > first if phase.trains else newest(run_folder) == first
    assert all(find_damage(folder) is None for folder in run_folder.glob("step_*"))


WALK = [
    ("Ray", signal.SIGTERM, "group"),
    ("rollouts", signal.SIGINT, "group"),
]
"""In the phase of training the loop of one's own gets its signal; the long part has every cell."""


@pytest.mark.timeout(1200)
def test_a_signal_costs_no_step_wherever_it_comes(inputs: list[str], tmp_path: Path):
    for name, number, target in WALK:
        disturb(inputs, tmp_path / "run", name, number, target)
    assert sum(event["event"] == "trained" for event in ledger(tmp_path / "run")) == len(lineage(tmp_path / "run"))


@pytest.mark.timeout(1200)
def test_a_loop_of_ones_own_ends_and_goes_on_as_mrls(inputs: list[str], tmp_path: Path):
    run_folder = tmp_path / "run"
    overrides = [
        *inputs,
        *SETTINGS,
        f"checkpointing.checkpoint_dir={run_folder}",
        "grpo.max_num_steps=3",
        "grpo.val_period=3",
    ]
    codes, texts = list[int](), list[str]()
    for name in ("ended", "resumed"):
        with Attempt(run_folder, overrides, tmp_path / name, program=OWN_LOOP) as attempt:
            if name == "ended":
                attempt.wait_until(lambda: is_trained(run_folder, 1), "step 1")
                attempt.send(signal.SIGTERM, "every process")
            codes.append(attempt.finish())
            texts.append(attempt.text())
            attempt.assert_nothing_survives()
    first = newest(run_folder)
    assert codes == [ENDED_EARLY, 0], texts
    assert texts[0].count(GOES_ON) == 1 and "Traceback" not in "".join(texts)
    assert re.search(r"Resuming from .*step_[12] \(step [12] of 3\)", texts[1]) and first == 3 == max(
        lineage(run_folder)
    )
    for words in ("= Step 3/3 =", "[Generate] 4 prompts x 4", "[Train] ", "[Mrl] ", "[Validate] step 3", "Start: "):
        assert words in texts[1], texts[1]
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for name in (
        "performance/tokens_per_sec_per_gpu",
        "train/loss",
        "train/reward",
        "refit/verified_bytes",
        "time/total",
    ):
        assert all(name in row for row in rows), name
    assert "val/accuracy" in rows[2]
    assert (run_folder / "report.html").exists() and len(
        list(run_folder.glob("logs/exp_*/train_data_step*.jsonl.gz"))
    ) == 3
    assert not (run_folder / "owner.json").exists()


@pytest.mark.long("signals")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", ["driver", "group", "every process"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_every_cell_of_the_table(inputs: list[str], tmp_path: Path, number: signal.Signals, target: str):
    for name in PHASES:
        disturb(inputs, tmp_path / "run", name, number, target)


@pytest.mark.long("signals")
@pytest.mark.timeout(1200)
def test_a_second_ctrl_c_ends_at_once(inputs: list[str], tmp_path: Path):
    run_folder = tmp_path / "run"
    overrides = [*inputs, *SETTINGS, "grpo.max_num_steps=100000", f"checkpointing.checkpoint_dir={run_folder}"]
    with Attempt(run_folder, overrides, tmp_path / "log") as attempt:
        attempt.wait_until(lambda: is_trained(run_folder, 2), "step 2")
        # Without an answer of its ranks it cannot save.
        for rank in range(2):
            os.kill(attempt.actor_pid(f"policy-rank-{rank}"), signal.SIGSTOP)
        attempt.send(signal.SIGINT, "group")
        attempt.wait_until(lambda: "SIGINT: " in attempt.text(), "the first one")
        while attempt.process.poll() is None:
            attempt.send(signal.SIGINT, "group")
            time.sleep(2 * BURST_S)
        assert attempt.finish() == ENDED_AT_ONCE == 130, attempt.text()
        assert "Traceback" not in attempt.text() and attempt.text().count(GOES_ON) == 1, attempt.text()
        attempt.assert_nothing_survives()
    assert not (run_folder / "owner.json").exists()
    (ended,) = run_folder.glob("logs/exp_*/ended.json")
    assert json.loads(ended.read_text())["code"] == ENDED_AT_ONCE
    disturb(inputs, run_folder, "end", signal.SIGTERM, "driver")


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[Path]:
    """A frozen file system: whoever writes to it is in state D until it thaws."""
    folder, image = tmp_path / "frozen", tmp_path / "image"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(2**25)
    for command in (
        ["mkfs.ext4", "-q", str(image)],
        ["mount", "-o", "loop", str(image), str(folder)],
        ["fsfreeze", "-f", str(folder)],
    ):
        if os.geteuid() != 0 or shutil.which(command[0]) is None:
            pytest.skip("needs root, and mkfs.ext4, mount and fsfreeze")
        subprocess.run(command, check=True, timeout=HANG_S)
    try:
        yield folder
    finally:
        subprocess.run(["fsfreeze", "-u", str(folder)], check=True, timeout=HANG_S)
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=HANG_S)


@pytest.mark.long("signals")
@pytest.mark.timeout(1200)
def test_a_process_that_cannot_be_killed_is_named_and_costs_nothing(inputs: list[str], tmp_path: Path, frozen: Path):
    run_folder = tmp_path / "run"
    with Attempt(
        run_folder, [*inputs, *SETTINGS, f"checkpointing.checkpoint_dir={run_folder}"], tmp_path / "log"
    ) as attempt:
        attempt.wait_until(lambda: is_trained(run_folder, 1), "step 1")
        environment = Path(f"/proc/{attempt.actor_pid('rewards')}/environ").read_bytes().split(b"\0")
        mark = next(entry.decode() for entry in environment if entry.startswith(MARK.encode()))
        program = "import sys; open(sys.argv[1], 'w').write('text')"
        victim = subprocess.Popen([sys.executable, "-c", program, str(frozen / "file")], env=dict([mark.split("=", 1)]))
        attempt.wait_until(lambda: " D " in Path(f"/proc/{victim.pid}/stat").read_text(), "state D")
        attempt.send(signal.SIGTERM, "driver")
        assert attempt.finish() == ENDED_EARLY, attempt.text()
        assert f"process {victim.pid} ({sys.executable} -c {program}" in attempt.text() and "state D" in attempt.text()
    assert newest(run_folder) == max(lineage(run_folder))
