# SPDX-License-Identifier: Apache-2.0
"""Time of a step in the driver of a large run, with real Ray and instant stand-ins: docs/data/driver.json.

Usage: python -m scripts.bench.driver [--ranks 16 32 64 96 256] [--rollouts 2048] [--processes 4] [--no-record]

Seconds are processor time of the driver's process: on a small host the stand-ins would count otherwise. A line through
the measured numbers of ranks, by least squares, gives those of larger runs; that of 256 ranks is measured too, beside
what the line says.
"""

from __future__ import annotations

import gc
import inspect
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from mrl import api
from mrl.cluster.policies import PolicyGroup
from mrl.cluster.refit import Refitter
from mrl.cluster.rollouts import RolloutCollector
from mrl.loop import rollouts, run
from mrl.loop.run import Run
from mrl.store.ledger import Ledger
from mrl.store.run_folder import RunFolder
from mrl.types import RunState
from scripts.bench.turns import bench_parser, report
from tests.drivers import train_step
from tests.long.record import Row
from tests.rehearsal.stand_ins import Shape, hosts, rehearsal

STEP_S = 60.0
LARGE, LARGEST = 256, 4096
NUM_STEPS = 3
MAX_PERCENT = {2048: 3.0}
"""Target: rollouts of a step -> percent of a step of `STEP_S` at `LARGE` ranks."""

PARTS: dict[str, tuple[tuple[object, str], ...]] = {
    "ask": ((RolloutCollector, "ask"),),
    "generate": ((RolloutCollector, "wait"),),
    "rewards": ((RolloutCollector, "judge"),),
    "advantages": ((rollouts, "train_sequences"),),
    "packing": ((rollouts, "make_batches"),),
    "set_batches": ((PolicyGroup, "set_batches"),),
    "logprob, train": ((api.Policy, "update"),),
    "refit": ((Refitter, "run"),),
    "ledger": ((Ledger, "take"), (Ledger, "train")),
    "metrics": ((rollouts, "rollout_metrics"), (run, "performance_metrics"), (RunFolder, "log_metrics")),
    "token samples": ((Run, "token_samples"),),
    "dumps": ((RunFolder, "log_samples"),),
}
"""Timed functions, each without the time of others of them inside."""


class Stopwatch:
    """Processor seconds of the driver, by part; `rest` is a step's without its parts."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._note()
        self._open.append(name)
        yield
        self._note()
        self._open.pop()

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, or coroutine function, with its seconds counted as those of a part."""
        if not inspect.iscoroutinefunction(function):
            return self.part(name)(function)

        async def run(*arguments: object, **options: object) -> object:
            with self.part(name):
                return await function(*arguments, **options)

        return run

    def _note(self) -> None:
        now = time.process_time()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


@contextmanager
def watched() -> Iterator[Stopwatch]:
    """Inside the `with` block the functions of `PARTS` are timed."""
    watch = Stopwatch()
    with ExitStack() as stack:
        for part, functions in PARTS.items():
            for owner, name in functions:
                stack.enter_context(patch.object(owner, name, watch.timed(part, getattr(owner, name))))
        yield watch


def steps_of(shape: Shape, processes: list) -> list[dict[str, float]]:
    """Seconds by part of some steps, `wall` and `calls` beside them. The first, which fills caches, is left out."""
    found = []
    with tempfile.TemporaryDirectory() as folder, rehearsal(shape, Path(folder), processes) as ready:
        state = RunState(weight_version=1)
        for _ in range(1 + NUM_STEPS):
            gc.collect()
            ready.calls.counts.clear()
            with watched() as watch:
                start = time.monotonic()
                with watch.part("rest"):
                    train_step(ready.run, state)
            wall = time.monotonic() - start
            found.append({**watch.seconds, "wall": wall, "calls": float(ready.calls.counts.total())})
    return found[1:]


def measured(num_rollouts: int, ranks: Sequence[int], processes: list) -> dict[int, dict[str, float]]:
    """The seconds of runs with so many rollouts a step: by number of ranks, then by part."""
    found: dict[int, dict[str, float]] = {}
    for count in ranks:
        steps = steps_of(Shape(count, num_rollouts), processes)
        # The least of the steps: other work of the host only adds.
        found[count] = {part: min(step.get(part, 0.0) for step in steps) for part in steps[0]}
        print(
            json.dumps(
                {"ranks": count, "rollouts": num_rollouts, **{part: round(s, 4) for part, s in found[count].items()}}
            ),
            flush=True,
        )
    return found


def row_of(num_rollouts: int, seconds: dict[int, dict[str, float]]) -> Row:
    """The row of whole steps. The line is fitted to all numbers of ranks but `LARGE`."""
    ranks = [count for count in seconds if count != LARGE]
    taken = {count: sum(parts.get(one, 0.0) for one in (*PARTS, "rest")) for count, parts in seconds.items()}
    per_rank, fixed = map(float, np.polyfit(ranks, [taken[count] for count in ranks], 1))
    if per_rank < 0:
        # Nothing gets faster with more ranks: the host did.
        per_rank, fixed = 0.0, float(np.mean([taken[count] for count in ranks]))
    residuals = [taken[count] - fixed - per_rank * count for count in ranks]
    return {
        "rollouts": num_rollouts,
        "fixed_ms": round(1e3 * fixed, 1),
        "ms_per_rank": round(1e3 * per_rank, 3),
        "error_of_fit_ms": round(1e3 * float(np.sqrt(np.mean(np.square(residuals)))), 1),
        "measured_s_at_256": round(taken[LARGE], 3) if LARGE in taken else None,
        "predicted_s_at_256": round(fixed + per_rank * LARGE, 3),
        "percent_of_60_s": round(100 * (fixed + per_rank * LARGE) / STEP_S, 2),
        "at most": MAX_PERCENT.get(num_rollouts),
        "predicted_s_at_4096": round(fixed + per_rank * LARGEST, 2),
    }


def main() -> None:
    """Measures, prints, and writes."""
    parser = bench_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32, 64, 96, LARGE])
    parser.add_argument("--rollouts", type=int, nargs="+", default=[2048])
    parser.add_argument("--processes", type=int, default=4)
    options = parser.parse_args()
    with hosts(options.processes) as processes:
        rows = [row_of(count, measured(count, options.ranks, processes)) for count in options.rollouts]
    report("driver", rows, options)


if __name__ == "__main__":
    main()
