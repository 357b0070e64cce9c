# SPDX-License-Identifier: Apache-2.0
"""A save that fails at any of the driver's file operations: one line says why, the last whole checkpoint goes on."""

from __future__ import annotations

import errno
import json
import os
import random
import sys
from pathlib import Path

import pytest

from mrl.store.checkpoints import checkpoints_in, find_damage
from mrl.store.ledger import replay
from tests.unit.loop.operations import FAULTS, Operations, failing, in_child
from tests.unit.loop.test_ends import ends as ends  # noqa: PLC0414 -- a fixture
from tests.unit.loop.test_ends import one_step
from tests.unit.loop.test_ends import settings as settings  # noqa: PLC0414 -- a fixture
from tests.unit.loop.test_saving import Attempt

pytestmark = pytest.mark.usefixtures("no_report")


def attempt_that_fails(
    ends, caplog: pytest.LogCaptureFixture, run: Path, number: int, code: int
) -> tuple[int, list[tuple[str, str]], int]:
    """Exit code, messages and number of operations of a process that saves one step more with faults."""

    def work() -> tuple[int, list[tuple[str, str]], int]:
        stays = code != errno.EIO
        operations = Operations(run, failing(number, code, stays=stays), removals=code != errno.ENOSPC)

        def attempt(now: Attempt) -> bool:
            state = now.saver.load(now.newest, last_step=99)
            state = now.train(state.step + 1)
            operations.is_armed = True
            try:
                now.saver.save_last(state)
            finally:
                operations.is_armed = stays
            return True

        caplog.clear()
        caplog.set_level("INFO", "mrl.store.checkpoints")
        ended = ends(attempt)
        return ended, [(record.levelname, record.getMessage()) for record in caplog.records], operations.count

    return in_child(work)


def newest(run: Path) -> int:
    return max(one.step for one in checkpoints_in(run) if find_damage(one.folder) is None)


def after_a_failure(ends, caplog: pytest.LogCaptureFixture, run: Path, number: int, code: int) -> None:
    """One attempt whose save fails, or is published before it does; two that go on."""
    before = newest(run)
    ended, said, _ = attempt_that_fails(ends, caplog, run, number, code)
    errors = [text for level, text in said if level == "ERROR"]
    assert not any("Traceback (most" in text for _, text in said)
    if newest(run) == before:
        reason = f"the checkpoint of step {before + 1} cannot be written: [Errno {code}] {os.strerror(code)}: "
        assert ended == 1 and len(errors) == 2 and errors[0].startswith(reason) and said[-1][1] == errors[1]
        assert errors[0].endswith(f"; the one before it stays: step_{before}")
        assert errors[1].startswith(f"The attempt ended: {errors[0]}. ")
        assert errors[1].endswith("The same command resumes.")
        texts = [text for _, text in said]
        removals = [index for index, text in enumerate(texts) if text.startswith("removing ")]
        assert all(index > texts.index(errors[0]) for index in removals)
    else:
        assert (ended, errors, newest(run)) == (0, [], before + 1)
    last = newest(run) + 2
    assert [ends(one_step), ends(one_step), newest(run)] == [0, 0, last]
    assert sorted(replay(run / "ledger.jsonl").trained) == list(range(1, last + 1))
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()] == list(range(1, last + 1))
    assert not list(run.glob("tmp_*"))


def count(ends, caplog: pytest.LogCaptureFixture, run: Path) -> int:
    """Operations of a save without a fault."""
    for _ in range(2):
        assert ends(one_step) == 0
    return attempt_that_fails(ends, caplog, run, sys.maxsize, errno.EIO)[2]


@pytest.mark.parametrize("code", FAULTS, ids=errno.errorcode.get)
def test_two_attempts_go_on_after_a_failed_save(ends, tmp_path: Path, caplog: pytest.LogCaptureFixture, code: int):
    total = count(ends, caplog, tmp_path / "run")
    # One of them. The third leaves a folder without its mark, if nothing may be removed.
    number = 3 if code == errno.EROFS else random.Random(code).randint(1, total)
    after_a_failure(ends, caplog, tmp_path / "run", number, code)


@pytest.mark.long("faults")
@pytest.mark.parametrize("code", FAULTS, ids=errno.errorcode.get)
def test_two_attempts_go_on_after_a_save_that_failed_anywhere(
    ends, tmp_path: Path, caplog: pytest.LogCaptureFixture, code: int
):
    total = count(ends, caplog, tmp_path / "run")
    assert total > 15
    for number in range(1, total + 1):
        after_a_failure(ends, caplog, tmp_path / "run", number, code)
