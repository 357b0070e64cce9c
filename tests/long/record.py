# SPDX-License-Identifier: Apache-2.0
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


PATHS: dict[str, tuple[str, ...]] = {
    "algorithms": ("mrl/algo", "mrl/policy", "mrl/train.py", "mrl/loop", "configs/grpo_tiny.yaml", "mrl/recipes/tiny.py"),
    "async": ("mrl/train.py", "mrl/loop", "mrl/cluster", "mrl/rollout"),
    "cluster": ("scripts/ray.sub", "mrl/cluster", "mrl/store", "mrl/train.py"),
    "config": ("mrl/config",),
    "conversion": ("conversion",),
    "convert": ("conversion",),
    "engine": ("mrl/rollout",),
    "driver": ("mrl/train.py", "mrl/loop", "mrl/cluster", "mrl/store"),
    "driver_memory": ("mrl/train.py", "mrl/loop", "mrl/cluster", "mrl/store"),
    "distillation": ("mrl/algo", "mrl/policy", "mrl/train.py", "mrl/loop", "configs/distillation_tiny.yaml", "configs/sft_tiny.yaml"),
    "environments": ("mrl/envs", "mrl/cluster/rewards.py"),
    "faults": ("mrl/store", "mrl/loop", "mrl/cluster", "mrl/startup.py"),
    "gym_rewards": ("mrl/envs",),
    "hangs": ("mrl/spans.py", "mrl/cluster", "mrl/loop"),
    "hostile": ("mrl/envs", "mrl/rollout", "mrl/store", "mrl/config", "mrl/cluster", "conversion"),
    "learning": ("mrl/algo", "mrl/policy", "mrl/train.py", "mrl/loop", "configs/grpo_tiny.yaml", "mrl/recipes/tiny.py"),
    "logprobs": ("mrl/policy/logprobs.py", "mrl/policy/output.py"),
    "math_verdicts": (
        "mrl/envs/math_value.py",
        "mrl/envs/math_answer.py",
        "mrl/envs/math_form.py",
        "mrl/envs/math_same.py",
        "mrl/envs/math_sums.py",
        "mrl/envs/math_tokens.py",
    ),
    "model_folders": ("conversion", "mrl/train.py", "mrl/config", "mrl/policy", "mrl/refit", "mrl/rollout"),
    "mopd": ("mrl/algo", "mrl/policy", "mrl/train.py", "mrl/loop", "configs/mopd_tiny.yaml", "configs/sft_tiny.yaml"),
    "nemo_parity": ("mrl/algo", "mrl/policy/batch.py"),
    "nemo_recipes": ("mrl/config", "mrl/check.py"),
    "nemo_reasons": ("mrl/config", "mrl/check.py"),
    "nodes": ("scripts/ray_node.sh", "mrl/cluster/runtime.py", "mrl/cluster/nodes.py"),
    "packing": ("mrl/data/packing.py", "mrl/data/planning.py"),
    "parity": ("mrl/policy", "mrl/algo", "conversion/families"),
    "parity_steps": ("mrl/policy", "mrl/algo", "conversion/families"),
    "plan_later": ("mrl/plan/activations.py", "mrl/plan/peaks.py", "mrl/plan/states.py", "scripts/bench/plan_points.py"),
    "plan_points": ("mrl/plan/activations.py", "mrl/plan/peaks.py", "mrl/plan/states.py", "scripts/bench/plan_points.py"),
    "ppo": ("mrl/algo", "mrl/policy", "mrl/train.py", "mrl/loop", "configs/ppo_tiny.yaml", "mrl/recipes/tiny.py"),
    "recompute": ("mrl/policy",),
    "refit": ("mrl/refit", "mrl/cluster/refit.py", "conversion/schedule.py", "conversion/reshard.py", "conversion/rounds.py"),
    "refit_model": ("mrl/plan/times.py", "mrl/plan/traffic.py", "conversion/schedule.py", "conversion/reshard.py", "conversion/rounds.py"),
    "router_replay": ("mrl/policy/moe.py", "mrl/rollout/worker.py"),
    "schedule": ("conversion/schedule.py", "conversion/reshard.py", "conversion/rounds.py", "conversion/families"),
    "signals": ("mrl/signals.py", "mrl/train.py", "mrl/loop", "mrl/cluster"),
    "spans": ("mrl/spans.py", "mrl/view", "mrl/store/samples.py", "mrl/store/run_folder.py"),
    "speculation": ("mrl/policy", "mrl/rollout", "mrl/refit", "configs/grpo_tiny.yaml", "mrl/recipes/tiny.py"),
    "startup": ("mrl/cluster", "mrl/loop", "mrl/policy", "mrl/rollout", "mrl/train.py", "configs/grpo_tiny.yaml"),
    "step": ("mrl/train.py", "mrl/loop", "mrl/cluster", "mrl/rollout", "mrl/policy", "mrl/algo", "configs/grpo_tiny.yaml"),
    "supervised": ("mrl/loop", "mrl/algo", "mrl/policy", "configs/sft_tiny.yaml", "configs/dpo_tiny.yaml", "configs/rm_tiny.yaml"),
    "trainer": ("mrl/policy", "mrl/algo"),
    "vs_trl": ("mrl/train.py", "mrl/loop", "mrl/cluster", "mrl/rollout", "mrl/policy", "mrl/algo", "configs/grpo_tiny.yaml"),
    "witness": ("conversion/families", "mrl/refit", "mrl/rollout"),
}
"""Measured parts: the product files and folders whose changes make its table old."""

OUTCOMES = ("async", "config", "environments", "faults", "hangs", "hostile", "model_folders", "nodes", "signals")
"""Parts that measure nothing but whether their tests pass; `tests/conftest.py` records that."""


def record(
    part: str,
    rows: Sequence[Row],
    *,
    folder: Path = DATA_FOLDER,
    command: str | None = None,
) -> None:
    """Writes the rows that `command` measured, by default `scripts/test.sh --long PART`, with where and on what they were measured.

    The commit is that of the start, when this module was imported; "-dirty" if files outside docs/ differed from it then or do now.
    """
    now = commit()
    data = {
        "part": part,
        "commit": STARTED_AT if now == STARTED_AT else STARTED_AT.removesuffix("-dirty") + "-dirty",
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


STARTED_AT = commit()
