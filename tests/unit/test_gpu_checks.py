# SPDX-License-Identifier: Apache-2.0
"""The checks for GPU hosts: listed, run at a small size on the CPU, and recorded whatever comes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu import refit_checks
from scripts.gpu.__main__ import main, run
from scripts.gpu.plan import CHECKS, Check, Missed, Row, Setup
from scripts.render_docs import DOCS, parts_of
from tests.sources import ROOT
from tests.waiting import HANG_S

LONG = pytest.mark.long("parity")
ABSENT = """import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        absent = ("isal", "omegaconf", "pydantic", "ray", "vllm", "transformers", "psutil", "aiohttp", "yaml")
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""
CPU = Setup("cpu", 0.001)


def missed(setup: Setup) -> list[Row]:
    raise Missed("too slow | by far", [{"GB/s": 1.0}])


def broken(setup: Setup) -> list[Row]:
    raise ValueError("no such kernel")


def recorded(folder: Path, name: str) -> list[Row]:
    return json.loads((folder / f"gpu_{name}.json").read_text())["rows"]


def test_the_page_has_a_table_for_every_check():
    page = (DOCS / "gpu_status.md").read_text()
    assert parts_of(page) == [*(f"gpu_{check.name}" for check in CHECKS), "gpu_moving", "gpu_refit", "gpu_run"]
    assert all(f"| `{check.name}` | {check.tier} |" in page for check in CHECKS)


def test_copies_and_checksums_are_measured(tmp_path: Path):
    (check,) = (check for check in CHECKS if check.name == "moving")
    assert run(check, CPU, tmp_path)
    contiguous, strided = recorded(tmp_path, "moving")
    assert contiguous["result"] == strided["result"] == "passed"
    assert float(str(contiguous["checksums GB/s"])) > 0 and float(str(strided["copies / plain copy speed"])) > 0


def test_what_fails_or_misses_its_bound_is_recorded(tmp_path: Path):
    assert not run(Check("slow", "a", f"{__name__}:missed"), CPU, tmp_path)
    assert recorded(tmp_path, "slow") == [{"result": "missed: too slow / by far", "GB/s": 1.0}]
    assert not run(Check("broken", "a", f"{__name__}:broken"), CPU, tmp_path)
    assert recorded(tmp_path, "broken")[0]["result"] == "failed: ValueError: no such kernel"


def test_without_a_gpu_nothing_is_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["--tier", "a", "--out", str(tmp_path)]) == 2
    assert "no GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_largest_model_that_fits_is_chosen():
    assert refit_checks.divisor(70.0) == 1
    assert refit_checks.divisor(60.0) == 2
    assert refit_checks.divisor(0.0) == 96


@pytest.mark.parametrize("check", ["moving", pytest.param("policy", marks=LONG), pytest.param("walk", marks=LONG)])
def test_a_bare_machine_can_run_it(tmp_path: Path, check: str):
    """Nothing but torch, numpy and what the check names can be imported, in the processes that it starts either."""
    (tmp_path / "sitecustomize.py").write_text(ABSENT)
    options = ["--device", "cpu", "--gigabytes", "0.001", "--only", check, "--out", str(tmp_path / "out")]
    bare = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "scripts.gpu", *options],
        env=bare,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert recorded(tmp_path / "out", check)[0]["result"] == "passed"
