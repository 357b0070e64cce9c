# SPDX-License-Identifier: Apache-2.0
"""Every table in docs/ says what the JSON says that a test part wrote; every training command has keys that exist."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mrl.check import examine
from mrl.config.load import read_run
from mrl.exit_codes import CODES, FAILED
from mrl.ops.manual import all_manuals
from mrl.signals import ENDED_EARLY
from scripts.render_docs import DOCS, parts_of, render_page, render_part, targets
from tests.long.evidence import BENCH, TABLES, Table, left, record_table, words_of
from tests.long.record import PATHS, Row, record
from tests.long.stale import stale_tables
from tests.runner.__main__ import long_parts
from tests.sources import ROOT

PAGES = sorted(DOCS.rglob("*.md"))
MAX_TABLES = 25
"""Recorded ones: those by which a user decides."""
MAX_MINUTES = 240
"""Recording all tables of CPU hosts, on two quiet cores."""


def test_pages_show_what_was_measured():
    pages = {page.name: page.read_text() for page in PAGES}
    outdated = [name for name, text in pages.items() if render_page(text, DOCS / "data") != text]
    assert outdated == [], "run `python -m scripts.render_docs`"


def test_every_measurement_is_shown():
    shown = {part for page in PAGES for part in parts_of(page.read_text())}
    assert {path.stem for path in (DOCS / "data").glob("*.json")} <= shown
    text = "".join(page.read_text() for page in PAGES)
    blocks = re.findall(r"<!-- data:.*?<!-- end of data -->", text, re.DOTALL)
    assert sum(len(re.findall(r"^\| ---", block, re.MULTILINE)) for block in blocks) <= MAX_TABLES


def test_the_start_page_lists_every_page():
    start = (DOCS / "README.md").read_text()
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} - {"README.md"}
    assert {page for page in pages if f"]({page})" not in start} == set()


def test_an_exit_code_of_a_page_or_a_key_is_one_of_the_table():
    texts = [(page.name, page.read_text()) for page in (ROOT / "README.md", *PAGES)]
    texts += [("keys", each.meaning) for each in all_manuals()]
    said = [
        (name, int(code))
        for name, text in texts
        for code in re.findall(r"\b(?:codes?:?|ends? (?:the run )?with|exit code is) (\d+)\b", text, re.IGNORECASE)
    ]
    assert len(said) > 15 and [(name, code) for name, code in said if code not in CODES] == []
    assert {code for name, code in said if name in ("keys", "environments.md")} == {FAILED, ENDED_EARLY}


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_to_a_file_and_a_heading():
    broken = []
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES):
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if "://" not in link and (not target.exists() or (anchor and anchor not in anchors_of(target))):
                broken.append((page.name, link))
    assert broken == []


def test_paths_of_pages_are_there_when_they_are_typed():
    assert [page.name for page in (ROOT / "README.md", *PAGES) if "NNN" in page.read_text()] == []


def test_every_paper_that_the_code_cites_is_listed_with_its_file():
    rows = (DOCS / "reference.md").read_text().splitlines()
    named = [name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row)]
    assert len(named) > 20 and [name for name in named if not (ROOT / name).exists()] == []
    for path in (path for folder in ("mrl", "conversion") for path in sorted((ROOT / folder).rglob("*.py"))):
        name = path.relative_to(ROOT).as_posix()
        for paper in set(re.findall(r"arXiv:(\d+\.\d+)", path.read_text())):
            assert any(paper in row for row in rows), (name, paper)


def test_every_test_of_the_page_of_faults_exists_and_runs_where_it_says():
    faults = json.loads((DOCS / "reliability.json").read_text())
    wrong = []
    for fault in (fault for fault in faults if fault["test"]):
        path, name = fault["test"].split("::")
        source = (ROOT / path).read_text()
        has_part = f'long("{fault["part"]}")' in source if "part" in fault else True
        if f"def {name}(" not in source or not has_part:
            wrong.append(fault["test"])
    assert wrong == []


def test_a_table_is_rendered_from_its_file(tmp_path: Path):
    page = (
        "# Speed\n\n<!-- data: speed -->\nold\n<!-- end of data -->\nafter\n\n<!-- data: absent -->\n<!-- end "
        "of data -->\n"
    )
    rows = [{"seed": 0, "tokens_per_s": 12.34567}, {"seed": 1, "tokens_per_s": None, "note": "cold"}]
    data = {
        "commit": "abc1234",
        "command": "scripts/test.sh --long speed",
        "host": HOST,
        "date": "2026-01-31",
        "rows": rows,
    }
    (tmp_path / "speed.json").write_text(json.dumps(data))
    rendered = render_page(page, tmp_path)
    assert rendered == (
        "# Speed\n\n<!-- data: speed -->\n"
        "| seed | tokens per s | note |\n| --- | --- | --- |\n| 0 | 12.35 | – |\n| 1 | – | cold |\n\n"
        "Measured 2026-01-31 at commit `abc1234` by `scripts/test.sh --long speed` on A CPU, 2 cores, 24 GiB.\n"
        "<!-- end of data -->\nafter\n\n<!-- data: absent -->\nNot yet run: absent.\n<!-- end of data -->\n"
    )
    assert render_page(rendered, tmp_path) == rendered
    assert parts_of(page) == ["speed", "absent"]


HOST = {"cpu": "A CPU", "num_cores": 2, "memory_gib": 24}


def test_a_table_says_which_targets_it_misses():
    fast: Row = {"model": "a", "tokens": 3, "share": 0.95, "at least": 0.9, "s": 30, "at most": 40}
    slow: Row = {"model": "b", "tokens": 64, "share": 0.8, "at least": 0.9, "s": 41.5, "at most": 40}
    free: Row = {"model": "c", "tokens": 64, "share": 0.1, "at least": None, "s": 99}
    assert targets([free]) == "" and targets([fast, free]) == "Every target is met.\n\n"
    assert targets([fast, slow]) == (
        "**Missed:** share is 0.8, at least 0.9 is wanted (model b, tokens 64); "
        "s is 41.5, at most 40 is wanted (model b, tokens 64).\n\n"
    )


def test_gpu_checks_are_summed_up_in_one_table(tmp_path: Path):
    check = [{"result": "passed", "GPU": "A GPU", "torch": "2"}, {"result": "passed", "GPU": "A GPU", "torch": "2"}]
    for name, rows in {"gpu_ipc": check, "gpu_walk": check}.items():
        data = {"commit": "abc", "command": "c", "host": HOST, "date": "2026-01-31", "rows": rows}
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    measured = "2026-01-31, commit `abc`, A CPU, 2 cores, 24 GiB |"
    page = "<!-- data: gpu_ipc,gpu_walk -->\n<!-- end of data -->\n"
    lines = render_page(page, tmp_path).splitlines()
    assert (
        f"| `ipc` | passed | A GPU | 2 | {measured}" in lines and f"| `walk` | passed | A GPU | 2 | {measured}" in lines
    )


def test_what_a_part_records_can_be_rendered(tmp_path: Path):
    record("speed", [{"seed": 0, "minutes": 1.5}], folder=tmp_path)
    data = json.loads((tmp_path / "speed.json").read_text())
    assert data["part"] == "speed" and data["command"] == "bash scripts/test.sh --long speed"
    assert data["host"]["num_cores"] >= 1 and data["host"]["memory_gib"] >= 1 and data["host"]["cpu"]
    table, _, source = render_part(tmp_path / "speed.json").partition("\n\n")
    assert table == "| seed | minutes |\n| --- | --- |\n| 0 | 1.5 |"
    assert source.startswith(f"Measured {data['date']} at commit `{data['commit']}` by ")


def test_every_part_names_the_product_files_that_it_measures():
    written = {path.stem for path in (DOCS / "data").glob("*.json") if not path.stem.startswith("gpu_")}
    assert written == PATHS.keys() == {name for table in TABLES for name in table.names}
    assert [path for paths in PATHS.values() for path in paths if not (ROOT / path).exists()] == []


def git_in(folder: Path) -> Callable[..., str]:
    """Runs git in a new repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "--quiet")
    return git


