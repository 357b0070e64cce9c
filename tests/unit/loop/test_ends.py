# SPDX-License-Identifier: Apache-2.0
"""Last lines of attempts whose run folder or last checkpoint is lost: the reason, and only a way out that works."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from conversion.files.manifest import WriteReport
from mrl import check
from mrl.config.schema.run import RunConfig
from mrl.loop import main as entry
from mrl.loop.signal_watch import MaskTally
from mrl.ops import runs
from mrl.store.checkpoints import Checkpoint
from mrl.store.run_folder import RunFolder
from mrl.train import train
from mrl.types import RunState
from tests.unit.algo.groups import group
from tests.unit.loop.test_saving import Attempt
from tests.unit.store.test_run_folder import config
from tests.unit.stories import as_story

pytestmark = pytest.mark.usefixtures("no_report")


@pytest.fixture
def settings(tmp_path: Path) -> RunConfig:
    (tmp_path / "model").mkdir()
    settings = config(tmp_path)
    settings.checkpointing.metric_name, settings.checkpointing.save_period = None, 1
    return settings


@pytest.fixture
def ends(settings: RunConfig, monkeypatch: pytest.MonkeyPatch):
    """Runs the entry with another attempt; returns its exit code."""

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


def start(
    settings: RunConfig,
    num_steps: int,
    identity: dict[str, dict[str, str]] | None = None,
    *,
    error: Exception | None = None,
) -> int:
    """Exit code of an attempt, which makes one step, if there is one to make, and fails with `error` behind it."""
    training = SimpleNamespace(config=settings, num_steps=num_steps, left_out=[])

    def open_folder(_: object) -> RunFolder:
        folder = RunFolder(settings, identity)
        folder.open()
        return folder

    @asynccontextmanager
    async def start_run(_training: object, folder: RunFolder, checkpoint: Checkpoint | None, _budget: object):
        now = Attempt(folder)
        state = now.saver.load(checkpoint, last_step=num_steps)
        yield SimpleNamespace(now=now, is_done=lambda state: state.step == num_steps), state

    async def train_one(run: Any, state: RunState) -> None:
        state.step += 1
        run.now.saver.save_last(run.now.train(state.step))
        if error is not None:
            raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "start_logging", lambda *_: set())
        patch.setattr(entry, "prepare", lambda _: training)
        patch.setattr(entry, "open_folder", open_folder)
        patch.setattr(entry, "start_run", start_run)
        return entry.main(train_one, ["grpo_tiny.yaml"])


def listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, list[str]]:
    """State of a run, and the end of each attempt, as `mrl runs` has them."""
    capsys.readouterr()
    assert runs.main([str(folder)]) == 0
    state = re.split(r"\s{2,}", capsys.readouterr().out.splitlines()[1])[1]
    assert runs.main(["show", str(folder)]) == 0
    attempts = [line for line in capsys.readouterr().out.splitlines() if line.startswith("attempt ")]
    return state, [line.partition("; ")[2] for line in attempts]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_run_that_failed_behind_its_last_checkpoint_is_finished_when_a_start_finds_no_step(
    settings: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_killed: bool
):
    failed = "ended with exit code 1: a logger does not answer"
    assert start(settings, 2) == 75
    assert start(settings, 2, error=TimeoutError("a logger does not answer")) == 1
    state, ends = listed(tmp_path / "run", capsys)
    assert state == "ended, code 1" and ends[1].startswith(failed)
    if is_killed:
        (tmp_path / "run/logs/exp_002/ended.json").unlink()
    for _ in range(2):
        assert start(settings, 2) == 0
        state, ends = listed(tmp_path / "run", capsys)
        own = "without a word" if is_killed else "with exit code 1: The attempt ended: a logger does not answer. Logs"
        said = "ended with exit code 0: A later start found the run complete; this attempt had ended "
        assert state == "finished" and len(ends) == 2 and ends[1].startswith(said + own), ends
    # With more steps it is a run like others.
    assert start(settings, 4) == 75
    assert listed(tmp_path / "run", capsys)[0] == "ended, code 75"
    assert start(settings, 4) == 0
    assert listed(tmp_path / "run", capsys)[0] == "finished"


def test_an_attempt_that_is_refused_before_it_trains_is_listed_with_its_reason(
    settings: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / "run"
    assert start(settings, 1) == 0
    before = (folder / "config.yaml").read_text()
    settings.grpo.num_generations_per_prompt = 8
    shard = next(folder.rglob("*.distcp"))
    content = shard.read_bytes()
    shard.write_bytes(b"x" * len(content))
    for _ in range(2):  # the second finds it set aside, before it has a folder
        assert start(settings, 1) == 2
        state, ends = listed(folder, capsys)
        assert state == "ended, code 2" and len(ends) == 2 and "none of its checkpoints is whole" in ends[1], ends
        assert runs.main(["show", str(folder)]) == 0
        assert "  grpo.num_generations_per_prompt: 16 -> 8" in capsys.readouterr().out
    assert (folder / "config.yaml").read_text() == before
    (folder / "damaged_step_1").rename(folder / "step_1")
    shard.write_bytes(content)
    assert start(settings, 1) == 0
    state, ends = listed(folder, capsys)
    assert state == "finished" and len(ends) == 2 and "with exit code 2: " in ends[1], ends
    assert start(settings, 2) == 0
    assert len(listed(folder, capsys)[1]) == 3


def test_a_start_of_a_complete_run_with_other_keys_leaves_what_describes_the_run(
    settings: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    identity = {"model": {}, "tokenizer": {}, "data": {"rows": "a"}}

    def described() -> dict[str, str]:
        names = ("config.yaml", "about.json", "identity.json")
        texts = {name: (tmp_path / "run" / name).read_text() for name in names}
        return texts | {"logs": " ".join(sorted(path.name for path in (tmp_path / "run/logs").iterdir()))}

    caplog.set_level("INFO")
    assert start(settings, 1, identity) == 0
    before = described()
    settings.grpo.num_generations_per_prompt, settings.checkpointing.allow_changes = 8, ["data"]
    assert start(settings, 1, {**identity, "data": {"rows": "b"}}) == 0
    said = f"step 1 of 1: {tmp_path}/run/step_1; the changed keys have no effect: grpo.num_generations_per_prompt="
    assert f"Already complete at {said}" in caplog.text and "; to go on: grpo.max_num_steps=N" in caplog.text
    assert "since the last attempt" not in caplog.text and described() == before
    # One that goes on says what it trains with.
    assert start(settings, 2, {**identity, "data": {"rows": "b"}}) == 0
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
