# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.long.evidence [NAME=FOLDER...]`: records anew every table of docs/ that is older than its code.

Each table is made by the command that its file names. A word in capitals there, as RUN_FOLDER, is a folder that this
host must have: say RUN_FOLDER=results/grpo_tiny. What is recorded is no longer old: the command may be stopped at any
moment, and goes on where it was.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping

from scripts.render_docs import main as render
from tests.long.record import DATA_FOLDER, commit
from tests.long.stale import stale_tables
from tests.sources import ROOT

PREFIXES = {"python": [sys.executable], "pytest": [sys.executable, "-m", "pytest"]}
RUNNER = "bash scripts/test.sh"


def words_of(command: str, folders: Mapping[str, str]) -> list[str]:
    """The recorded command as words, with the folders of this host, without another project's commit it may name."""
    command = re.sub(r" \(.*\)$|@\w+", "", command).replace(RUNNER, "python -m tests.runner")
    first, *words = shlex.split(command)
    return [*PREFIXES[first], *(folders.get(word, word) for word in words)]


def main(given: list[str]) -> int:
    """Runs what is left, the short benchmarks before the long tests; 1 if something failed or lacks its folder."""
    if commit().endswith("-dirty"):
        sys.exit(
            "Files outside docs/ differ from the commit: commit them first, so that every table names what it was "
            "measured on."
        )
    folders = dict(pair.split("=", 1) for pair in given)
    parts: dict[str, list[str]] = {}
    for part in stale_tables():
        parts.setdefault(json.loads((DATA_FOLDER / f"{part}.json").read_text(encoding="utf-8"))["command"], []).append(
            part
        )
    failed = []
    for number, command in enumerate(sorted(parts, key=lambda command: command.startswith(RUNNER)), start=1):
        words, what = words_of(command, folders), f"{number} of {len(parts)}: {', '.join(parts[command])}"
        if lacking := [word for word in words if word.isupper()]:
            print(f"{what}: not recorded; say {lacking[0]}=FOLDER", flush=True)
            failed.append(command)
            continue
        started = time.monotonic()
        code = subprocess.run(words, cwd=ROOT, timeout=None if command.startswith(RUNNER) else 3600).returncode
        fate = (
            f"FAILED with {code}"
            if code
            else "NOT recorded"
            if stale_tables().keys() & set(parts[command])
            else "recorded"
        )
        print(f"{what}: {fate} in {(time.monotonic() - started) / 60:.1f} min", flush=True)
        failed += [command] if fate != "recorded" else []
        render()
    print(f"{len(parts) - len(failed)} of {len(parts)} commands recorded their tables")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
