# SPDX-License-Identifier: Apache-2.0
"""Errors of disks, made by the kernel, and the way out that a message names."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.store.disk import way_out
from tests.sources import ROOT
from tests.waiting import HANG_S

WRITING = """
import resource, sys
from pathlib import Path
from mrl.store.disk import way_out
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
folder = Path(sys.argv[1])
try:
    (folder / "part.distcp").write_bytes(bytes(10000))
except OSError as error:
    print(way_out(error, folder), "|", way_out(f"{folder}: policy rank 3: OSError: {error}", folder))
"""


def test_a_limit_of_file_sizes_is_named(tmp_path: Path):
    """Also where a rank tells it in its text."""
    command = [sys.executable, "-c", WRITING, str(tmp_path)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=True).stdout
    assert said.strip() == " | ".join(
        2 * ["ulimit -f allows files of 4 KiB: raise it, or fsize in /etc/security/limits.conf"]
    )


def test_a_disk_without_inodes_is_not_called_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = os.statvfs(tmp_path)

    class NoInodes:
        f_files, f_favail, f_bavail, f_frsize = 60, 2, 1000, 4096

    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert found.f_favail < 8 or way_out(error, tmp_path / "not" / "yet").startswith("free space there")
    monkeypatch.setattr(os, "statvfs", lambda _: NoInodes)
    assert way_out(error, tmp_path).startswith("2 of 60 inodes of that disk are free")
    monkeypatch.setattr(NoInodes, "f_bavail", 10)
    assert way_out(error, tmp_path).startswith("free space there")


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EROFS, "mounted read-only"),
        (errno.EDQUOT, "quota"),
        (errno.EACCES, "let this user"),
        (errno.EIO, "dmesg"),
    ],
)
def test_each_error_has_its_own_way_out(tmp_path: Path, number: int, advice: str):
    assert advice in way_out(OSError(number, os.strerror(number)), tmp_path)
    assert advice in way_out(f"tmp_step_2: [Errno {number}] {os.strerror(number)}", tmp_path)


def test_an_error_of_a_path_elsewhere_names_that(tmp_path: Path):
    folder = tmp_path / "run"
    for named, told in ((folder / "report.html", folder), (tmp_path / "rows.jsonl", tmp_path / "rows.jsonl")):
        error = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(named))
        assert f" read and write {told} and " in way_out(error, folder)


def test_errors_of_no_disk_have_none(tmp_path: Path):
    assert (
        way_out(ConnectionResetError(errno.ECONNRESET, "reset"), tmp_path)
        == way_out("the save is late", tmp_path)
        == ""
    )
