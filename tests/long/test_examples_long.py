# SPDX-License-Identifier: Apache-2.0
"""Part "examples": the commands of docs/examples.md, typed as they stand there; rewards are in the ranges of its table.

The last example needs another Python, and is part "verifiers".
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.learn.quickstart import PREPARE_TIMEOUT_S, TRAIN_TIMEOUT_S, call
from tests.sources import ROOT, search_path

pytestmark = [pytest.mark.long("examples"), pytest.mark.timeout(4800)]

PAGE = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
RANGE = r"([\d.]+) to ([\d.]+)"
EXPECTED = {
    int(number): tuple(map(float, bounds))
    for number, *bounds in re.findall(rf"^\| (\d) [^|]*\| {RANGE} \| {RANGE} \|", PAGE, re.MULTILINE)
}
COMMANDS = {
    int(number): block for number, block in re.findall(r"^(\d)\. .*?```bash\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL)
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model and the files of `examples/`."""
    folder = tmp_path_factory.mktemp("examples")
    shutil.copytree(ROOT / "examples", folder, dirs_exist_ok=True)
    call(folder, "-m", "mrl.prepare", "tiny", timeout_s=PREPARE_TIMEOUT_S)
    return folder


@pytest.mark.parametrize("number", EXPECTED)
def test_an_example_learns_what_its_page_says(folder: Path, number: int):
    variables = os.environ | {"PYTHONPATH": search_path(), "OMP_NUM_THREADS": "1"}
    variables["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-euc", COMMANDS[number]],
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * TRAIN_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    # The last run of an example is the one with rewards.
    newest = max(folder.glob("results/*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    rewards = [
        row["val/accuracy"] for line in newest.read_text().splitlines() if "val/accuracy" in (row := json.loads(line))
    ]
    print(f"example {number}: {rewards[0]:.3f} to {rewards[-1]:.3f}")
    least_before, most_before, least_after, most_after = EXPECTED[number]
    assert least_before <= rewards[0] <= most_before
    assert least_after <= rewards[-1] <= most_after
