# SPDX-License-Identifier: Apache-2.0
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.cluster import lifetime
from mrl.cluster.lifetime import end_reaper, processes_of, read_capacity
from mrl.signals import MARK
from tests.waiting import HANG_S, wait_until

DRIVER = """
import os, signal, subprocess, sys
from pathlib import Path
from mrl.cluster.lifetime import start_reaper
reaper = start_reaper(Path(sys.argv[1]))
child = subprocess.Popen(["sleep", "6000"], start_new_session=True)
print(child.pid, flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
reaper.communicate(timeout=600)
"""
# As Ray's agents do. The mark stands first in the environment, where a new name would overwrite it first.
RENAMED = """
import os, subprocess, sys
from pathlib import Path
from mrl.cluster.lifetime import MARK, processes_of, start_reaper
reaper = start_reaper(Path(sys.argv[1]))
code = "import setproctitle, time; setproctitle.setproctitle('renamed'); print(flush=True); time.sleep(6000)"
command = [sys.executable, "-c", code]
child = subprocess.Popen(command, env={MARK: os.environ[MARK], **os.environ}, stdout=subprocess.PIPE)
child.stdout.readline()
print(Path(f"/proc/{child.pid}/cmdline").read_text().strip("\\0"), child.pid in processes_of(sys.argv[1]))
child.kill()
reaper.kill()
reaper.communicate(timeout=600)
"""


def start_driver(folder: Path, end: str) -> tuple[subprocess.Popen[str], int]:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(folder), end], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    return driver, int(driver.stdout.readline())


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_driver_leaves_no_process_and_no_folder(tmp_path: Path):
    folder = tmp_path / "session"
    folder.mkdir()
    driver, child = start_driver(folder, "killed")
    assert driver.wait(timeout=HANG_S) == -signal.SIGKILL
    wait_until(lambda: not is_alive(child) and not folder.exists(), "end of the child and of the folder")
    assert not processes_of(str(folder))


def test_a_clean_end_waits_until_everything_is_gone(tmp_path: Path):
    folder = tmp_path / "session"
    folder.mkdir()
    driver, child = start_driver(folder, "clean")
    assert driver.wait(timeout=HANG_S) == 0
    assert not is_alive(child) and not folder.exists()


def test_a_process_that_renames_itself_is_still_found(tmp_path: Path):
    folder = tmp_path / "session"
    folder.mkdir()
    output = subprocess.run(
        [sys.executable, "-c", RENAMED, str(folder)], capture_output=True, text=True, timeout=HANG_S, check=True
    )
    assert output.stdout.split() == ["renamed", "True"]


def test_a_process_that_does_not_end_is_named_and_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    left = subprocess.Popen(["sleep", "60"], env=os.environ | {MARK: str(tmp_path)})
    try:
        done = subprocess.Popen(["true"])
        (said,) = end_reaper(done, tmp_path)
        assert re.fullmatch(rf"process {left.pid} \(sleep 60; state [SR]\)", said)
        monkeypatch.setattr(lifetime, "REAPER_TIMEOUT_S", 0.01)
        (said,) = end_reaper(left, tmp_path)
        assert said.startswith(f"process {left.pid}, which ends those of the run (")
    finally:
        left.kill()
        left.wait(timeout=HANG_S)


def test_a_containers_limit_counts_if_it_is_lower(tmp_path: Path):
    of_host = read_capacity(tmp_path)
    assert of_host.num_cores == len(os.sched_getaffinity(0)) and of_host.free_bytes > 10**6
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    assert read_capacity(tmp_path).free_bytes == 600
    (tmp_path / "memory.max").write_text("max\n")
    assert read_capacity(tmp_path).free_bytes > 10**6


def test_processes_of_another_run_are_left_alone(tmp_path: Path):
    other = subprocess.Popen(["sleep", "6000"], env=os.environ | {"MRL_RUN_FOLDER": str(tmp_path / "other")})
    try:
        assert processes_of(str(tmp_path / "mine")) == []
        assert other.pid in processes_of(str(tmp_path / "other"))
    finally:
        other.kill()
        other.wait(timeout=HANG_S)
