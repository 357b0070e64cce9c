"""A folder that comes into being whole: built aside, continued where an earlier builder died, and published by rename."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from conversion.storage.files import publish, sync_tree
from conversion.storage.owners import REMOVED, heartbeat, is_alive, owned, owned_name, remove_leftover

# What a leftover was to become; one that was to become something else is of no use.
_PLAN = "plan.json"
_CONTENT = "content"


@contextmanager
def built_aside(out: Path, plan: Mapping[str, object]) -> Iterator[Path]:
    """A folder to build, which becomes `out` when the `with` block ends well.

    It may hold what an attempt of the same `plan` (plain values) left that was killed. After a ValueError of the block nothing is left.

    Raises:
        ValueError: `out` exists.
    """
    if out.exists():
        raise ValueError(f"--out {out} exists; remove it or choose another")
    out.parent.mkdir(parents=True, exist_ok=True)
    what = f".{out.name}.partial"
    aside = out.parent / owned_name(what)
    _take_over(what, aside, plan)
    folder = aside / _CONTENT
    folder.mkdir(parents=True, exist_ok=True)
    (aside / _PLAN).write_text(json.dumps(plan), encoding="utf-8")
    try:
        with heartbeat(aside):
            yield folder
            sync_tree(folder)
            if not publish(folder, out):
                raise ValueError(f"--out {out} exists by now: another process has written it; remove it or choose another")
    except ValueError:
        shutil.rmtree(aside)
        raise
    shutil.rmtree(aside)


def _take_over(what: str, aside: Path, plan: Mapping[str, object]) -> None:
    """Renames what a dead attempt left to `aside`, if it had the same plan; removes what other dead ones left."""
    for leftover in owned(aside.parent, what):
        if is_alive(leftover):
            continue
        # Errors: it was not begun, or is somebody else's by now.
        with suppress(OSError, ValueError):
            if not aside.exists() and json.loads((leftover / _PLAN).read_text(encoding="utf-8")) == plan:
                leftover.rename(aside)
                continue
        remove_leftover(leftover)
    for leftover in owned(aside.parent, f"{what}{REMOVED}"):
        if not is_alive(leftover):
            remove_leftover(leftover)
