# SPDX-License-Identifier: Apache-2.0
"""Parts "megatron019" and "megatron016": more tests of newer Pythons' megatron-core; suites of the older one.

CI runs the policy and the stack on the newer one, which has the table of parity. Each version reads the other's
checkpoints.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import models
from tests.megatron import VERSION, environment, unpack_newest
from tests.sources import ROOT

pytestmark = pytest.mark.timeout(7200)

OLDER = {
    "policy": ["tests/stack/policy", "tests/stack/test_library_fields.py", "tests/stack/test_cpu_hosts_page.py"],
    "parity": ["tests/stack/policy/test_parity_table.py", "--long", "parity_table"],
    "loop": ["tests/stack/loop", "tests/stack/pipeline", "tests/stack/refit"],
}
NEWER = {
    "parity": ["tests/stack/policy", "--long", "parity"],
    "conversion": ["tests/stack/policy/test_conversion.py", "--long", "conversion"],
    "learn": ["tests/learn/test_learns.py"],
}
TIMEOUT_S = 7000
SAVED, LOADED = "tp2 sp dp2 ep2", "cp2 ep2"


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_newest(tmp_path_factory.mktemp("megatron"))


def python(*words: object, environment: Mapping[str, str]) -> str:
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.long("megatron016")
@pytest.mark.parametrize("suite", OLDER)
def test_suites_pass_on_the_installed_megatron(suite: str):
    assert "passed" in python("-m", "pytest", "-q", *OLDER[suite], environment=os.environ)


@pytest.mark.long("megatron019")
@pytest.mark.parametrize("suite", NEWER)
def test_suites_pass_on_the_newest_megatron(newest: Path, suite: str):
    assert "passed" in python("-m", "pytest", "-q", *NEWER[suite], environment=environment(newest))


@pytest.mark.long("megatron019")
@pytest.mark.parametrize("is_newer_first", [False, True], ids=["older to newer", "newer to older"])
def test_checkpoints_go_on_at_another_version_and_layout(newest: Path, tmp_path: Path, is_newer_first: bool):
    model = models.save_nemotron_h(tmp_path / "model")

    def child(action: str, layout: str, *, is_newer: bool) -> list[dict[str, float]]:
        variables = environment(newest) if is_newer else dict(os.environ)
        printed = python(
            "-m", "tests.long.megatron_child", action, model, tmp_path / "weights", layout, environment=variables
        )
        found: dict[str, Any] = json.loads(printed.splitlines()[-1])
        assert found["version"].startswith(VERSION if is_newer else version("megatron-core"))
        return found["steps"]

    unbroken = child("save", SAVED, is_newer=is_newer_first)
    resumed = child("load", LOADED, is_newer=not is_newer_first)
    for name, tolerance in (("train/loss", 5e-7), ("train/grad_norm", 5e-6)):
        np.testing.assert_allclose(
            [step[name] for step in resumed], [step[name] for step in unbroken], atol=tolerance, rtol=tolerance
        )
    assert [step["train/lr"] for step in resumed] == [step["train/lr"] for step in unbroken]
