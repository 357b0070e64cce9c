# SPDX-License-Identifier: Apache-2.0
"""Scratch folders in which somebody has made it hard to remove them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.envs.scratch import Scratch, remove_abandoned, remove_folder, scratch_folder
from tests.sources import ROOT

NOBODY = 65534


def nest(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(10_000):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)


def close(folder: Path) -> None:
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "file").touch(0)
    (folder / "a" / "b").chmod(0)
    (folder / "a").chmod(0)
    folder.chmod(0)


def link(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "a" / "out").symlink_to("/")
    (folder / "out").symlink_to(folder.parent)
    os.mkfifo(folder / "fifo")


@pytest.mark.parametrize("spoil", [nest, close, link])
def test_a_folder_is_removed_whatever_is_in_it(spoil: Callable[[Path], None], tmp_path: Path):
    folder, beside = tmp_path / "scratch", tmp_path / "beside"
    folder.mkdir()
    beside.touch()
    spoil(folder)
    # No mode stops root, which is nobody here.
    for path, _, _ in os.walk(tmp_path) if spoil is close else ():
        os.chown(path, NOBODY if os.geteuid() == 0 else -1, -1)
    os.chmod(tmp_path, 0o777)
    if (child := os.fork()) == 0:
        if os.geteuid() == 0 and spoil is close:
            os.chdir(tmp_path)
            os.setuid(NOBODY)
            folder = Path("scratch")
        remove_folder(folder)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert list(tmp_path.iterdir()) == [beside]


def test_what_a_killed_owner_leaves_is_removed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import time; from mrl.envs.scratch import Scratch; mine = Scratch(); print(mine.path, flush=True); "
        "time.sleep(99)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None
        abandoned, young, owned = Path(owner.stdout.readline().strip()), tmp_path / "mrl-scratch-young", Scratch()
        young.mkdir()
        for path in (abandoned, owned.path):
            os.utime(path, (0, time.time() - 3600))
        remove_abandoned()
        assert abandoned.exists()
        owner.send_signal(signal.SIGKILL)
    remove_abandoned()
    assert sorted(tmp_path.iterdir()) == sorted([young, owned.path])
    owned.remove()
    owned.remove()
    assert list(tmp_path.iterdir()) == [young]


def test_a_folder_ends_with_its_body():
    with scratch_folder() as folder:
        (folder / "file").touch()
    assert not folder.exists()
