# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.long.stale`: lists measured tables whose product files have changed since. Never fails."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.long.record import DATA_FOLDER, PATHS
from tests.sources import ROOT


def stale_tables(folder: Path = DATA_FOLDER, root: Path = ROOT, paths: Mapping[str, Sequence[str]] = PATHS) -> list[str]:
    """One warning for each `PART.json` in `folder` whose paths differ from the commit that it names, in part order."""
    warnings = []
    for path in sorted(folder.glob("*.json")):
        part, measured = path.stem, json.loads(path.read_text(encoding="utf-8"))["commit"]
        if part.startswith("gpu_"):
            continue  # docs/gpu_status.md gives the commit of each
        command = ["git", "diff", "--name-only", measured.removesuffix("-dirty"), "--", *paths[part]]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
        changed = done.stdout.splitlines()
        if done.returncode:
            warnings.append(f"docs/data/{path.name} was measured at {measured}, which this checkout does not have")
        elif changed or measured.endswith("-dirty"):
            what = f"{len(changed)} files that it depends on have changed since ({', '.join(changed[:3])}{' ...' if changed[3:] else ''})"
            warnings.append(f"docs/data/{path.name} was measured at {measured}; {what}")
    return warnings


if __name__ == "__main__":
    for warning in stale_tables():
        print(f"Warning: {warning}")
