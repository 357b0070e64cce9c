# SPDX-License-Identifier: Apache-2.0
"""Keeps what a long part measured: docs/data/PART.json, from which `scripts.render_docs` makes the tables."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.sources import ROOT

DATA_FOLDER = ROOT / "docs" / "data"

Row = dict[str, str | int | float | None]
"""Column -> value; None where there is nothing to measure."""


_UPDATE = (
    "mrl/policy/batch.py",
    "mrl/policy/step.py",
    "mrl/policy/objectives.py",
    "mrl/policy/optimizer.py",
    "mrl/policy/packed.py",
)
_LEARNS = (
    "mrl/algo",
    *_UPDATE,
    "mrl/policy/output.py",
    "mrl/loop/learning.py",
    "mrl/loop/rollouts.py",
    "mrl/loop/queue.py",
)
_TINY = ("configs/grpo_tiny.yaml", "mrl/recipes/additions.py")
_ROLLOUTS = (
    "mrl/loop/rollouts.py",
    "mrl/loop/queue.py",
    *(f"mrl/cluster/{name}.py" for name in ("rollouts", "tasks", "engines")),
    "mrl/rollout/engine.py",
)
_COPIES = ("conversion/schedule.py", "conversion/reshard.py", "conversion/rounds.py")
_FILES = ("conversion/convert.py", "conversion/cache.py", "conversion/files", "conversion/tensors.py")
_PEAKS = ("mrl/plan/activations.py", "mrl/plan/peaks.py", "mrl/plan/states.py", "scripts/bench/plan_points.py")
_MODEL = (*_UPDATE, "mrl/policy/model.py", "mrl/policy/specs.py", "mrl/policy/parallel.py", "mrl/algo/losses.py")
_GRADERS = ("mrl/envs/code.py", "mrl/envs/letters.py", "mrl/nemo/gym/graders")
_MATH = tuple(f"mrl/envs/math_{name}.py" for name in ("value", "number", "size", "notation"))

PATHS: dict[str, tuple[str, ...]] = {
    "algorithms": (*_LEARNS, *_TINY),
    "convert": _FILES,
    "engine": (
        "mrl/rollout/engine.py",
        "mrl/rollout/engine_arguments.py",
        "mrl/rollout/worker.py",
        "mrl/rollout/cpu.py",
        "mrl/rollout/cpu_experts.py",
        "mrl/rollout/cpu_sampling.py",
    ),
    "driver": (
        "mrl/train.py",
        *_ROLLOUTS,
        "mrl/cluster/rewards.py",
        "mrl/cluster/service.py",
        "mrl/cluster/calls.py",
    ),
    "gym_rewards": (*_GRADERS, *_MATH),
    "hostile": (
        "mrl/envs/confine.py",
        "mrl/envs/sandbox.py",
        "mrl/envs/child.py",
        *_GRADERS,
        *_MATH,
        "mrl/rollout/http_gate.py",
        "conversion/files",
    ),
    "learning": (*_LEARNS, *_TINY, "configs/grpo_tiny_dense.yaml", "mrl/recipes/tiny_model.py"),
    "nemo_recipes": ("mrl/config", "mrl/nemo/dialect", "mrl/check.py"),
    "nemo_reasons": ("mrl/config", "mrl/nemo/dialect", "mrl/check.py"),
    "parity": (*_MODEL, "conversion/families"),
    "plan_later": _PEAKS,
    "plan_points": _PEAKS,
    "refit": ("mrl/refit", "mrl/cluster/refit.py", *_COPIES),
    "prefix": (
        *_UPDATE,
        "mrl/policy/tree_layers.py",
        "mrl/policy/trees.py",
        "mrl/data/prefixes.py",
        "mrl/data/planning.py",
    ),
    "soak": (
        "mrl/train.py",
        "mrl/loop/saving.py",
        "mrl/policy/checkpoint.py",
        *(f"mrl/store/{n}.py" for n in ("checkpoints", "rollout_files")),
    ),
    "startup": (
        "mrl/loop/main.py",
        *(f"mrl/cluster/{name}.py" for name in ("session", "runtime", "environment")),
        *_TINY,
    ),
    "step": ("mrl/train.py", *_ROLLOUTS, *_UPDATE, *_TINY),
    "vs_trl": ("mrl/train.py", *_ROLLOUTS, *_UPDATE, *_TINY),
    "witness": ("conversion/families", "mrl/refit/pull.py", "mrl/refit/checksum.py", "mrl/rollout/worker.py"),
}
"""Measured parts: the product files and folders whose behaviour they measure; a change of their code makes the table
old.
"""

is_part = False
"""True in a run of tests that were chosen by name, as with `-k`, or that somebody has stopped: a table of a part of its
rows would take the place of the whole.
"""


def record(
    part: str,
    rows: Sequence[Row],
    *,
    folder: Path = DATA_FOLDER,
    command: str | None = None,
) -> None:
    """Writes the rows that `command` measured, by default `scripts/test.sh --long PART`, with where and on what.

    In a run of a part of the tests it writes nothing. The commit is that of the start, when this module was
    imported; "-dirty" if files outside docs/ differed from it then or do now. `seconds` are those since the start.
    """
    if is_part and folder == DATA_FOLDER:
        print(f"not recorded, as only a part of its tests ran: {part}")
        return
    now = commit()
    data = {
        "part": part,
        "commit": STARTED_AT if now == STARTED_AT else STARTED_AT.removesuffix("-dirty") + "-dirty",
        "command": command or f"bash scripts/test.sh --long {part}",
        "host": host(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seconds": round(time.monotonic() - STARTED_S),
        "rows": list(rows),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{part}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def commit() -> str:
    """Short hash of the measured commit; "-dirty" if files outside docs/ differ from it; "unknown" without history."""
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
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


STARTED_AT, STARTED_S = commit(), time.monotonic()
