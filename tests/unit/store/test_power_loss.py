# SPDX-License-Identifier: Apache-2.0
"""Power loss leaves of each file what was synced. Steps before a checkpoint keep their lines; two attempts go on."""

from __future__ import annotations

import gzip
import json
import os
import random
from itertools import count
from pathlib import Path

import pytest

from mrl.store.run_folder import METRICS, SAMPLES, RunFolder
from tests.unit.loop.operations import Operations, in_child
from tests.unit.loop.test_saving import Attempt
from tests.unit.store.test_run_folder import config
from tests.unit.store.test_samples import group_of

pytestmark = pytest.mark.usefixtures("no_report")


class Disk:
    """Sizes of files when they were last forced to disk, by inode: all that a disk holds of them if the power goes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.sizes: dict[int, int] = {}
        sync = os.fsync

        def noted(descriptor: int) -> None:
            sync(descriptor)
            status = os.fstat(descriptor)
            self.sizes[status.st_ino] = status.st_size

        patch.setattr(os, "fsync", noted)

    def lose_power(self, folder: Path) -> list[str]:
        """Cuts what is not on disk; ext4 keeps the names. Returns which files lose something. Ranks sync their own."""
        lost = []
        for path in sorted(set(folder.rglob("*")) - set(folder.rglob("*.distcp"))):
            if (
                path.is_file()
                and not path.is_symlink()
                and (size := self.sizes.get(path.stat().st_ino, 0)) < path.stat().st_size
            ):
                os.truncate(path, size)
                lost.append(path.name)
        return lost


def train(now: Attempt, step: int) -> None:
    state = now.train(step)
    now.folder.log_samples(step, "train", [group_of("math", 1.0)])
    now.folder.finish_texts()
    if step % 4 == 0:
        now.saver.save_last(state)


def start(tmp_path: Path) -> Attempt:
    settings = config(tmp_path)
    settings.checkpointing.metric_name, settings.logger.rollouts = None, "all"
    folder = RunFolder(settings)
    folder.open()
    return Attempt(folder)


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_the_steps_of_a_checkpoint_keep_their_lines_and_two_attempts_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "model").mkdir()
    disk, folder = Disk(monkeypatch), tmp_path / "run"
    for attempt in (1, 2, 3):
        now = start(tmp_path)
        assert now.saver.load(now.newest, last_step=99).step == 4 * (attempt - 1)
        for step in range(4 * attempt - 3, 4 * attempt + 3):
            train(now, step)
        with now.folder:
            pass
        lost = disk.lose_power(folder)
        assert METRICS in lost and SAMPLES in lost, "of two steps after the checkpoint"
        for name in (METRICS, SAMPLES):
            assert steps_in(folder / name)[: 4 * attempt] == list(range(1, 4 * attempt + 1))
        for text in folder.glob("logs/exp_*/*.jsonl.gz"):
            assert gzip.decompress(text.read_bytes()).count(b"\n") == 1, "no empty file has the name of a step"


def after_a_loss(tmp_path: Path, disk: Disk, number: int) -> int:
    """Power is lost at this operation of the driver's fourth step and its checkpoint; two attempts go on.

    Returns the number of operations, if there are fewer.
    """
    (tmp_path / "model").mkdir(parents=True)
    folder = tmp_path / "run"

    def work() -> int:
        now = start(tmp_path)
        for step in range(1, 8):
            train(now, step)

        def lose(count: int, _: str) -> None:
            if count == number:
                operations.is_armed = False
                disk.lose_power(folder)
                os._exit(0)

        operations = Operations(folder, lose)
        operations.is_armed = True
        train(now, 8)
        train(now, 9)
        return operations.count

    if (total := in_child(work)) is not None:
        return total
    for attempt in (0, 1):
        now = start(tmp_path)
        (newest,) = {now.newest.step} if now.newest is not None else {0}
        assert now.saver.load(now.newest, last_step=99).step == newest >= 4 * (attempt + 1)
        # Whole, not said to be gone: every line of the steps that the checkpoint has.
        for name in (METRICS, SAMPLES):
            assert steps_in(folder / name) == list(range(1, newest + 1))
        assert sorted(now.folder.ledger.state.trained) == list(range(1, newest + 1))
        for step in range(newest + 1, newest + 5):
            train(now, step)
        with now.folder:
            pass
    return 0


def test_power_lost_during_a_save_loses_no_line_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    after_a_loss(tmp_path, Disk(monkeypatch), random.Random(0).randint(1, 20))


@pytest.mark.long("faults")
def test_power_lost_at_any_operation_of_a_save_loses_no_line_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    disk = Disk(monkeypatch)
    total = next(number - 1 for number in count(1) if after_a_loss(tmp_path / str(number), disk, number))
    assert total > 20


def test_steps_that_lost_their_lines_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "model").mkdir()
    now = start(tmp_path)
    for step in range(1, 5):
        train(now, step)
    with now.folder:
        (tmp_path / "run" / METRICS).write_bytes(b"")
    for _ in (1, 2):
        caplog.clear()
        now = start(tmp_path)
        assert now.saver.load(now.newest, last_step=99).step == 4
        assert f"{METRICS} has no lines of 3 steps, 1 to 3: they are lost" in caplog.text
        assert steps_in(tmp_path / "run" / METRICS) == [4], "which the checkpoint has"
        with now.folder:
            pass


def test_a_last_line_without_its_end_costs_no_line_of_the_next_attempt(tmp_path: Path):
    """Power lost, or an editor, took the last byte alone: the line is whole."""
    (tmp_path / "model").mkdir()
    for attempt in (0, 1, 2):
        now = start(tmp_path)
        now.saver.load(now.newest, last_step=99)
        for step in range(4 * attempt + 1, 4 * attempt + 5):
            train(now, step)
        with now.folder:
            pass
        for name in (METRICS, SAMPLES):
            path = tmp_path / "run" / name
            assert steps_in(path) == list(range(1, 4 * attempt + 5))
            os.truncate(path, path.stat().st_size - 1)


MESS = b"[" * 100_000 + b"\n" + b'{"step": 1, "trai\n'
MESS += (
    b'\n[1,2]\nnull\n{"step":"a"}\n{"step":1e400}\n{"step":-3}\n{"step":true}\n{"step":2.5}\n{"step":NaN}\n{"step":1'
    + b"0" * 5000
    + b"}\n"
)


@pytest.mark.parametrize(
    "name", [METRICS, SAMPLES, "ledger.jsonl", "loggers.json", "run.json", "identity.json", "about.json"]
)
def test_numbers_that_no_one_can_count_end_no_start(tmp_path: Path, name: str):
    (tmp_path / "model").mkdir()
    now = start(tmp_path)
    for step in range(1, 5):
        train(now, step)
    with now.folder:
        pass
    for step in (4, 8):
        path = tmp_path / "run" / name
        path.write_bytes((path.read_bytes() if path.exists() and step == 4 else b"") + MESS)
        now = start(tmp_path)
        assert now.saver.load(now.newest, last_step=99).step == step
        assert now.folder.measured("time/total", num_steps=3) is None
        for later in range(step + 1, step + 5):
            train(now, later)
        with now.folder, now.folder.open_loggers():
            pass
        if name == METRICS:
            assert steps_in(path)[-4:] == list(range(step + 1, step + 5))
