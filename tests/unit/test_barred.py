# SPDX-License-Identifier: Apache-2.0
"""Commands beside run folders of other users, which mrl makes with mode 700."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT

CAPABILITIES = "-dac_override,-dac_read_search"
AS_USER = ["setpriv", f"--bounding-set={CAPABILITIES}", f"--inh-caps={CAPABILITIES}"] if os.getuid() == 0 else []
"""Takes from root what no other user has: to read files whatever their mode."""


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A working folder with a run folder that this user may not enter."""
    theirs = tmp_path / "results/theirs"
    (theirs / "logs").mkdir(parents=True)
    (theirs / "config.yaml").write_text("algorithm: grpo\n")
    theirs.chmod(0)
    return tmp_path


def said(workplace: Path, *words: str) -> tuple[int, str]:
    command = [*AS_USER, sys.executable, "-m", *words]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=workplace, env=variables, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("words", [
    ["mrl.runs", "show", "results/theirs"],
    ["mrl.view", "results/theirs"],
    ["mrl.replay", "results/theirs", "--step", "1"],
    ["mrl.evaluate", "results/theirs", "--check"],
    ["mrl.reward", "results/theirs/mine.py:reward", "results/theirs/rows.jsonl"],
], ids=lambda words: words[0])  # fmt: skip
def test_a_folder_of_somebody_else_is_named_with_the_way_out(workplace: Path, words: list[str]):
    code, text = said(workplace, *words)
    assert code == 2 and f"{workplace / 'results/theirs'} (of user " in text and "mode 0): you may not use it" in text
    assert "Traceback" not in text


def test_it_is_in_the_way_of_no_other_run(workplace: Path):
    mine = workplace / "results/mine"
    (mine / "logs").mkdir(parents=True)
    (mine / "config.yaml").write_text("algorithm: grpo\n")
    code, text = said(workplace, "mrl.runs")
    assert code == 0 and "results/mine" in text and "results/theirs cannot be read: " in text


def test_a_check_refuses_it_and_says_all_else(workplace: Path):
    code, text = said(
        workplace, "mrl.train", "grpo_tiny.yaml", "checkpointing.checkpoint_dir=results/theirs", "--check"
    )
    assert code == 2 and "you may not write " in text.partition("Refused: ")[2] and "optimizer " in text
