# SPDX-License-Identifier: Apache-2.0
"""Seconds from the command of grpo_tiny.yaml to its first step, with one and four policy ranks: docs/data/startup.json.

Usage: python -m scripts.bench.startup [--no-record] [--repeats 3]

The phases are those that every run logs and writes to metrics.jsonl as `time/start/*`. The model is in the cache: it
has been used before.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from scripts.bench.turns import bench_parser, lowest_to_highest, median, report, take_turns
from scripts.bench.vs_trl import run
from tests.long.record import Row

TARGETS = {1: 25.0, 4: 40.0}
"""Seconds on two quiet cores, by policy ranks."""
ONE_RANK = {
    "cluster.cpu_units_per_node": 1,
    "policy.megatron_cfg.tensor_model_parallel_size": 1,
    "policy.megatron_cfg.expert_model_parallel_size": 1,
    "policy.megatron_cfg.sequence_parallel": "false",
}
ONE_STEP = {
    "grpo.max_num_steps": 1,
    "grpo.val_at_start": "false",
    "grpo.val_at_end": "false",
    "checkpointing.enabled": "false",
    "logger.tensorboard_enabled": "false",
}


def rows_of(repeats: int) -> Iterator[Row]:
    """A row for each number of policy ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, "-m", "mrl.prepare", "tiny", folder=folder)
        # The pass that warms up fills the cache of converted models and the host's page cache.
        starts = take_turns({num_ranks: partial(measure, folder, num_ranks) for num_ranks in TARGETS}, repeats)
    for num_ranks, found in starts.items():
        seconds = [start.pop("seconds") for start in found]
        row: Row = {"policy ranks": num_ranks, "seconds": median(seconds, 1), "at most": TARGETS[num_ranks]}
        row["lowest to highest"] = lowest_to_highest(seconds, 1)
        phases = {phase.replace("_", " "): median((start[phase] for start in found), 1) for phase in found[0]}
        yield {**row, **phases, "repeats": repeats}


def measure(folder: Path, num_ranks: int) -> dict[str, float]:
    """Seconds from the command to the header of step 1, as `s`, and those of the phases of the start and the step."""
    run_folder = Path(tempfile.mkdtemp(dir=folder))
    overrides = ONE_STEP | {"checkpointing.checkpoint_dir": run_folder} | (ONE_RANK if num_ranks == 1 else {})
    started = time.monotonic()
    run(
        sys.executable,
        "-m",
        "mrl.train",
        "grpo_tiny.yaml",
        *(f"{key}={value}" for key, value in overrides.items()),
        folder=folder,
    )
    all_s = time.monotonic() - started
    (row,) = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    phases = {name.removeprefix("time/start/"): value for name, value in row.items() if name.startswith("time/start/")}
    # The rollouts are in both; the rest of the step follows them.
    phases["first_step"] = row["time/total"] - row["time/generation"] - row["time/reward"]
    seconds = sum(phases.values())
    assert seconds <= all_s, "the phases overlap"
    return {"seconds": seconds, **phases}


if __name__ == "__main__":
    options = bench_parser(__doc__, repeats=3).parse_args()
    report("startup", rows_of(options.repeats), options)
