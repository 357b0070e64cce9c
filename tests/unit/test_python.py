# SPDX-License-Identifier: Apache-2.0
"""Commands typed with a Python that lacks mrl's packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT


@pytest.mark.parametrize("installed", [True, False])
def test_another_python_names_the_one_to_type(tmp_path: Path, installed: bool):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("mrl", "conversion"):
        subprocess.run(["cp", "-r", ROOT / name, checkout], check=True)
    if installed:
        (checkout / ".venv/bin").mkdir(parents=True)
    # -S: without site-packages, so without any package of mrl's.
    command = [sys.executable, "-S", "-m", "mrl.train", "grpo_tiny.yaml"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert ("source " + str(checkout / ".venv/bin/activate") if installed else "scripts/quickstart.sh") in done.stderr


def test_errors_of_other_kinds_keep_their_traceback():
    command = [sys.executable, "-c", "import sys; sys.argv = ['-m']; import mrl; import mrl.absent"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "No module named 'mrl.absent'" in done.stderr and "Traceback" in done.stderr
