# SPDX-License-Identifier: Apache-2.0
"""`scripts/test.sh --evidence [--list] [NAME=FOLDER...]`: records every table of docs/ at this commit, one by one.

A word in capitals of a command is a folder that this host must have: say RL=path/to/RL. What is recorded at this commit
is skipped, so the command may be stopped at any moment, and goes on where it was. Tables of GPU hosts come from
`scripts/gpu_check.sh`, and are left out. `--list` records nothing: it names what is left, and what is older than its
code.
"""

from __future__ import annotations

import ctypes
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from scripts.render_docs import main as render
from tests.long.record import DATA_FOLDER, commit
from tests.long.stale import stale_tables
from tests.runner.part import PR_SET_CHILD_SUBREAPER, end_children
from tests.sources import ROOT

RUNNER = "bash scripts/test.sh"
BENCH = "python -m scripts.bench."
POINTS = f"{BENCH}plan_points tests/data/memory_points"
STOP_S = 60.0
"""Seconds that a stopped command gets to end its processes."""


@dataclass(frozen=True)
class Table:
    """Recorded files of one command, the minutes that it may take on two quiet cores, and what a user decides by it."""

    command: str
    minutes: int
    decides: str
    more: str = ""
    """Name of a file, where the command does not end with it."""

    @property
    def names(self) -> list[str]:
        """Names of the files in docs/data."""
        return self.more.split() or [self.command.split()[-1].removeprefix("scripts.bench.")]


TABLES = (
    Table(f"{POINTS}/points.json", 1, "is the plan right", "plan_points"),
    Table(f"{POINTS}/later.json", 1, "is the plan right about runs that it has not seen", "plan_later"),
    Table(f"{BENCH}convert", 4, "what a conversion costs beside a copy"),
    Table(f"{BENCH}driver", 4, "does one driver hold 256 ranks"),
    Table(f"{BENCH}gym_rewards", 5, "do verdicts equal those of NeMo Gym"),
    Table(f"{BENCH}startup", 6, "how long a start takes"),
    Table(f"{BENCH}engine", 6, "what the engine costs beside plain vLLM"),
    Table(f"{BENCH}refit", 8, "what a verified refit costs beside a copy"),
    Table(f"{BENCH}prefix", 8, "what shared prefixes save"),
    Table(f"{RUNNER} --long hostile", 8, "which attacks are held"),
    Table(f"{RUNNER} --long parity_table", 8, "does each feature of the policy compute what one rank does", "parity"),
    Table(f"{RUNNER} --long soak", 10, "what kills cost a run"),
    Table(f"{BENCH}nemo_recipes RL", 12, "which of NeMo RL's files run", "nemo_recipes nemo_reasons"),
    Table(f"{BENCH}step", 14, "what the loop costs beside its parts"),
    Table(f"{BENCH}vs_trl", 16, "is a step as fast as TRL's"),
    Table(f"{RUNNER} --long witness", 22, "do engines compute what transformers does"),
    Table(f"{RUNNER} --long algorithms", 32, "does each algorithm learn"),
    Table(f"{RUNNER} --long learning", 40, "do runs learn, with every seed and from rewards alone"),
)
"""Short ones first: whoever stops early has most of them."""


def words_of(command: str, folders: Mapping[str, str]) -> list[str]:
    """The words of a command, with the folders of this host."""
    words = shlex.split(command.replace(RUNNER, "python -m tests.runner"))
    return [sys.executable, *(folders.get(word, word) for word in words[1:])]


def is_recorded(path: Path, root: Path = ROOT) -> bool:
    """Tells whether a file was recorded to its end at a commit that differs from this one in docs/ alone."""
    if not path.exists():
        return False
    data = json.loads(path.read_text(encoding="utf-8"))
    command = ["git", "diff", "--quiet", data["commit"], "HEAD", "--", ".", ":!docs"]
    return "failed" not in data and not subprocess.run(command, cwd=root, capture_output=True, timeout=60).returncode


def left(tables: Sequence[Table] = TABLES, folder: Path = DATA_FOLDER, root: Path = ROOT) -> list[Table]:
    """Tables that are not recorded at this commit."""
    return [table for table in tables if not all(is_recorded(folder / f"{name}.json", root) for name in table.names)]


def run(words: Sequence[str], root: Path = ROOT) -> int:
    """Runs a command and returns its exit code; one that stops with this process may end its own processes first."""
    process = subprocess.Popen(words, cwd=root)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        raise


def record_table(table: Table, folders: Mapping[str, str], folder: Path = DATA_FOLDER, root: Path = ROOT) -> str:
    """Runs a table's command and says what came of it. A file of a command that failed says so, and is left."""
    words, started = words_of(table.command, folders), time.monotonic()
    if lacking := [word for word in words if word.isupper()]:
        return f"NOT recorded; say {lacking[0]}=FOLDER"
    before = {name: _text(folder / f"{name}.json") for name in table.names}
    code = run(words, root)
    minutes = (time.monotonic() - started) / 60
    missing = [name for name, text in before.items() if _text(folder / f"{name}.json") == text]
    for path in (folder / f"{name}.json" for name in table.names if code and name not in missing):
        data = json.loads(path.read_text(encoding="utf-8")) | {"failed": code}
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if code:
        return f"FAILED with {code} after {minutes:.1f} min"
    late = f", more than its {table.minutes} min" if minutes > table.minutes else ""
    return f"NOT recorded: {', '.join(missing)}" if missing else f"recorded in {minutes:.1f} min{late}"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main(given: list[str]) -> int:
    """Records what is left; 1 if something failed or lacks its folder."""
    folders = dict(pair.split("=", 1) for pair in given if pair != "--list")
    tables = left()
    print(f"{len(tables)} of {len(TABLES)} tables are left: {sum(table.minutes for table in tables)} min at most")
    if "--list" in given:
        for table in tables:
            print(f"{table.minutes:3} min  {', '.join(table.names)}: {table.decides}\n         {table.command}")
        print("\nOlder than their code:", *(f"{part} {why}" for part, why in stale_tables().items()), sep="\n")
        return 0
    if commit().endswith("-dirty"):
        sys.exit(
            "Files outside docs/ differ from the commit: commit them first, so that every table names what it was "
            "measured on."
        )
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # What loses its parent below becomes a child of this process, which ends it.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        return record_all(tables, folders)
    finally:
        end_children()


def record_all(tables: Sequence[Table], folders: Mapping[str, str]) -> int:
    """Records tables one by one, and renders the pages after each; 1 if one was not recorded."""
    fates = []
    for number, table in enumerate(tables, start=1):
        print(f"{number} of {len(tables)}: {table.command}", flush=True)
        fates.append(record_table(table, folders))
        print(f"{number} of {len(tables)}: {', '.join(table.names)}: {fates[-1]}", flush=True)
        render()
    num_recorded = sum(fate.startswith("recorded") for fate in fates)
    print(f"{num_recorded} of {len(fates)} commands recorded their tables")
    return num_recorded < len(fates)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
