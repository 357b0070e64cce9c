# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step with a long tail of lengths, with and without `grpo.oversample`: docs/data/oversample.json.

Usage: python -m scripts.bench.oversample [--no-record] [--repeats 2]

One live run with a tiny model, one policy rank and one engine; the settings take turns. Each trains the same prompts
with the same lengths, so that the tokens are as many; its last steps ask for no more prompts than they train, and
wait for all that is left. Lengths are log-normal and as those of verl-recipe's partial_rollout: 97 % of the rollouts
are below half of the longest (160,000 tokens there).
"""

from __future__ import annotations

import dataclasses
import math
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

from mrl.cluster.rollouts import RolloutCollector
from mrl.loop.queue import open_queue
from mrl.loop.rollouts import RolloutSupplier
from mrl.loop.run import Run
from mrl.types import RolloutGroup, RunState, SamplingParams
from scripts.bench.turns import bench_parser, lowest_to_highest, median, report, take_turns
from tests.drivers import train_step
from tests.long.record import Row
from tests.stack.ahead.conftest import running
from tests.waiting import HANG_S

LONGEST = 1200
"""Tokens of the longest rollout."""
SIGMA, BELOW_HALF = 1.0, 1.8808
"""Deviation of the log-normal's logarithm, and the normal distribution's 97th percentile."""
NUM_STEPS, NUM_PROMPTS, NUM_GENERATIONS = 6, 8, 4
WAYS = ((1.0, 1), (1.5, 1), (2.0, 2))
"""`grpo.oversample` and `max_trajectory_age_steps`; the first is what the others are compared with."""
TARGET = 1.5
METRICS = ("time/generation", "rollout/mean_length", "rollout/unfinished_groups", "rollout/taken_length_ratio")
PASSES = "engine passes a step"
"""Do not depend on other work of the host."""
KEYS = (
    "policy.generation.colocated.enabled=true",
    "grpo.async_grpo.enabled=false",
    f"policy.generation.max_new_tokens={LONGEST}",
    f"grpo.num_prompts_per_step={NUM_PROMPTS}",
    f"grpo.num_generations_per_prompt={NUM_GENERATIONS}",
    "grpo.max_masked_steps=null",
    # The run goes on where a queue ends.
    "grpo.max_num_steps=1000",
    "grpo.max_num_epochs=1000",
)


def main() -> None:
    """Measures, prints a JSON line per row, and records."""
    options = bench_parser(__doc__, repeats=2).parse_args()
    report("oversample", measure(options.repeats), options)


def length_of(group: RolloutGroup, index: int) -> int:
    """Tokens of a rollout: the same in every turn."""
    drawn = random.Random(f"{group.prompt.prompt_id}/{index}").gauss(0.0, SIGMA)
    return max(1, round(LONGEST * min(1.0, 0.5 * math.exp(drawn - SIGMA * BELOW_HALF))))


@contextmanager
def long_tailed() -> Iterator[None]:
    """Rollouts end at their lengths, whatever the model draws."""
    original = RolloutCollector._rollout

    async def rollout(source: RolloutCollector, group: RolloutGroup, index: int, sampling: SamplingParams) -> None:
        ends = dataclasses.replace(sampling, max_new_tokens=length_of(group, index), stop_token_ids=())
        await original(source, group, index, ends)

    with patch.object(RolloutCollector, "_rollout", rollout):
        yield


def steps(run: Run[RolloutSupplier], state: RunState, oversample: float, age: int) -> tuple[float, dict[str, float]]:
    """Seconds of a step, as a mean over steps 1 to `NUM_STEPS` with a new queue; means of `METRICS`; `PASSES`."""
    config = run.config

    def num_passes() -> int:
        return sum(run.supplier.session.engines.apply(lambda engine: engine.num_steps, deadline_s=HANG_S))

    ahead = dataclasses.replace(config.grpo.async_grpo, max_trajectory_age_steps=age)
    keys = dataclasses.replace(config.grpo, oversample=oversample, async_grpo=ahead)
    run.folder.ledger.roll_back(0)
    state.step = 0
    run.supplier.queue = open_queue(
        dataclasses.replace(config, grpo=keys),
        run.supplier.data,
        run.supplier.session.collector,
        run.folder.ledger,
        last_step=NUM_STEPS,
    )
    before, found, started = num_passes(), list[dict[str, float]](), time.perf_counter()
    for _ in range(NUM_STEPS):
        train_step(run, state)
        found.append(dict(state.metrics))
    seconds = (time.perf_counter() - started) / NUM_STEPS
    means = {name: fmean([step[name] for step in found if name in step] or [0.0]) for name in METRICS}
    return seconds, means | {PASSES: (num_passes() - before) / NUM_STEPS}


def measure(repeats: int) -> Iterator[Row]:
    """A row for each of `WAYS`."""
    with tempfile.TemporaryDirectory() as folder, long_tailed(), running(Path(folder), *KEYS) as (run, state):
        found = take_turns({way: partial(steps, run, state, *way) for way in WAYS}, repeats)
    whole = [seconds for seconds, _ in found[WAYS[0]]]
    for way in WAYS:
        seconds, metrics = [one for one, _ in found[way]], found[way][0][1]
        ratios = [mine / theirs for mine, theirs in zip(whole, seconds, strict=True)]
        yield {
            "grpo.oversample": way[0],
            "max_trajectory_age_steps": way[1],
            "seconds a step": median(seconds),
            "of these, generation": median(metrics["time/generation"] for _, metrics in found[way]),
            PASSES: round(metrics[PASSES]),
            "times as fast": median(ratios),
            "at least": TARGET if way == WAYS[-1] else None,
            "lowest to highest": lowest_to_highest(ratios),
            "mean tokens": round(metrics["rollout/mean_length"]),
            "groups left a step": round(metrics["rollout/unfinished_groups"], 1),
            "taken / asked tokens": round(metrics["rollout/taken_length_ratio"], 2) if way != WAYS[0] else 1,
            "repeats": repeats,
        }


if __name__ == "__main__":
    main()
