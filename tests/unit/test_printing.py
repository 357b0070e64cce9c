# SPDX-License-Identifier: Apache-2.0
"""Every command prints in one way, through `start_logging` and `run_entry`: without secrets and terminal controls."""

import ast
import json
from pathlib import Path

import pytest

from mrl import convert, launch
from mrl.__main__ import COMMANDS
from mrl.view import __main__ as view_main
from tests.sources import ROOT

EVIL = "\x1b]0;pwned\x07\x1b[2J\u202e"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_sets_no_handler_of_its_own(command: str):
    module = ROOT / "mrl" / command
    source = (module / "__main__.py" if module.is_dir() else module.with_suffix(".py")).read_text(encoding="utf-8")
    called = {node.func.id if isinstance(node.func,
                                         ast.Name) else node.func.attr for node in ast.walk(ast.parse(source))
              if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)}  # fmt: skip
    assert "basicConfig" not in called and "StreamHandler" not in called
    assert called & {"run_entry", "exit_with"}


def test_names_in_files_cannot_control_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / EVIL
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": EVIL}))
    convert.main(["hf-to-mcore", "--hf", str(folder), "--out", str(tmp_path / "out")])
    convert.main(["compare", str(folder), str(folder)])
    view_main.main([str(folder)])
    launch.main(["slurm", str(folder / "run.yaml")])
    printed = capsys.readouterr()
    assert "model_type" in printed.out and "is no run folder" in printed.out
    assert not {"\x1b", "\x07", "\u202e"} & set(printed.out + printed.err)
