# SPDX-License-Identifier: Apache-2.0
import json
import os
from pathlib import Path

import pytest

from conversion.files.owners import HEARTBEAT_S
from mrl.config.schema.run import CheckpointingConfig
from mrl.store import ownership
from mrl.store.checkpoints import CheckpointStore
from mrl.store.ledger import Ledger
from mrl.store.ownership import FolderLost, Ownership
from mrl.types import RunState
from tests.waiting import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(ownership, "time", clock := Clock())
    return clock


@pytest.fixture
def file(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "owner.json"


def elsewhere(file: Path, *, job: str | None = None) -> None:
    """The file of an owner on another host."""
    process = {"host": "far", "boot": "0" * 32, "namespace": 1, "pid": 7, "start": 1}
    file.write_text(json.dumps({"process": process, "job": job, "restart": 0}))


def test_an_owner_elsewhere_that_shows_no_life_has_lost_the_folder(file: Path, clock: Clock):
    elsewhere(file)
    begun = clock.now
    Ownership(file).take()
    assert clock.now - begun == ownership.LEASE_S
    assert json.loads(file.read_text())["process"]["host"] != "far"


def test_an_owner_elsewhere_that_shows_life_keeps_the_folder(file: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch):
    elsewhere(file, job="12")
    begun = clock.now

    def sleep(seconds: float) -> None:
        clock.now += seconds
        if clock.now - begun >= HEARTBEAT_S:
            os.utime(file, (0, clock.now))

    monkeypatch.setattr(clock, "sleep", sleep)
    with pytest.raises(ValueError, match=r"in use by process 7 on far \(job 12\)"):
        Ownership(file).take()
    # It is enough to see one beat.
    assert clock.now - begun == HEARTBEAT_S < ownership.LEASE_S
    assert json.loads(file.read_text())["process"]["host"] == "far"


def test_the_next_start_of_a_slurm_job_waits_for_nobody(file: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch):
    elsewhere(file, job="12")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr(clock, "sleep", lambda _: pytest.fail("waited"))
    Ownership(file).take()


def test_who_has_lost_the_folder_publishes_nothing_more(file: Path):
    mine = Ownership(file)
    mine.take()
    store = CheckpointStore(file.parent, CheckpointingConfig(), check_owner=mine.check)
    ledger = Ledger(file.parent / "ledger.jsonl", check_owner=mine.check)
    ledger.take(1, [(0, "a")])
    pending = store.begin(RunState(step=1))
    elsewhere(file)
    with pytest.raises(FolderLost, match="process 7 on far"):
        store.commit(pending, {})
    with pytest.raises(FolderLost, match="process 7 on far"):
        ledger.train(1, [(0, "a")])
    mine.give_back()
    assert file.exists()
    assert not (file.parent / "step_1").exists()
    assert len((file.parent / "ledger.jsonl").read_text().splitlines()) == 1


def test_a_damaged_file_of_an_owner_is_named(file: Path):
    for damaged in ("{", "{}", '{"process": {"pid": 7}}', "7"):
        file.write_text(damaged)
        with pytest.raises(ValueError, match=r"owner\.json names no process .*; remove it"):
            Ownership(file).take()