def test_all_tables_are_recorded_in_time():
    assert sum(table.minutes for table in TABLES) <= 0.92 * MAX_MINUTES
    parts = [table.command.split()[-1] for table in TABLES if not table.command.startswith("python")]
    assert set(parts) <= set(long_parts())
    modules = [table.command.split()[2] for table in TABLES if table.command.startswith(BENCH)]
    assert all((ROOT / f"{name.replace('.', '/')}.py").exists() for name in modules)


RECORDS = """import json, pathlib, subprocess, sys
hash = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
pathlib.Path("docs", sys.argv[1] + ".json").write_text(json.dumps({"commit": hash, "rows": []}))
sys.exit(sys.argv[1] == "broken")
"""


def test_evidence_records_what_is_not_of_this_commit_or_has_failed(tmp_path: Path):
    git, data = git_in(tmp_path), tmp_path / "docs"
    data.mkdir()
    (tmp_path / "tables.py").write_text(RECORDS)
    (tmp_path / "a.py").write_text("1")
    git("add", "tables.py", "a.py")
    git("commit", "--quiet", "--message", "first")
    whole, broken = (Table(f"python tables.py {name}", 1, "") for name in ("whole", "broken"))
    idle, lacking = Table("python -c 0", 1, "", "idle"), Table("python tables.py RL", 1, "", "lacking")
    tables = (whole, broken, idle, lacking)

    def fates() -> dict[str, str]:
        return {table.names[0]: record_table(table, {}, data, tmp_path) for table in left(tables, data, tmp_path)}

    assert left(tables, data, tmp_path) == [*tables]
    assert {name: fate.split(" after")[0] for name, fate in fates().items()} == {
        "whole": "recorded in 0.0 min",
        "broken": "FAILED with 1",
        "idle": "NOT recorded: idle",
        "lacking": "NOT recorded; say RL=FOLDER",
    }
    # A page is no reason to measure again; code is.
    (data / "page.md").write_text("1")
    git("add", "docs")
    git("commit", "--quiet", "--message", "pages")
    assert left(tables, data, tmp_path) == [broken, idle, lacking]
    (tmp_path / "a.py").write_text("2")
    git("commit", "--quiet", "--all", "--message", "code")
    assert left(tables, data, tmp_path) == [*tables]


