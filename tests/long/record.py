"""Keeps what a long part measured: docs/data/PART.json, from which `scripts.render_docs` makes the tables."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.sources import ROOT

DATA_FOLDER = ROOT / "docs" / "data"

Row = dict[str, str | int | float | None]
"""Column -> value; None where there is nothing to measure."""


def record(
    part: str,
    rows: Sequence[Row],
    *,
    folder: Path = DATA_FOLDER,
    command: str | None = None,
) -> None:
    """Writes the rows that `command` measured, by default `scripts/test.sh --long PART`, with where and on what they were measured."""
    data = {
        "part": part,
        "commit": commit(),
        "command": command or f"bash scripts/test.sh --long {part}",
        "host": host(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "rows": list(rows),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{part}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def commit() -> str:
    """Short hash of the commit that was measured; "-dirty" if files outside docs/ differ from it; "unknown" in a copy without history."""
    if not (ROOT / ".git").exists():
        return "unknown"
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs")
    return _git("rev-parse", "--short=10", "HEAD") + ("-dirty" if changes else "")


def host() -> dict[str, str | int]:
    """CPU model, cores that this process may use, and memory of the machine."""
    model = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert memory
    cpu = model[1].strip() if model else platform.machine()
    return {"cpu": cpu, "num_cores": len(os.sched_getaffinity(0)), "memory_gib": round(int(memory[1]) / 2**20)}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
