# SPDX-License-Identifier: Apache-2.0
"""Last lines of attempts whose run folder or last checkpoint is lost: the reason, and only a way out that works."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from conversion.files.manifest import WriteReport
from mrl import check
from mrl.loop import main as entry
from mrl.loop.run import Budget
from mrl.loop.signal_watch import MaskTally
from mrl.store.run_folder import RunFolder
from mrl.train import train
from tests.unit.algo.groups import group
from tests.unit.loop.test_saving import Attempt
from tests.unit.store.test_run_folder import config
from tests.unit.stories import as_story

pytestmark = pytest.mark.usefixtures("no_report")


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the entry with another attempt; returns its exit code."""
    (tmp_path / "model").mkdir()
    settings = config(tmp_path)
    settings.checkpointing.metric_name, settings.checkpointing.save_period = None, 1

    def open_folder(_: object) -> RunFolder:
        folder = RunFolder(settings)
        folder.open()
        return folder

    def run(attempt) -> int:
        monkeypatch.setattr(check, "start_logging", lambda *_: set())  # which would take the messages away from pytest
        monkeypatch.setattr(entry, "prepare", lambda _: None)
        monkeypatch.setattr(entry, "open_folder", open_folder)

        async def run_attempt(_train: object, _training: object, folder: RunFolder, _budget: object) -> bool:
            return attempt(Attempt(folder))

        monkeypatch.setattr(entry, "run_attempt", run_attempt)
        return entry.main(train, ["grpo_tiny.yaml"])

    return run


def one_step(now: Attempt) -> bool:
    state = now.saver.load(now.newest, last_step=9)
    now.saver.save_last(now.train(state.step + 1))
    return True


@pytest.mark.parametrize("remove", [False, True])
def test_a_run_folder_that_is_moved_or_removed_is_not_begun_again(
    ends, tmp_path: Path, caplog: pytest.LogCaptureFixture, remove: bool
):
    path, away = tmp_path / "run", tmp_path / "away"

    def attempt(now: Attempt) -> bool:
        state = now.saver.load(now.newest, last_step=9)
        shutil.rmtree(path) if remove else path.rename(away)
        now.saver.save_last(state if state.step > 1 else now.train(state.step + 1))
        return True

    assert ends(one_step) == 0
    assert ends(attempt) == 1
    last = caplog.messages[-1]
    assert (
        f"{path} is not there any more: it was moved or removed" in last
        and "begins at step 0" in last
        and "same command" not in last
    )
    assert not path.exists()
    if not remove:  # the way out
        away.rename(path)
        (path / "owner.json").unlink()  # of this process, which lives
        for step in (2, 3):
            assert ends(one_step) == 0 and (path / f"step_{step}/COMPLETE").exists()


