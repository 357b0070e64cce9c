# SPDX-License-Identifier: Apache-2.0
"""`mrl COMMAND` is `python -m mrl.COMMAND`, fast, and only where mrl runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import mrl
from mrl.__main__ import COMMANDS, main, summary
from tests.waiting import HANG_S


def run(*words: str, folder: Path) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, timeout=HANG_S)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [(["launch", "slurm", "grpo_tiny.yaml", "--name", "night"], 0), (["prepare", "verify", "--model", "nowhere"], 2)],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_command_is_its_module(words: list[str], code: int, tmp_path: Path):
    command, *rest = words
    outcome = run("mrl", *words, folder=tmp_path)
    assert outcome == run(f"mrl.{command}", *rest, folder=tmp_path)
    assert outcome[0] == code


@pytest.mark.parametrize(
    ("words", "code"), [(["grpo.max_num_steps=3"], 0), (["grpo.max_num_step=3"], 2)], ids=["good", "wrong"]
)
def test_check_is_its_module_and_train_with_its_option(words: list[str], code: int, tmp_path: Path):
    outcome = run("mrl", "check", "grpo_tiny.yaml", *words, folder=tmp_path)
    module = ("mrl.train", "--check") if code else ("mrl.check",)
    assert outcome == run(module[0], "grpo_tiny.yaml", *words, *module[1:], folder=tmp_path)
    assert outcome[0] == code


def test_help_lists_every_command_with_what_it_does(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(
        f"{command} " in printed and len(summary(command)) > 10 and summary(command) in printed for command in COMMANDS
    )


def test_help_imports_no_command(tmp_path: Path):
    code = "import sys; from mrl.__main__ import COMMANDS, summary; [summary(name) for name in COMMANDS]; "
    code += (
        "print([name for name in sys.modules if name.split('.')[0] in ('mrl', 'conversion', 'yaml', 'torch', 'ray')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout.strip() == "['mrl', 'mrl.rooms', 'mrl.__main__']", done.stderr


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"mrl {mrl.__version__}\n"


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_get_a_sentence(
    platform: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "platform", platform)
    with pytest.raises(SystemExit) as ended:
        main(["train", "grpo_tiny.yaml"])
    assert ended.value.code == 2
    assert f"mrl runs on Linux, and not on {platform}; use a Linux host" in capsys.readouterr().err
