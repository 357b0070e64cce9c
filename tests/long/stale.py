# SPDX-License-Identifier: Apache-2.0
"""Measured tables whose product code has changed since, for maintainers: `scripts/test.sh --evidence --list`."""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.long.record import DATA_FOLDER, PATHS
from tests.sources import ROOT


def stale_tables(
    folder: Path = DATA_FOLDER, root: Path = ROOT, paths: Mapping[str, Sequence[str]] = PATHS
) -> dict[str, str]:
    """Part -> why its `PART.json` in `folder` is old: its paths' code differs from the commit it names, words aside."""
    reasons = {}
    for path in sorted(folder.glob("*.json")):
        part, measured = path.stem, json.loads(path.read_text(encoding="utf-8"))["commit"]
        if part.startswith("gpu_"):
            continue  # docs/gpu_status.md gives the commit of each
        done = _git(root, "diff", "--name-only", "--no-renames", measured.removesuffix("-dirty"), "--", *paths[part])
        changed = [
            name for name in done.stdout.splitlines() if _code_differs(root, measured.removesuffix("-dirty"), name)
        ]
        if done.returncode:
            reasons[part] = f"was measured at {measured}, which this checkout does not have"
        elif changed or measured.endswith("-dirty"):
            what = (
                f"{len(changed)} files that it depends on have changed since "
                f"({', '.join(changed[:3])}{' ...' if changed[3:] else ''})"
            )
            reasons[part] = f"was measured at {measured}; {what}"
    return reasons


def _code_differs(root: Path, commit: str, name: str) -> bool:
    """Tells whether more than comments, docstrings and layout of a file differ from a commit."""
    before, now = _git(root, "show", f"{commit}:{name}"), root / name
    if before.returncode or not now.exists():
        return True
    return not name.endswith(".py") or _code(before.stdout) != _code(now.read_text(encoding="utf-8"))


def _code(source: str) -> str:
    """The syntax tree of a source as text, without the strings that stand alone."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            body[:] = [
                each for each in body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
            ]
    return ast.dump(tree)


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=60)
