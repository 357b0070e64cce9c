# SPDX-License-Identifier: Apache-2.0
"""`scripts/test.sh --evidence [--list] [NAME=FOLDER...]`: records every table of docs/ at this commit, one by one.

Each table is made by the command that its file names. A word in capitals there is a folder that this host must have:
say RL=path/to/RL. What is recorded at this commit is skipped, so the command may be stopped at any moment, and goes on
where it was. Tables of GPU hosts come from `scripts/gpu_check.sh`, and are left out. `--list` records nothing: it names
what is left, and what is older than its code.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from scripts.render_docs import main as render
from tests.long.record import DATA_FOLDER, commit
from tests.long.stale import stale_tables
from tests.sources import ROOT

PREFIXES = {"python": [sys.executable], "pytest": [sys.executable, "-m", "pytest"]}
RUNNER = "bash scripts/test.sh"
BENCH_LIMIT_S = 3600.0


def words_of(command: str, folders: Mapping[str, str]) -> list[str]:
    """The recorded command as words, with the folders of this host, without another project's commit it may name."""
    command = re.sub(r" \(.*\)$|@\w+", "", command).replace(RUNNER, "python -m tests.runner")
    first, *words = shlex.split(command)
    return [*PREFIXES[first], *(folders.get(word, word) for word in words)]


def read(path: Path) -> dict[str, Any]:
    """Reads the file of a table."""
    return json.loads(path.read_text(encoding="utf-8"))


def is_current(measured: str, root: Path = ROOT) -> bool:
    """Tells whether a commit differs from this one in docs/ alone."""
    command = ["git", "diff", "--quiet", measured, "HEAD", "--", ".", ":!docs"]
    return not subprocess.run(command, cwd=root, capture_output=True, timeout=60).returncode


def left(folder: Path = DATA_FOLDER, root: Path = ROOT) -> dict[str, list[Path]]:
    """Commands whose tables are not of this commit, with their files: benchmarks first, then by their last duration."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("*.json")):
        data = read(path)
        if not path.stem.startswith("gpu_") and not is_current(data["commit"], root):
            found.setdefault(data["command"], []).append(path)
    return dict(sorted(found.items(), key=lambda item: (item[0].startswith(RUNNER), last_seconds(item[1]) or 0)))


def last_seconds(paths: Iterable[Path]) -> int | None:
    """Seconds that a command took when it last recorded these files; None where nobody has counted them."""
    return max((seconds for path in paths if (seconds := _duration(read(path)))), default=None)


def _duration(data: Mapping[str, Any]) -> int:
    """Seconds of a table; of a long part, if its file does not say, those of its rows; 0 if unknown."""
    rows = data["rows"] if data["command"].startswith(RUNNER) else []
    return round(data.get("seconds", sum(row.get("seconds", 0) + 60 * row.get("minutes", 0) for row in rows)))


def estimate(durations: Iterable[int | None]) -> str:
    """A sentence on the time that commands of these last durations will take."""
    durations = list(durations)
    known = [seconds for seconds in durations if seconds is not None]
    unknown = len(durations) - len(known)
    more = f", and {unknown} whose time nobody has counted yet" if unknown else ""
    return f"{len(durations)} commands are left: {sum(known) / 60:.0f} min by their last durations{more}."


def record_tables(command: str, paths: Iterable[Path], folders: Mapping[str, str]) -> str:
    """Runs a command and says what came of it; the duration goes into its files."""
    words, started = words_of(command, folders), time.monotonic()
    if lacking := [word for word in words if word.isupper()]:
        return f"NOT recorded; say {lacking[0]}=FOLDER"
    limit = None if command.startswith(RUNNER) else BENCH_LIMIT_S
    code = subprocess.run(words, cwd=ROOT, timeout=limit).returncode
    seconds = round(time.monotonic() - started)
    missing = [path.stem for path in paths if not is_current(read(path)["commit"])]
    for path in paths:
        if path.stem not in missing:
            path.write_text(json.dumps(read(path) | {"seconds": seconds}, indent=1) + "\n", encoding="utf-8")
    failed = f"FAILED with {code}; " if code else ""
    return f"{failed}{f'NOT recorded: {missing}' if missing else 'recorded'} in {seconds / 60:.1f} min"


def main(given: list[str]) -> int:
    """Records what is left; 1 if something failed or lacks its folder."""
    is_list = "--list" in given
    folders = dict(pair.split("=", 1) for pair in given if pair != "--list")
    commands = left()
    print(estimate(map(last_seconds, commands.values())), flush=True)
    if is_list:
        for command, paths in commands.items():
            print(f"{command}: {', '.join(path.stem for path in paths)}")
        print("\nOlder than their code:", *(f"{part} {why}" for part, why in stale_tables().items()), sep="\n")
        return 0
    if commit().endswith("-dirty"):
        sys.exit(
            "Files outside docs/ differ from the commit: commit them first, so that every table names what it was "
            "measured on."
        )
    fates = []
    for number, (command, paths) in enumerate(commands.items(), start=1):
        fates.append(record_tables(command, paths, folders))
        print(f"{number} of {len(commands)}: {', '.join(path.stem for path in paths)}: {fates[-1]}", flush=True)
        render()
    num_recorded = sum(fate.startswith("recorded") for fate in fates)
    print(f"{num_recorded} of {len(fates)} commands recorded their tables")
    return num_recorded < len(fates)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