# As Ray spells an error of an actor, with its colours.
OF_RAY = """\x1b[36mray::RefitActor.pull()\x1b[39m (pid=1, ip=10.0.0.1)
  File "/site/ray/worker.py", line 9, in pull
    raise ValueError(
        ~~~~^^^
ValueError: slot a.b
  has 3 bytes"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [("engine 0 failed in start:\n no room", "RuntimeError: engine 0 failed in start: no room"), (OF_RAY, OF_RAY)],
)
def test_a_failed_start_is_one_line_and_its_traceback_is_in_the_logs(
    ends, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, reason: str
):
    def attempt(now: Attempt) -> bool:
        raise RuntimeError(text)

    assert ends(one_step) == 0
    caplog.clear()
    assert ends(attempt) == 1
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    logs = tmp_path / "run/logs/exp_002/actors"
    expected = "ValueError: slot a.b has 3 bytes" if reason == OF_RAY else reason
    assert said == f"The attempt ended: {expected}. Traceback (traceback.txt) and logs of the actors: {logs}"
    written = (logs / "traceback.txt").read_text()
    assert "in attempt" in written and "\x1b" not in written
    ends_of = [json.loads((tmp_path / f"run/logs/exp_00{number}/ended.json").read_text()) for number in (1, 2)]
    assert [(end["code"], end["text"]) for end in ends_of] == [(0, "The run is complete"), (1, said)]
    assert not any(record.exc_info or "in attempt" in record.getMessage() for record in caplog.records)
    for _ in range(2):
        assert ends(one_step) == 0


@pytest.mark.parametrize(
    ("code", "advice"),
    [(errno.ENOSPC, "free space"), (errno.EROFS, "read-only"), (errno.EDQUOT, "quota"), (errno.EFBIG, "of that size")],
)
def test_a_last_save_that_fails_says_why_first_and_last(
    ends, tmp_path: Path, caplog: pytest.LogCaptureFixture, code: int, advice: str
):
    def attempt(now: Attempt) -> bool:
        now.saver.load(now.newest, last_step=9)
        now.ranks.finish_save = lambda rank, timeout_s: WriteReport(
            {}, 0.0, f"{tmp_path}: {OSError(code, os.strerror(code))}"
        )
        now.saver.save_last(now.train(2))
        return True

    assert ends(one_step) == 0
    caplog.clear()
    assert ends(attempt) == 1
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    parts = said[0].split("; ")
    assert parts[0] == f"the checkpoint of step 2 cannot be written: {tmp_path}: [Errno {code}] {os.strerror(code)}"
    assert advice in parts[1] and parts[2:] == ["the one before it stays: step_1"]
    assert said[-1].startswith(f"The attempt ended: {said[0]}. ") and said[-1].endswith("The same command resumes.")
    assert "Traceback" not in caplog.text
    assert "SaveFailed" in (tmp_path / "run/logs/exp_002/actors/traceback.txt").read_text()
    for step in (2, 3):
        assert ends(one_step) == 0 and (tmp_path / f"run/step_{step}/COMPLETE").exists()


def test_a_full_disk_whose_error_names_no_file_is_named_by_the_run_folder(
    ends, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def attempt(now: Attempt) -> bool:
        state = now.saver.load(now.newest, last_step=9)
        monkeypatch.setattr(now.folder.ledger, "copy_to", full)  # as a write does
        now.saver.save_last(now.train(state.step + 1))
        return True

    assert ends(one_step) == 0
    for _ in range(2):
        caplog.clear()
        assert ends(attempt) == 1
        said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        reason = f"the checkpoint of step 2 cannot be written: [Errno 28] No space left on device: {tmp_path / 'run'}; "
        assert said[0].startswith(reason) and reason in said[-1]
    for step in (2, 3):
        assert ends(one_step) == 0 and (tmp_path / f"run/step_{step}/COMPLETE").exists()


def test_a_start_of_a_complete_run_with_other_keys_leaves_what_describes_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "model").mkdir()
    settings, identity = config(tmp_path), {"model": {}, "tokenizer": {}, "data": {"rows": "a"}}
    settings.checkpointing.metric_name, settings.checkpointing.save_period = None, 1

    def start(num_steps: int, identity: dict[str, dict[str, str]]) -> bool:
        folder = RunFolder(settings, identity)
        training = SimpleNamespace(config=settings, num_steps=num_steps, left_out=[])
        folder.open()
        with folder:
            checkpoint, is_complete = entry.find_start(cast(Any, training), folder)
            if is_complete:
                budget = Budget(None, started=time.monotonic())
                return asyncio.run(entry.run_attempt(train, cast(Any, training), folder, budget))
            now = Attempt(folder)
            state = now.saver.load(checkpoint, last_step=num_steps)
            now.saver.save_last(now.train(state.step + 1))
        return False

    def described() -> dict[str, str]:
        names = ("config.yaml", "about.json", "identity.json")
        texts = {name: (tmp_path / "run" / name).read_text() for name in names}
        return texts | {"logs": " ".join(sorted(path.name for path in (tmp_path / "run/logs").iterdir()))}

    caplog.set_level("INFO")
    assert not start(1, identity)
    before = described()
    settings.grpo.num_generations_per_prompt, settings.checkpointing.allow_changes = 8, ["data"]
    assert start(1, {**identity, "data": {"rows": "b"}})
    said = f"step 1 of 1: {tmp_path}/run/step_1; the changed keys have no effect: grpo.num_generations_per_prompt="
    assert f"Already complete at {said}" in caplog.text and "; to go on: grpo.max_num_steps=N" in caplog.text
    assert "since the last attempt" not in caplog.text and described() == before
    # One that goes on says what it trains with.
    assert not start(2, {**identity, "data": {"rows": "b"}})
    now = described()
    assert "since the last attempt: grpo.num_generations_per_prompt" in caplog.text and '"b"' in now["identity.json"]
    assert now["config.yaml"] != before["config.yaml"] and now["logs"] == "exp_001 exp_002"


@as_story
async def test_every_loop_ends_with_what_was_masked(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(entry, "outlook", lambda *_, **__: "")
    monkeypatch.setattr(entry, "watch_hosts", lambda *_: nullcontext())
    tally = MaskTally().count([group([0.0, 0.0], name="a", invalid=[0])])
    run = SimpleNamespace(masks=tally, begin=AsyncMock(return_value="state"), saved=lambda _: nullcontext())
    training = SimpleNamespace(config=None, num_steps=2, open=lambda *_: nullcontext(run))
    loggers = SimpleNamespace(is_empty=True)
    folder = SimpleNamespace(measured=lambda *_, **__: None, next_metrics={}, open_loggers=lambda: nullcontext(loggers))
    # `mrl.train` and `mrl.api.start` both start runs by this.
    async with entry.start_run(cast(Any, training), cast(Any, folder), None, cast(Any, None)) as started:
        assert started == (run, "state") and "masked" not in caplog.text
    assert "In the steps of this attempt 1 of 2 rollouts (50.0%) are masked, and not trained on; 1 " in caplog.text
