# SPDX-License-Identifier: Apache-2.0
"""A run folder that stops answering mid-run: each write of the driver ends at its limit, with the name of the file.

A full pipe, and one that nobody reads, stand for a file that takes nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from conversion.files import durable
from mrl.loop.main import main
from mrl.store import checkpoints, ledger, lines, run_folder
from mrl.store.run_folder import METRICS, SAMPLES, RunFolder
from mrl.train import train
from mrl.types import RunState
from tests.unit.loop.test_saving import Attempt, slow
from tests.unit.store.test_run_folder import config
from tests.unit.store.test_samples import group_of
from tests.waiting import HANG_S

SOON_S = 0.05


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    (tmp_path / "model").mkdir()
    settings = config(tmp_path)
    settings.checkpointing.metric_name, settings.logger.rollouts = None, "none"
    made = RunFolder(settings)
    made.open()
    made.newest_checkpoint()
    yield made
    made.give_back()


def unread(path: Path) -> None:
    """Makes a file whose opening waits for a reader."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def stuck(monkeypatch: pytest.MonkeyPatch, name: str, file: str) -> threading.Event:
    """Has a method of paths wait for the event where it is called for a file of that name."""
    answers, call = threading.Event(), getattr(Path, name)

    def wait(path: Path, *arguments: object, **options: object) -> object:
        if file in str(path):
            answers.wait(HANG_S)
        return call(path, *arguments, **options)

    monkeypatch.setattr(Path, name, wait)
    return answers


def test_the_ledger(folder: RunFolder, monkeypatch: pytest.MonkeyPatch):
    folder.ledger.take(1, [(0, "p:1")])
    unread(folder.ledger.path)
    monkeypatch.setattr(ledger, "WRITE_TIMEOUT_S", SOON_S)
    with pytest.raises(TimeoutError, match=r"write of .*/run/ledger\.jsonl: no answer within"):
        folder.ledger.train(1, [(0, "p:1")])
    # It lets go of the thread that waits.
    assert b'"trained"' in folder.ledger.path.read_bytes()


def test_the_metrics_and_the_samples_of_the_report(folder: RunFolder, monkeypatch: pytest.MonkeyPatch):
    for module in (run_folder, lines):
        monkeypatch.setattr(module, "WRITE_TIMEOUT_S", SOON_S)
    with monkeypatch.context() as patch:
        answers = stuck(patch, "open", SAMPLES)
        with pytest.raises(TimeoutError, match=rf"write of .*/run/{SAMPLES}: no answer within"):
            folder.log_samples(1, "train", [group_of("math", 1.0)])
        answers.set()
    unread(folder.path / METRICS)
    reader = os.open(folder.path / METRICS, os.O_RDONLY | os.O_NONBLOCK)
    folder._metrics = lines.JsonlLogger(folder.path / METRICS)
    with pytest.raises(TimeoutError, match=rf"write of .*/run/{METRICS}: no answer within"), folder:
        for step in range(5000):
            folder.log_metrics(step, {"train/loss": float(step)})
    os.close(reader)


@pytest.mark.parametrize(
    ("call", "limit", "name", "file"),
    [
        (lambda folder: folder.note_refit({}), (durable, "WRITE_TIMEOUT_S"), "write_text", "refit.json"),
        (
            lambda folder: folder.checkpoints.begin(RunState(step=1)),
            (checkpoints, "IO_TIMEOUT_S"),
            "write_text",
            "tmp_step_1",
        ),
        (lambda folder: folder.checkpoints.remove_unfinished(), (checkpoints, "IO_TIMEOUT_S"), "iterdir", "/run"),
        (lambda folder: RunFolder(folder.config).open(), (durable, "WRITE_TIMEOUT_S"), "mkdir", "/run"),
        (lambda folder: folder.give_back(), (durable, "WRITE_TIMEOUT_S"), "unlink", "owner.json"),
    ],
)
def test_small_files_and_folders(
    folder: RunFolder,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[RunFolder], object],
    limit: tuple[ModuleType, str],
    name: str,
    file: str,
):
    with monkeypatch.context() as patch:
        patch.setattr(*limit, SOON_S)
        answers = stuck(patch, name, file)
        with pytest.raises(TimeoutError, match=rf"{file}.*: no answer within"):
            call(folder)
        answers.set()


def test_a_save_that_gets_no_answer_ends_the_run_and_keeps_the_checkpoint_before(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
):
    attempt = Attempt(folder)
    attempt.saver.save_last(attempt.train(1))
    slow(attempt)
    attempt.saver.begin(attempt.train(2))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "IO_TIMEOUT_S", SOON_S)
        answers = stuck(patch, "rename", "tmp_step_2")
        with pytest.raises(TimeoutError, match=r"commit of .*/run/tmp_step_2: no answer within"):
            attempt.saver.finish()
        assert [found.step for found in checkpoints.checkpoints_in(folder.path)] == [1]
        answers.set()


def test_the_command_says_so_and_that_the_same_command_resumes(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []

    def no_answer(*_: object, **__: object) -> None:
        raise TimeoutError("write of /run/config.yaml: no answer within 600 s")

    monkeypatch.setattr("mrl.loop.main.load_run", no_answer)
    monkeypatch.setattr("mrl.loop.main.logger.error", lambda text, *arguments: said.append(text % arguments))
    assert main(train, ["grpo_tiny.yaml"]) == 1
    assert said == ["The attempt ended: write of /run/config.yaml: no answer within 600 s. The same command resumes."]
