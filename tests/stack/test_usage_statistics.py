# SPDX-License-Identifier: Apache-2.0
"""Usage reports of libraries are off in a process that imports mrl: each library is asked itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import mrl
from tests.sources import ROOT
from tests.waiting import HANG_S

# Each prints whether the library would report.
LIBRARIES = {
    "RAY_USAGE_STATS_ENABLED": (
        "from ray._common.usage.usage_lib import usage_stats_enabled; print(usage_stats_enabled())"
    ),
    "VLLM_NO_USAGE_STATS": "from vllm.usage.usage_lib import is_usage_stats_enabled; print(is_usage_stats_enabled())",
    "HF_HUB_DISABLE_TELEMETRY": "from huggingface_hub import constants; print(not constants.HF_HUB_DISABLE_TELEMETRY)",
    "WANDB_ERROR_REPORTING": "from wandb.env import error_reporting_enabled; print(error_reporting_enabled())",
    "MLFLOW_DISABLE_TELEMETRY": (
        "from mlflow.telemetry.utils import is_telemetry_disabled; print(not is_telemetry_disabled())"
    ),
}
# All of them heed one of these, or report nothing from a test.
ALSO_HEEDED = ("DO_NOT_TRACK", "DISABLE_TELEMETRY", "CI", "PYTEST_CURRENT_TEST", "PYTEST_VERSION", "GITHUB_ACTIONS")


@pytest.mark.parametrize("name", mrl.NO_USAGE_STATISTICS)
def test_a_library_reports_to_nobody(name: str, tmp_path: os.PathLike[str]):
    bare = {key: value for key, value in os.environ.items() if key not in (*mrl.NO_USAGE_STATISTICS, *ALSO_HEEDED)}
    bare |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def reports(first: str) -> str:
        command = [sys.executable, "-c", first + LIBRARIES[name]]
        done = subprocess.run(command, env=bare, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    assert reports("") == "True", "the library no longer reports by default: its variable can go"
    assert reports("import mrl; ") == "False"