def test_a_table_is_old_once_its_product_files_change(tmp_path: Path):
    git = git_in(tmp_path)
    (tmp_path / "speed.py").write_text("1")
    (tmp_path / "other.py").write_text("1")
    git("add", "speed.py", "other.py")
    git("commit", "--quiet", "--message", "first")
    data = tmp_path / "data"
    data.mkdir()
    (data / "speed.json").write_text(json.dumps({"commit": git("rev-parse", "--short=10", "HEAD")}))
    paths = {"speed": ("speed.py",)}
    (tmp_path / "other.py").write_text("2")
    assert stale_tables(data, tmp_path, paths) == {}
    (tmp_path / "speed.py").write_text('"""A new sentence."""\n1  # which changes nothing')
    assert stale_tables(data, tmp_path, paths) == {}
    (tmp_path / "speed.py").write_text("x = 2")
    assert (
        "1 files" in stale_tables(data, tmp_path, paths)["speed"]
        and "(speed.py)" in stale_tables(data, tmp_path, paths)["speed"]
    )
    (data / "speed.json").write_text(json.dumps({"commit": "0123456789"}))
    assert "does not have" in stale_tables(data, tmp_path, paths)["speed"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("bash scripts/test.sh --long soak", ["-m", "tests.runner", "--long", "soak"]),
        ("python -m scripts.bench.nemo_recipes RL", ["-m", "scripts.bench.nemo_recipes", "/rl"]),
    ],
)
def test_a_command_is_run_with_the_folders_of_this_host(command: str, words: list[str]):
    assert words_of(command, {"RL": "/rl"}) == [sys.executable, *words]


def commands_of(text: str) -> list[list[str]]:
    """Config and overrides of every training command in the fenced blocks of a page."""
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    lines = [
        shlex.split(line, comments=True)
        for block in blocks
        for line in block.replace("\\\n", " ").splitlines()
        if "mrl.train " in line
    ]
    plain = [line[line.index("mrl.train") + 1 :] for line in lines if line[:2] == ["python", "-m"]]
    return [[config, *(word for word in words if "=" in word)] for config, *words in plain]


def test_the_commands_of_every_page_have_keys_that_exist():
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    commands = [
        tuple(words)
        for page in pages
        for words in commands_of(page.read_text())
        if (ROOT / "configs" / words[0]).exists()
    ]
    assert len(commands) > 20
    wrong = {words: problems for words in sorted(set(commands)) if (problems := read_run(words[0], words[1:])[2])}
    assert wrong == {}


def test_the_config_of_the_tutorial_is_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = (DOCS / "tutorial.md").read_text()
    blocks = {kind: re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("yaml", "json", "text")}
    texts = {kind: match[1] for kind, match in blocks.items() if match}
    files = {"my_run.yaml": texts["yaml"], "train.jsonl": texts["json"] * 64, "validation.jsonl": texts["json"]}
    files["prompt.txt"] = texts["text"]
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    checked = examine("my_run.yaml")
    assert checked.refused == []
    # The model is on the Hub; all else is there.
    assert {problem.key for problem in checked.problems} == {"policy.model_name", "policy.tokenizer.name"}
    assert checked.config is not None and checked.config.num_engines == 8


def test_code_is_fenced_under_its_language_and_prose_wraps():
    wrong = []
    for page in (ROOT / "README.md", ROOT / "CONVENTIONS.md", *DOCS.rglob("*.md")):
        is_code = False
        # What is measured has lines of any length.
        for line in re.sub(r"<!-- (data|config).*?<!-- end of", "", page.read_text(), flags=re.DOTALL).splitlines():
            is_fence = line.lstrip().startswith("```")
            is_code ^= is_fence
            is_long = len(line) > 120 and not line.startswith(("|", "#"))
            if (is_code and line.strip() == "```") or (
                not is_code and not is_fence and (line.startswith("    ") or is_long)
            ):
                wrong.append((page.name, line))
    assert wrong == []
