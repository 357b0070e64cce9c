# SPDX-License-Identifier: Apache-2.0
"""Every command prints in one way, through `start_logging` and `run_entry`: without secrets and terminal controls."""

import ast
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mrl import convert
from mrl.__main__ import COMMANDS
from mrl.config.texts import rounded, spell_bytes
from mrl.ops import launch
from mrl.ops.view import server as view_main
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


def test_a_time_that_was_computed_is_printed_in_three_digits():
    assert [rounded(value) for value in (7.99999, 0.25, 12.345, 86400.0, 3599.9999, 1e-9)] == [
        "8",
        "0.25",
        "12.3",
        "86400",
        "3600",
        "1e-09",
    ]
    unrounded = re.compile(r"\{[^{}]*[a-z][^{}]*:g\} s(econds)?\b")
    assert [path for path in (ROOT / "mrl").rglob("*.py") if unrounded.search(path.read_text(encoding="utf-8"))] == []


def test_a_size_is_printed_in_its_own_unit():
    sizes = (441_954_623_488, 1e9, 999e6, 1_048_576, 5_242, 12, 0)
    assert [spell_bytes(size) for size in sizes] == [
        "442 GB",
        "1 GB",
        "999 MB",
        "1.05 MB",
        "5.24 kB",
        "0.012 kB",
        "0 kB",
    ]
    unsized = re.compile(r"1e9:[,.\d]*[fg]\} GB\b(?!/s)")
    found = {path.name for path in (ROOT / "mrl").rglob("*.py") if unsized.search(path.read_text(encoding="utf-8"))}
    # Of memory, which is many GB.
    assert found == {"host.py", "lifetime.py", "plausible.py", "rollout_files.py"}


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


# Each command with each kind of argument, in one process, as the libraries take seconds to import.
EVERY = """
import json, os, runpy, sys

for words in json.loads(sys.argv[1]):
    os.write(1, f"=== {words[0]}\\n".encode())
    module, sys.argv = f"mrl.{words[0]}", words
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as ended:
        sys.stderr.flush()
        os.write(1, f"=== code {ended.code}\\n".encode())
"""


def said_by(lines: list[list[str]], folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", EVERY, json.dumps(lines)], cwd=folder, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)  # fmt: skip
    return done.stdout.decode()


def test_no_argument_of_any_command_controls_a_terminal(tmp_path: Path):
    further = {"replay": ["--step", "1"], "convert": ["hf-to-mcore", "--out", "there", "--hf"]}
    options = [[command, f"--{EVIL}=1"] for command in COMMANDS]
    words = [[command, *further.get(command, []), EVIL] for command in COMMANDS]
    said = said_by([*options, *words], tmp_path)
    assert not {"\x1b", "\x07", "\u202e"} & set(said)
    answers = said.split("=== code ")[1:]
    # None of them takes what none of them has, and each says what it is about.
    assert [answer[0] for answer in answers] == ["2"] * len(answers) and len(answers) == 2 * len(COMMANDS), said
    assert said.count("pwned") >= len(COMMANDS), said


def test_a_terminal_gets_the_moves_of_bars_alone():
    source = f"""
import sys
from mrl.config.secrets import run_entry

def main():
    sys.stderr.write("\\r 50%|#    |")
    sys.stderr.write("\\n\\x1b[A")
    print({EVIL!r}, "{{}}\\x1b[A", "a\\rb", flush=True)
    raise ValueError({EVIL!r})

sys.exit(run_entry(main))
"""
    reader, terminal = pty.openpty()
    done = subprocess.Popen([sys.executable, "-c", source], cwd=ROOT, stdout=terminal, stderr=terminal)
    assert done.wait() == 1
    os.close(terminal)
    said = os.read(reader, 1 << 16).decode()
    os.close(reader)
    assert said.startswith("\r 50%|#    |\r\n\x1b[A") and said.count("\x1b") == 1
    assert "]0;pwned" in said and not {"\x07", "\u202e"} & set(said) and "a\r\nb" in said


def test_a_log_gets_the_last_line_of_a_bar():
    source = """
import sys
from tqdm import tqdm
from mrl.config.secrets import run_entry

def main():
    for _ in tqdm(range(9), desc="one", mininterval=0):
        pass
    for _ in tqdm(range(2), desc="outer", mininterval=0):
        for _ in tqdm(range(4), desc="inner", leave=False, mininterval=0):
            pass
    sys.stderr.write("\\r 50%|#    |")
    print("said", file=sys.stderr)
    sys.stderr.write("\\rover a bar\\n")
    sys.stderr.write("\\r 70%|#    |")
    return 0

sys.exit(run_entry(main))
"""
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=True)
    said = [line.partition("|")[0].strip() for line in done.stderr.splitlines()]
    assert said == ["one: 100%", "outer:   0%", "outer:  50%", "outer: 100%", "50%", "said", "over a bar", "70%"]


def test_a_reader_that_has_enough_is_no_error_of_a_printing_command():
    script = "from mrl.config.secrets import run_entry\nraise SystemExit(run_entry(lambda: print('x' * 99_999) or 0))"
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, cwd=ROOT, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, b"")
