# SPDX-License-Identifier: Apache-2.0
import json
import threading
import time
from pathlib import Path

import pytest

from mrl.config.schema.run import CheckpointingConfig
from mrl.store import ownership
from mrl.store.checkpoints import CheckpointStore
from mrl.store.ledger import Ledger
from mrl.store.ownership import FolderLost, Ownership
from mrl.types import RunState
from tests.waiting import HANG_S


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ownership, "LEASE_S", 0.6)
    monkeypatch.setattr(ownership, "POLL_S", 0.05)
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "owner.json"


def elsewhere(file: Path, *, job: str | None = None) -> None:
    """The file of an owner on another host."""
    process = {"host": "far", "boot": "0" * 32, "namespace": 1, "pid": 7, "start": 1}
    file.write_text(json.dumps({"process": process, "job": job, "restart": 0}))


def test_an_owner_elsewhere_that_shows_no_life_has_lost_the_folder(file: Path):
    elsewhere(file)
    begun = time.monotonic()
    Ownership(file).take()
    assert time.monotonic() - begun >= 0.6
    assert json.loads(file.read_text())["process"]["host"] != "far"


def test_an_owner_elsewhere_that_shows_life_keeps_the_folder(file: Path):
    elsewhere(file, job="12")
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(0.1):
            file.touch()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(ValueError, match=r"in use by process 7 on far \(job 12\)"):
            Ownership(file).take()
    finally:
        is_over.set()
        thread.join(HANG_S)
    assert json.loads(file.read_text())["process"]["host"] == "far"


def test_the_next_start_of_a_slurm_job_waits_for_nobody(file: Path, monkeypatch: pytest.MonkeyPatch):
    elsewhere(file, job="12")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setattr(ownership.time, "sleep", lambda _: pytest.fail("waited"))
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
