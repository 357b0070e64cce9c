# SPDX-License-Identifier: Apache-2.0
"""Ownership of files: the name tells the owner, its process or, from afar, the time tells whether it lives."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from conversion.files import owners
from conversion.files.owners import ABANDONED_S, heartbeat, is_alive, owned, owned_name, owner_of, this_process
from tests.unit.conversion.cached_models import light_processes
from tests.waiting import HANG_S, wait_until


def test_a_name_tells_its_owner_and_no_other_name_does():
    name = owned_name("key")
    assert owner_of(name) == ("key", this_process())
    assert owned_name("key") != name
    assert [owner_of(other) for other in ("key", "key@host", f"{name}.txt", "@" + name.partition("@")[2])] == [None] * 4


def test_host_names_of_any_form_fit_into_a_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node-1.some/very@long." + "x" * 200)
    name = owned_name("a" * 64)
    parsed = owner_of(name)
    assert parsed is not None and parsed[0] == "a" * 64 and parsed[1].pid == os.getpid()
    assert len(name) < 255 and "/" not in name


def test_a_process_lives_until_it_ends_even_if_nobody_reaps_it(tmp_path: Path):
    code = "from conversion.files.owners import owned_name; print(owned_name('key'), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        path = tmp_path / child.stdout.readline().strip()
        path.touch()
        # The process decides, however old the file is.
        os.utime(path, (0, 0))
        assert is_alive(path)
        child.kill()
        wait_until(lambda: not is_alive(path), "end of the owner")
        assert child.returncode is None, "still a zombie"
    assert not is_alive(path)


def test_a_process_id_that_is_used_again_is_another_owner(tmp_path: Path):
    fields = owned_name("key").split(".")
    fields[4] = str(int(fields[4]) - 1)
    assert not is_alive(tmp_path / ".".join(fields))


@pytest.mark.parametrize("field", [1, 2], ids=["another boot", "another container"])
def test_elsewhere_the_time_decides_by_the_clock_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: int
):
    fields = owned_name("key").split(".")
    fields[field] = "123"
    path = tmp_path / ".".join(fields)
    path.touch()
    # Our own clock is of no importance.
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert is_alive(path)
    now = path.stat().st_mtime
    os.utime(path, (now, now - ABANDONED_S + 60))
    assert is_alive(path)
    os.utime(path, (now, now - ABANDONED_S - 60))
    assert not is_alive(path)
    assert os.listdir(tmp_path) == [path.name]


def test_what_is_owned_is_found(tmp_path: Path):
    names = {what: owned_name(what) for what in ("a", "b")}
    for name in (*names.values(), "readme", "mail@example.org"):
        (tmp_path / name).touch()
    assert owned(tmp_path) == sorted(tmp_path / name for name in names.values())
    assert owned(tmp_path, "b") == [tmp_path / names["b"]]
    assert owned(tmp_path / "none") == []


def test_the_heart_beats_until_the_file_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(owners, "HEARTBEAT_S", 0.01)
    path = tmp_path / "a"
    path.touch()
    os.utime(path, (0, 0))
    with heartbeat(path):
        wait_until(lambda: path.stat().st_mtime > 0, "beat")
        path.rename(tmp_path / "b")
        time.sleep(0.05)
    assert os.listdir(tmp_path) == ["b"]


def test_the_heart_beats_on_while_the_file_server_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(owners, "HEARTBEAT_S", 0.01)
    beats = threading.Semaphore(0)

    def utime(path: Path) -> None:
        beats.release()
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(os, "utime", utime)
    with heartbeat(tmp_path):
        assert all(beats.acquire(timeout=HANG_S) for _ in range(3))


def test_a_forked_child_is_an_owner_of_its_own():
    with light_processes().Pool(1) as pool:
        child = pool.apply(this_process)
    assert child.pid != os.getpid()
    assert (child.boot, child.namespace) == (this_process().boot, this_process().namespace)
