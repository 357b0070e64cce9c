# SPDX-License-Identifier: Apache-2.0
"""The part of its host that one program may take, and who is blamed where the host is full."""

import errno
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from mrl.envs import spawn
from mrl.envs.code import run_test


def fill(monkeypatch: pytest.MonkeyPatch, *free_mib: int) -> None:
    """Makes the temporary folder have so many free MiB at each look, the last number for ever."""
    left = list(free_mib)

    def statvfs(_: object) -> SimpleNamespace:
        free = left.pop(0) if len(left) > 1 else left[0]
        return SimpleNamespace(f_bavail=free << 8, f_frsize=4096, f_files=1000, f_favail=1000)

    monkeypatch.setattr(spawn.os, "statvfs", statvfs)


def test_a_program_may_take_a_part_of_what_is_free(monkeypatch: pytest.MonkeyPatch):
    fill(monkeypatch, 80)
    assert spawn.share().num_bytes == 10 << 20
    fill(monkeypatch, 8000)
    assert spawn.share().num_bytes == 64 << 20
    monkeypatch.setattr(spawn, "free_threads", lambda: (80, 40))
    assert (spawn.share().num_threads, spawn.share().num_tasks) == (10, 51)


def test_a_program_that_takes_more_than_its_share_has_failed(monkeypatch: pytest.MonkeyPatch):
    fill(monkeypatch, 80)
    write = "import time\nfor n in range(3): open(str(n), 'wb').write(bytes(5 << 20))\ntime.sleep(60)"
    assert run_test(write, "", "", "", 60.0) == "more than 64 files or 10 MiB"


def test_a_full_host_is_to_blame_for_a_program_that_fails_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mrl.envs.code.WAIT_S", 0.0)
    fill(monkeypatch, 0)
    assert run_test("print(42)", "", "42", "", 20.0) is None
    with pytest.raises(OSError, match="is full, or the limit of processes is reached") as caught:
        run_test("1 / 0", "", "42", "", 20.0)
    assert caught.value.errno == errno.ENOSPC


def test_a_failed_test_is_tried_again_once_there_is_room(monkeypatch: pytest.MonkeyPatch):
    looks = iter([True, False])
    monkeypatch.setattr(spawn, "is_scarce", lambda: next(looks, False))
    assert run_test("1 / 0", "", "42", "", 20.0) == "exit code 1, ZeroDivisionError"
    assert next(looks, None) is None


COUNT = """
import os, resource, sys, threading
from mrl.envs import spawn
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(54321); os.setuid(54321)
resource.setrlimit(resource.RLIMIT_NPROC, (100, 100))
free, used = spawn.free_threads()
done = threading.Event()
threads = [threading.Thread(target=done.wait) for _ in range(10)]
[thread.start() for thread in threads]
print(used, free + used, free - spawn.free_threads()[0])
done.set()
"""


def test_threads_are_counted_where_a_limit_counts_them():
    done = subprocess.run(
        [sys.executable, "-c", COUNT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    used, limit, more = map(int, done.stdout.split())
    assert used >= 1 and limit == 100 and more == 10, done.stderr
