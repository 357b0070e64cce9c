# SPDX-License-Identifier: Apache-2.0
"""Obstacles in place of a run folder's file, or its remains, after disk, host and human faults: two attempts go on."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.store import checkpoints, ownership
from mrl.store.identity import Identity
from mrl.store.run_folder import METRICS, SAMPLES, RunFolder
from tests.unit.store.test_checkpoints import empty, replace_by_a_bad_block, replace_by_a_folder, replace_by_a_loop
from tests.unit.store.test_kill_points import run
from tests.unit.store.test_run_folder import config
from tests.waiting import Clock

pytestmark = pytest.mark.usefixtures("no_report")


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_steps")
    (folder / "model").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mrl.store.run_folder.write_report", lambda *_, **__: None)
        run(folder, 2)
    (folder / "run" / SAMPLES).touch()
    return folder


@pytest.fixture
def folder(two_steps: Path, tmp_path: Path) -> Path:
    """The run folder of two steps, both saved."""
    shutil.copytree(two_steps, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def assert_goes_on(folder: Path) -> None:
    for last in (3, 4):
        assert sorted(run(folder.parent, 1).folder.ledger.state.trained) == list(range(1, last + 1))
        assert (folder / f"step_{last}/COMPLETE").exists() and not list(folder.glob("tmp_*"))
        assert len((folder / METRICS).read_text().splitlines()) >= last - 2


def identity(model: str = "a") -> Identity:
    return {"model": {"config.json": model}, "tokenizer": {}, "data": {}}


@pytest.mark.parametrize("break_", [empty, replace_by_a_folder, Path.unlink])
def test_an_identity_that_is_lost_is_that_of_the_newest_checkpoint(tmp_path: Path, break_: Callable[[Path], None]):
    (tmp_path / "model").mkdir()
    run(tmp_path, 1, identity())
    for step in (2, 3):
        break_(tmp_path / "run/identity.json")
        with pytest.raises(ValueError, match=r"policy\.model_name: the run resumes at step \d with another model"):
            run(tmp_path, 1, identity("b"))
        assert sorted(run(tmp_path, 1, identity()).folder.ledger.state.trained) == list(range(1, step + 1))


@pytest.mark.parametrize(
    ("name", "break_"),
    [
        *itertools.product([METRICS, SAMPLES], [replace_by_a_folder, replace_by_a_bad_block, replace_by_a_loop]),
        *itertools.product(["ledger.jsonl", "config.yaml"], [empty, replace_by_a_folder]),
        ("about.json", replace_by_a_folder),
    ],
)
def test_a_file_of_the_run_folder_that_cannot_be_read_is_set_aside(
    folder: Path, name: str, break_: Callable[[Path], None]
):
    break_(folder / name)
    assert_goes_on(folder)


def dangling(path: Path) -> None:
    path.symlink_to("/nowhere")


@pytest.mark.parametrize("make", [Path.touch, dangling])
@pytest.mark.parametrize("name", ["step_9", "tmp_step_3"])
def test_what_has_the_name_of_a_checkpoint_and_no_mark_is_refused_and_left_alone(
    folder: Path, name: str, make: Callable[[Path], None]
):
    make(folder / name)
    for _ in range(2):
        with pytest.raises(
            ValueError, match=rf"run: mrl did not write {name}\. mrl leaves .* choose another folder, or move that out"
        ):
            run(folder.parent, 1)
        assert os.path.lexists(folder / name) and not (folder / "owner.json").exists()
    (folder / name).unlink()
    assert_goes_on(folder)


@pytest.mark.parametrize("name", ["tmp_step_3", "tmp_old_tmp_step_1"])
def test_folders_without_any_file_that_a_save_may_have_left_are_removed(folder: Path, name: str):
    (folder / name / "policy/weights").mkdir(parents=True)
    assert_goes_on(folder)
    assert not (folder / name).exists()


def test_a_part_that_a_file_server_keeps_for_a_while_is_in_no_ones_way(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """NFS keeps a file that is removed while it is open, in its folder."""
    (folder / "tmp_step_3/policy/weights").mkdir(parents=True)
    monkeypatch.setattr(checkpoints, "remove_marked", lambda _: None)
    for last in (3, 4):
        run(folder.parent, 1)
        assert (folder / f"step_{last}/COMPLETE").exists()


def test_a_checkpoint_that_was_moved_to_another_disk_is_loaded_and_pruned(folder: Path, tmp_path: Path):
    for step in (1, 2):
        (folder / f"step_{step}").rename(tmp_path / f"step_{step}")
        (folder / f"step_{step}").symlink_to(tmp_path / f"step_{step}")
    assert_goes_on(folder)
    assert {path.name for path in folder.glob("*step_*")} == {"step_3", "step_4"} and (tmp_path / "step_2").exists()


@pytest.mark.parametrize("name", ["COMPLETE", "policy/weights/iter_0000000/__1_0.distcp"])
def test_a_checkpoint_that_this_user_may_not_read_is_not_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    """Root may read everything."""

    def refuse(path: Path) -> None:
        if path == folder / "step_2" / name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    read, access = checkpoints.read_file, os.access
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "read_file", lambda path: refuse(path) or read(path))
        patch.setattr(os, "access", lambda path, mode: access(path, mode) and path != folder / "step_2" / name)
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"step_2 may be whole, and this user may not read it: .*; start as its user, or let "
            ):
                RunFolder(config(folder.parent)).open()
    assert {path.name for path in folder.iterdir()} >= {"step_1", "step_2"} and not (folder / "owner.json").exists()
    assert_goes_on(folder)


@pytest.mark.parametrize("content", [b"", b'{"process": {"pid": 7}}', b"7"])
def test_an_owner_whose_name_is_lost_is_judged_by_its_signs_of_life(
    folder: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
):
    monkeypatch.setattr(ownership, "time", clock := Clock())
    (folder / "owner.json").write_bytes(content)
    begun = clock.now
    assert_goes_on(folder)
    assert clock.now - begun == ownership.LEASE_S


def test_a_start_that_is_refused_leaves_no_owner(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("mrl.store.marks.write_atomic", full)
        with pytest.raises(ValueError, match="cannot be written: .*No space left on device; free space there"):
            RunFolder(config(folder.parent)).open()
    assert not (folder / "owner.json").exists()
    assert_goes_on(folder)


def test_the_name_of_an_owner_is_on_disk_before_others_see_it(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A power loss leaves no empty file."""
    synced: list[str] = []
    link = os.link
    monkeypatch.setattr(ownership, "sync_file", lambda path: synced.append(path.name))
    monkeypatch.setattr(
        os, "link", lambda source, target: link(source, target) if source.name in synced else pytest.fail("not synced")
    )
    assert_goes_on(folder)


def test_a_disk_that_is_full_when_the_marker_is_written_costs_that_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    write = checkpoints.write_atomic

    def full(path: Path, text: str) -> None:
        if path.name == checkpoints.MARKER:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_atomic", full)
        with pytest.raises(
            RuntimeError, match="the checkpoint of step 3 cannot be written: .*; the one before it stays"
        ):
            run(folder.parent, 1)
    (folder / "owner.json").unlink()  # of this process, which lives
    assert_goes_on(folder)


def test_a_run_folder_that_was_moved_goes_on(folder: Path, tmp_path: Path):
    (tmp_path / "elsewhere/model").mkdir(parents=True)
    assert_goes_on(folder.rename(tmp_path / "elsewhere/run"))
