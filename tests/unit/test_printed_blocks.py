# SPDX-License-Identifier: Apache-2.0
"""Printed blocks of the pages against the program: blocks after a cheap command are run, others come from functions.

Figures and paths are masked; `…` in a page stands for what it leaves out. tests/unit/test_extend_pages.py holds the
pages of docs/extend.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mrl import check
from mrl.convert import main as convert
from mrl.ops import launch, plan, prepare
from mrl.store.advisories import RULES
from scripts.render_docs import DOCS
from tests.sources import ROOT
from tests.unit.conftest import write_weights
from tests.unit.store.test_console import METRICS, step_header, step_lines
from tests.unit.test_troubleshooting import templates

PAGES = [ROOT / "README.md", *(page for page in sorted(DOCS.rglob("*.md")) if page.parent.name != "extend")]
NANO = ROOT / "scripts/bench/models/nemotron3_nano_30b_a3b.config.json"
# Pages' stand-ins for places of the reader's own.
MODEL, WORKSPACE = "/path/to/model", "$WORKSPACE"
COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "mrl.plan": plan.main,
    "mrl.train --check": lambda words: check.main(words),
    "mrl.prepare verify": prepare.main,
    "mrl.convert": convert,
    "mrl.launch": launch.main,
}
# Blocks that no cheap command prints, by their first words: messages, whose texts stand in the source, and a file of
# the reader's.
MESSAGES = ("The run hangs:", "RefusedPickle:", "limits ")
INPUTS = ("Solve the problem.",)

Block = tuple[str, str, list[list[str]]]
"""Page, printed text, and the commands of the last block of commands before it."""


def blocks() -> list[Block]:
    found, commands = [], list[list[str]]()
    for page in PAGES:
        for kind, text in re.findall(r"^```(bash|text)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            if kind == "bash":
                commands = [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
            else:
                found.append((page.relative_to(ROOT).as_posix(), text, commands))
    return found


def program(words: list[str]) -> str | None:
    """The cheap command among `COMMANDS` that a line of a page runs."""
    if words[:2] != ["python", "-m"]:
        return None
    return next((name for name in COMMANDS if all(part in words for part in name.split())), None)


def masked(text: str, *, keeps_figures: bool = False) -> str:
    text = re.sub(r"(?<![\w.])(?:/[\w.-]+)+", "PATH", text)
    return " ".join((text if keeps_figures else re.sub(r"-?\d(?:[\d.,]*\d)?(?:e[-+]?\d+)?", "#", text)).split())


def missing(shown: str, printed: str, *, keeps_figures: bool) -> list[str]:
    """The parts of a page's text that do not follow each other in what was printed."""
    left, wrong = masked(printed, keeps_figures=keeps_figures), []
    for part in (
        part for line in re.split(r"\n(?=\S)|…", shown) if (part := masked(line, keeps_figures=keeps_figures))
    ):
        _, found, after = left.partition(part)
        if not found:
            wrong.append(part)
        else:
            left = after
    return wrong


EXECUTED = [
    block
    for block in blocks()
    if any(program(words) for words in block[2]) and not block[1].startswith((*MESSAGES, *INPUTS))
]


def test_every_printed_block_is_held_by_a_test():
    others = [block for block in blocks() if block not in EXECUTED]
    known = (*MESSAGES, *INPUTS, "====", "[Look]")
    assert len(EXECUTED) >= 3 and [text for _, text, _ in others if not text.startswith(known)] == []


@pytest.mark.parametrize(
    ("page", "text", "commands"), EXECUTED, ids=[f"{page}: {text[:20].strip()}" for page, text, _ in EXECUTED]
)
def test_a_command_prints_what_its_page_shows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    page: str,
    text: str,
    commands: list[list[str]],
):
    model = tmp_path / "RL-nano-v3/model"
    model.mkdir(parents=True)
    shutil.copy(NANO, model / "config.json")
    write_weights(model, json.loads(NANO.read_text()))
    monkeypatch.chdir(tmp_path)
    for words in commands:
        if name := program(words):
            told = [word.replace(MODEL, str(model)).replace(WORKSPACE, str(tmp_path)) for word in words[3:]]
            COMMANDS[name](told)
    printed = capsys.readouterr()
    # A plan is a function of the config: its figures are the same everywhere.
    assert missing(text, printed.out, keeps_figures=page == "docs/plan.md") == [], printed.out


def test_the_readme_shows_the_block_of_a_step():
    (shown,) = (text for page, text, _ in blocks() if page == "README.md" and text.startswith("===="))
    assert masked(shown) == masked(
        "\n".join([step_header(1, 160), *step_lines(METRICS, num_prompts=32, num_generations=16, has_kl=False)])
    )


def test_the_advice_of_the_page_is_a_rule():
    (shown,) = (text for _, text, _ in blocks() if text.startswith("[Look]"))
    (rule,) = (rule for rule in RULES if rule.key == "kl")
    assert f"Likely: {rule.causes}" in shown and f"Try: {rule.turn}" in shown


def test_a_message_of_a_page_is_in_the_source():
    source = " ".join(templates().split())
    for _, text, _ in blocks():
        if text.startswith(MESSAGES):
            lines = [re.split(r"  +|-> ", line) for line in text.splitlines()]
            pieces = [piece for line in lines for cell in line for piece in re.split(r"\S*[\d./#]\S*|[():,;]", cell)]
            words = [piece.strip(" =") for piece in pieces if len(piece.split()) > 3]
            assert words and [piece for piece in words if piece not in source] == [], text


def checks() -> list[str]:
    """Every `--check` of a page that needs no file but those of `workplace`."""
    texts = [page.read_text().replace("\\\n", " ") for page in PAGES]
    lines = [line for text in texts for line in re.findall(r"^python -m mrl.train (.* --check.*)$", text, re.MULTILINE)]
    return sorted(
        {
            line.partition("#")[0].strip()
            for line in lines
            if line.startswith("grpo") and MODEL not in line and "|" not in line
        }
    )


@pytest.mark.parametrize("line", checks())
def test_a_check_of_a_page_refuses_nothing(line: str, workplace: Path, capsys: pytest.CaptureFixture[str]):
    shutil.copy(workplace / "prepared/tiny/data/train.jsonl", "rows.jsonl")
    assert check.main(shlex.split(line)) == 0, capsys.readouterr().out


def test_the_commands_of_conversion_run_one_after_another(workplace: Path, capsys: pytest.CaptureFixture[str]):
    (block, *_) = re.findall(r"```bash\n(.*?)```", (DOCS / "conversion.md").read_text(), re.DOTALL)
    for line in block.splitlines():
        assert convert(shlex.split(line, comments=True)[3:]) == 0, capsys.readouterr().out
