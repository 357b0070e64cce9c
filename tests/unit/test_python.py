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
    for name in ("mrl", "conversion", "scripts"):
        subprocess.run(["cp", "-r", ROOT / name, checkout], check=True)
    if installed:
        (checkout / ".venv/bin").mkdir(parents=True)
    # -S: without site-packages, so without any package of mrl's.
    command = [sys.executable, "-S", "-m", "mrl.train", "grpo_tiny.yaml"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert ("source " + str(checkout / ".venv/bin/activate") if installed else "scripts/quickstart.sh") in done.stderr


@pytest.mark.parametrize("when", ["at once", "later"])
@pytest.mark.parametrize("is_checkout", [True, False])
def test_a_package_that_an_update_brought_is_named_with_its_command(tmp_path: Path, when: str, is_checkout: bool):
    """After `git pull`, or in an environment that lacks one of the wheel's packages: in the first import, or in one
    that comes later.
    """
    checkout = tmp_path / "checkout"
    (checkout / "scripts").mkdir(parents=True)
    for name in ("mrl", "conversion", "configs"):
        subprocess.run(["cp", "-r", ROOT / name, checkout], check=True)
    if is_checkout:
        (checkout / "scripts/setup.sh").write_text("")
    hidden = "omegaconf" if when == "at once" else "hydra"
    lines = [
        *(
            "import sys",
            "sys.path.insert(0, '.')",
            f"sys.modules[{hidden!r}] = None",
            "sys.argv = ['-m']",
            "import mrl, runpy",
        ),
        "from pathlib import Path",
        "mrl.ENVIRONMENT = Path('.venv').absolute()",
        "sys.prefix = str(mrl.ENVIRONMENT)",
        "sys.argv = ['check', 'grpo_tiny.yaml', 'grpo.seed=2']",
        "runpy.run_module('mrl.check', run_name='__main__')",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=checkout, capture_output=True, text=True, check=False
    )
    (said,) = done.stderr.splitlines()
    assert done.returncode == 2 and f"has no package '{hidden}" in said, done.stderr
    assert (f"bash {checkout}/scripts/setup.sh" if is_checkout else "-m pip install -U mrl-*.whl") in said


def test_errors_of_other_kinds_keep_their_traceback():
    command = [sys.executable, "-c", "import sys; sys.argv = ['-m']; import mrl; import mrl.absent"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "No module named 'mrl.absent'" in done.stderr and "Traceback" in done.stderr
