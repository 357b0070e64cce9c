# SPDX-License-Identifier: Apache-2.0
"""Stopped processes and a frozen file system: the driver names them, keeps all stacks, and ends by the right name."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.attempts import Attempt, is_trained
from tests.stack.loop.conftest import SMALL, write_inputs
from tests.waiting import HANG_S

SETTINGS = [
    *SMALL,
    "grpo.val_at_start=false",
    "grpo.max_num_steps=100000",
    "checkpointing.save_period=1",
    "logger.tensorboard_enabled=false",
    "cluster.cpu_units_per_node=2",
    "policy.megatron_cfg.tensor_model_parallel_size=1",
    "policy.megatron_cfg.sequence_parallel=false",
]


def attempt(folder: Path, run_folder: Path, *settings: str) -> Attempt:
    overrides = [*write_inputs(folder), *SETTINGS, f"checkpointing.checkpoint_dir={run_folder}", *settings]
    return Attempt(run_folder, overrides, folder / "run.log")


def process_of(current: Attempt, victim: str) -> int:
    if victim != "raylet":
        return current.actor_pid("rewards" if victim == "reward-actor-0" else victim)
    descendants = psutil.Process(current.process.pid).children(recursive=True)
    (raylet,) = (found.pid for found in descendants if found.name() == "raylet")
    return raylet


def said(current: Attempt, text: str) -> str:
    """The first line of the log with `text`, without its time; "" if there is none."""
    return next((line for line in current.text().splitlines() if text in line), "")


@pytest.mark.parametrize(
    ("victim", "notice_s"),
    [
        ("policy-rank-1", 3),
        *(
            pytest.param(name, 50, marks=pytest.mark.long("hangs"))
            for name in ("policy-rank-1", "engine-0", "reward-actor-0", "raylet")
        ),
    ],
)
def test_a_stopped_process_is_named_and_ends_the_run(tmp_path: Path, victim: str, notice_s: int):
    # A step of a host under load must not end the run before it hangs.
    limits = [
        f"deadlines.{name}_s={max(60, 2 * notice_s)}" for name in ("train", "generate", "reward", "refit", "checkpoint")
    ]
    settings = [*limits, f"deadlines.start_s={HANG_S:g}", f"deadlines.notice_s={notice_s}"]
    name = victim.replace("-", " ")
    with attempt(tmp_path, tmp_path / "run", *settings) as current:
        current.wait_until(lambda: is_trained(current.run_folder, 2), "step 2")
        pid = process_of(current, victim)
        os.kill(pid, signal.SIGSTOP)
        # Others may have been slow before.
        current.wait_until(lambda: bool(said(current, f"The run hangs: {name} ")), "name of the process that hangs")
        line = said(current, f"The run hangs: {name} ")
        print(line)
        assert current.finish() == 1, current.text()[-4000:]
        current.assert_nothing_survives()
    assert re.search(rf"The run hangs: {name} \(process {pid} on \S+\) is stopped \(state T", line), line
    last = current.text().rstrip().splitlines()[-1]
    print(last)
    assert "The attempt ended: " in last and f"{name} (process {pid} on" in last, current.text()[-4000:]
    stacks = Path(line.rpartition(" ")[2]).read_text()
    assert stacks.count("most recent call first") > 2 and "=== driver" in stacks


@pytest.fixture
def frozen_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of its own, which `fsfreeze` can freeze."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    try:
        with image.open("wb") as file:
            file.truncate(2**28)
        for command in (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(folder)]):
            subprocess.run(command, check=True, capture_output=True, timeout=HANG_S)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system to freeze: {error}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=False, timeout=HANG_S)


@pytest.mark.long("hangs")
@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("fsfreeze") is None, reason="only root can mount and freeze a file system"
)
def test_a_frozen_run_folder_is_named_and_the_run_goes_on_after_the_thaw(tmp_path: Path, frozen_disk: Path):
    with attempt(tmp_path, frozen_disk / "run", "deadlines.notice_s=50") as current:
        current.wait_until(lambda: is_trained(current.run_folder, 2), "step 2")
        subprocess.run(["fsfreeze", "--freeze", str(frozen_disk)], check=True, timeout=HANG_S)
        try:
            current.wait_until(lambda: bool(said(current, "The run hangs: ")), "name of the file system")
            line = said(current, "The run hangs: ")
            print(line)
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", str(frozen_disk)], check=True, timeout=HANG_S)
        current.wait_until(lambda: bool(said(current, "The run goes on")), "progress after the thaw")
        os.kill(current.process.pid, signal.SIGTERM)
        assert current.finish() == 75, current.text()[-4000:]
        current.assert_nothing_survives()
    assert "has not answered a write for" in line and str(current.run_folder) in line
