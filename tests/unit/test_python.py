# SPDX-License-Identifier: Apache-2.0
"""Commands typed with a Python that lacks mrl's packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mrl import put_last
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


WRONG = "raise SystemExit(__file__ + ' is the wrong one')"


def test_files_that_bear_the_names_of_libraries_are_no_libraries(tmp_path: Path):
    """In the folder in which a command is typed, which `python -m` puts in front of all others."""
    for name in ("tokenize", "random", "queue", "calendar", "enum", "json", "conversion", "torch", "ray", "yaml"):
        (tmp_path / f"{name}.py").write_text(WRONG)
    (tmp_path / "helper.py").write_text("POINTS = 2")
    (tmp_path / "reward.py").write_text("from helper import POINTS\n\ndef judge(response): return POINTS")
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}')
    command = [sys.executable, "-m", "mrl.reward", "reward:judge", "rows.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "2 rewards from 2 to 2" in done.stdout, done.stderr


def test_rays_processes_search_the_drivers_folders_last():
    """Ray puts them in front of its own, as often as it finds them."""
    ray, libraries = "/lib/site-packages/ray", ["/lib/python3.11", str(ROOT)]
    found = [f"{ray}/thirdparty_files", f"{ray}/_private/workers", *libraries]
    worker = f"{ray}/_private/workers/default_worker.py"
    assert put_last(["/job", "/job", *found], worker) == [*found, "/job"]
    # Of a user's script, and where no other folder has this mrl.
    assert put_last(["/job", *found], "/job/own_loop.py") == ["/job", *found]
    assert put_last(["/job", *found[:-1]], worker) == ["/job", *found[:-1]]
