# SPDX-License-Identifier: Apache-2.0
"""Time and memory of a step in the driver of a large run, with real Ray and instant stand-ins: docs/data/driver.json.

Usage: python -m scripts.bench.driver [--ranks 16 32 64 96 256] [--rollouts 2048 32768] [--processes 4] [--memory]
[--no-record]

Seconds are processor time of the driver's process: on a small host the stand-ins would count otherwise. A line through
the measured numbers of ranks, by least squares, gives those of larger runs; that of 256 ranks is measured too, beside
what the line says.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import pickle
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np

from mrl import api, train
from mrl.cluster.book import RequestBook
from mrl.cluster.event_loop import News, in_loop
from mrl.cluster.policies import PolicyGroup
from mrl.cluster.refit import Refitter
from mrl.cluster.rollouts import RolloutCollector
from mrl.loop import rollouts, run
from mrl.loop.run import Run
from mrl.store.ledger import Ledger
from mrl.store.run_folder import RunFolder
from mrl.store.samples import write_step_data
from mrl.types import Prompt, RolloutGroup, RolloutInfo, RolloutRequest, RunState, SamplingParams
from scripts.bench.turns import alone, bench_parser, report
from tests.long.record import Row
from tests.rehearsal.stand_ins import RewardStandIn, Shape, hosts, rehearsal, rehearsal_config
from tests.stack.conversion.children import memory

STEP_S = 60.0
LARGE, LARGEST = 256, 4096
NUM_STEPS = 3
CHARACTERS_PER_TOKEN = 4
MEMORY_CASES = ((2048, 49_152), (32_768, 4096))
"""Rollouts of a step, and tokens of each."""

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
                stack.enter_context(patch.object(owner, name, watch.part(part)(getattr(owner, name))))
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
                    train.train_step(ready.run, state)
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


def rows_of(num_rollouts: int, seconds: dict[int, dict[str, float]]) -> list[Row]:
    """A row for each part, and for all of them. The line is fitted to all numbers of ranks but `LARGE`."""
    ranks, rows = [count for count in seconds if count != LARGE], list[Row]()
    each = (*PARTS, "rest")
    for part, summed in (*((part, (part,)) for part in each), ("whole step", each)):
        taken = {count: sum(parts.get(one, 0.0) for one in summed) for count, parts in seconds.items()}
        per_rank, fixed = map(float, np.polyfit(ranks, [taken[count] for count in ranks], 1))
        if per_rank < 0:
            # Nothing gets faster with more ranks: the host did.
            per_rank, fixed = 0.0, float(np.mean([taken[count] for count in ranks]))
        residuals = [taken[count] - fixed - per_rank * count for count in ranks]
        at_large = taken.get(LARGE)
        rows.append(
            {
                "rollouts": num_rollouts,
                "part": part,
                "fixed_ms": round(1e3 * fixed, 1),
                "ms_per_rank": round(1e3 * per_rank, 3),
                "error_of_fit_ms": round(1e3 * float(np.sqrt(np.mean(np.square(residuals)))), 1),
                "measured_s_at_256": None if at_large is None else round(at_large, 3),
                "predicted_s_at_256": round(fixed + per_rank * LARGE, 3),
                "percent_of_60_s": round(100 * (fixed + per_rank * LARGE) / STEP_S, 2),
                "predicted_s_at_4096": round(fixed + per_rank * LARGEST, 2),
            }
        )
    return rows


def memory_mb() -> float:
    """Resident memory of this process, in megabytes, without garbage."""
    gc.collect()
    return memory("VmRSS") / 1e6


async def never(index: int, requests: list[RolloutRequest]) -> dict[str, RolloutInfo]:
    """An engine that samples nothing."""
    return await asyncio.get_running_loop().create_future()


def memory_row(num_rollouts: int, num_tokens: int) -> Row:
    """Memory the driver keeps of a step, as processes hand it over; in its own process. Payloads never come here."""
    shape = Shape(LARGE, num_rollouts, num_tokens=num_tokens, text_characters=CHARACTERS_PER_TOKEN * num_tokens)
    rewards = RewardStandIn(0, shape)
    sampling = SamplingParams(1.0, 1.0, None, num_tokens, ())
    with tempfile.TemporaryDirectory() as name:
        config = rehearsal_config(shape, Path(name))
        held = [memory_mb()]
        asked = [
            Prompt(f"train:{row}", tuple(range(1000 + row, 1300 + row)), "?" * 300, "42", "math")
            for row in range(num_rollouts // 16)
        ]
        book = RequestBook[RolloutRequest, RolloutInfo](
            "engine", LARGE // 4, never, lambda *_: None, news=News(), max_fruitless_restarts=1
        )
        infos = []
        for prompt in asked:
            requests = [
                RolloutRequest(prompt.prompt_id, index, 0, index, prompt.token_ids, sampling) for index in range(16)
            ]
            in_loop(
                lambda requests: [asyncio.ensure_future(book.ask(one.request_id, one)) for one in requests], requests
            )
            infos.append(
                [
                    RolloutInfo(one.request_id, one.prompt_id, one.rollout_index, 1, 300, num_tokens, "stop", None)
                    for one in requests
                ]
            )
        held.append(memory_mb())
        verdicts = [
            pickle.loads(pickle.dumps([rewards.verdict(number, info) for number, info in enumerate(mine)]))
            for mine in infos
        ]
        held.append(memory_mb())
        groups = [RolloutGroup(*group) for group in zip(asked, map(tuple, infos), map(tuple, verdicts), strict=True)]
        sequences, _ = rollouts.train_sequences(groups, config.grpo)
        batches = rollouts.make_batches(sequences, config)
        held.append(memory_mb())
        write_step_data(Path(name), 1, "train", groups, batches[0].sequences, config.logger)
        held.append(memory_mb())
    requested, judged, packed, written = (round(after - before) for before, after in itertools.pairwise(held))
    return {
        "rollouts": num_rollouts,
        "tokens": num_tokens,
        "payloads_mb": round(8e-6 * num_rollouts * num_tokens),
        "driver_mb": round(held[-1] - held[0]),
        "requests_and_metadata_mb": requested,
        "verdicts_with_texts_mb": judged,
        "texts_mb": round(1e-6 * sum(sys.getsizeof(verdict.text) for mine in verdicts for verdict in mine)),
        "sequences_and_batches_mb": packed,
        "writing_texts_mb": written,
    }


def main() -> None:
    """Measures, prints, and writes."""
    parser = bench_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32, 64, 96, LARGE])
    parser.add_argument("--rollouts", type=int, nargs="+", default=[2048, 32_768])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--memory", action="store_true", help="measure memory alone, which needs no Ray")
    options = parser.parse_args()
    report("driver_memory", (alone(memory_row, *case) for case in MEMORY_CASES), options, module="driver")
    if not options.memory:
        with hosts(options.processes) as processes:
            rows = [
                row for count in options.rollouts for row in rows_of(count, measured(count, options.ranks, processes))
            ]
        report("driver", rows, options)


if __name__ == "__main__":
    main()
