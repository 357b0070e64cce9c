# SPDX-License-Identifier: Apache-2.0
"""Numbers of the commands' options have limits."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from mrl import convert
from mrl.ops import launch, plan
from mrl.ops.view import server
from tests.sources import ROOT


def test_no_option_takes_just_any_number():
    sources = [*ROOT.glob("mrl/**/*.py"), *ROOT.glob("conversion/**/*.py")]
    assert [str(path) for path in sources if re.search(r"\btype=(int|float)\b", path.read_text())] == []


@pytest.mark.parametrize(
    ("command", "line", "message"),
    [
        (convert, "cache gc --older-than -1", "argument --older-than: -1 is no number of 0 or more"),
        (convert, "cache gc --older-than 7d", "argument --older-than: '7d' is no number of 0 or more"),
        (convert, "cache gc --older-than nan", "argument --older-than: nan is no number of 0 or more"),
        (convert, "hf-to-mcore --model m --out o --tp 0", "argument --tp: 0 is no whole number of 1 or more"),
        (convert, "hf-to-mcore --model m --out o --tp 1.5", "argument --tp: '1.5' is no whole number of 1 or more"),
        (plan, "grpo_tiny.yaml --node-memory inf", "argument --node-memory: inf is no number of 1 or more"),
        (server, "run --port 80000", "argument --port: 80000 is no whole number from 0 to 65535"),
        (launch, "wait --nodes a --units 0", "argument --units: 0 is no whole number of 1 or more"),
    ],
)
def test_a_number_beyond_its_limits_is_named(
    command: ModuleType,
    line: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("MRL_CACHE", str(tmp_path))
    with pytest.raises(SystemExit, match="2"):
        command.main(line.split())
    assert capsys.readouterr().err.splitlines()[-1].endswith(message)
