# SPDX-License-Identifier: Apache-2.0
import errno
import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import BrokenBarrierError

import pytest

from conversion.files.owners import HEARTBEAT_S, this_process
from mrl.config.schema.run import CheckpointingConfig
from mrl.store import ownership
from mrl.store.checkpoints import CheckpointStore
from mrl.store.ledger import Ledger
from mrl.store.ownership import Attempt, FolderLost, Ownership
from mrl.types import RunState
from tests.waiting import HANG_S, Clock


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


def dead(file: Path, number: int = 1) -> str:
    """The file of a process of this host that has ended; returns how `Ownership` names the right to replace it."""
    process = replace(this_process(), start=number)
    file.write_text(json.dumps({"process": asdict(process), "job": None, "restart": 0}))
    return f"{file.name}.{hashlib.sha256(repr(Attempt(process, None, 0)).encode()).hexdigest()[:8]}"


NUM_RIVALS, NUM_ROUNDS = 3, 40


def rival(folder: Path, meet: Callable[[], object]) -> list[tuple[int, bool, str]]:
    """Takes the folder of each round when all others do; then asks, when all have tried, whether it still has it."""
    results = []
    for number in range(NUM_ROUNDS):
        ownership = Ownership(folder / str(number) / "owner.json")
        meet()
        try:
            ownership.take()
            is_mine, said = True, ""
        except ValueError as error:
            is_mine, said = False, str(error)
        meet()
        if is_mine:
            ownership.check()
        meet()
        ownership.give_back()
        results.append((number, is_mine, said))
    return results


gates: list[Barrier] = []
"""Gate of a process, where it meets its rivals."""


def compete(folder: Path) -> list[tuple[int, bool, str]]:
    (gate,) = gates
    try:
        return rival(folder, lambda: gate.wait(HANG_S))
    except BaseException:  # the others do not wait for who has failed
        gate.abort()
        raise


def leave_nothing(file: Path) -> None: ...


def leave_a_dead_owner(file: Path) -> None:
    dead(file)


def leave_starts_that_were_killed(file: Path) -> None:
    """A dead owner, one who had the right to replace it and died first, and one who had the right to replace that."""
    dead(file.with_name(dead(file.with_name(dead(file)), 2)), 3)


@pytest.mark.parametrize("leave", [leave_nothing, leave_a_dead_owner, leave_starts_that_were_killed])
def test_of_several_starts_at_the_same_moment_one_takes_the_folder(tmp_path: Path, leave: Callable[[Path], None]):
    for number in range(NUM_ROUNDS):
        (tmp_path / str(number)).mkdir()
        leave(tmp_path / str(number) / "owner.json")
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(NUM_RIVALS, context, gates.append, (context.Barrier(NUM_RIVALS),)) as pool:
        rivals = [pool.submit(compete, tmp_path) for _ in range(NUM_RIVALS)]
        failures = [error for future in rivals if (error := future.exception(HANG_S)) is not None]
        for error in sorted(failures, key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error
    found = [row for future in rivals for row in future.result()]
    for number in range(NUM_ROUNDS):
        assert sum(is_mine for round_, is_mine, _ in found if round_ == number) == 1
        assert not list((tmp_path / str(number)).iterdir())
    refused = [said for _, is_mine, said in found if not is_mine]
    assert all(" is in use by process " in said for said in refused)


def test_a_file_system_without_hard_links_has_one_owner_too(file: Path, monkeypatch: pytest.MonkeyPatch):
    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    dead(file)
    mine = Ownership(file)
    mine.take()
    mine.check()
    with pytest.raises(ValueError, match="in use by process"):
        Ownership(file).take()
    assert [path.name for path in file.parent.iterdir()] == ["owner.json"]


def test_a_file_that_leads_nowhere_is_named(file: Path):
    file.symlink_to(file.with_name("gone"))
    with pytest.raises(ValueError, match=r"owner\.json keeps changing its owner, or is a broken link"):
        Ownership(file).take()


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


def test_a_file_that_is_given_back_between_two_looks_is_tried_again(file: Path, monkeypatch: pytest.MonkeyPatch):
    """Another process removes it after the link has failed."""
    link, answers = os.link, [FileExistsError]

    def link_late(source: Path, target: Path) -> None:
        if answers:
            raise answers.pop()
        link(source, target)

    monkeypatch.setattr(os, "link", link_late)
    monkeypatch.setattr(Path, "exists", lambda _: True)  # a look of a moment ago
    mine = Ownership(file)
    mine.take()
    mine.check()
    assert not answers
