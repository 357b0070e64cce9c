# SPDX-License-Identifier: Apache-2.0
"""Messages and waits of the driver in a step, with all of its code, real Ray, and stand-ins that answer at once.

Counts, never seconds: `python -m scripts.bench.driver` measures those.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from unittest.mock import patch

import pytest
import ray

from mrl.cluster.calls import wait_all
from mrl.types import RunState
from tests.drivers import train_step
from tests.rehearsal.stand_ins import Shape, hosts, rehearsal
from tests.waiting import HANG_S

NUM_ROLLOUTS = 512


@pytest.fixture(scope="module")
def processes() -> Iterator[list]:
    with hosts(2) as started:
        yield started


@dataclass(frozen=True)
class Sent:
    """Messages that the driver has sent in a step, by (kind, method or verb)."""

    counts: Counter[tuple[str, str]]
    sizes: Counter[tuple[str, str]]
    """Bytes of arguments."""


@pytest.fixture(scope="module")
def sent(processes: list, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Sent]:
    """Messages that the driver of a run with so many ranks sends in its first step."""

    @cache
    def step(num_ranks: int) -> Sent:
        with rehearsal(Shape(num_ranks, NUM_ROLLOUTS), tmp_path_factory.mktemp("run"), processes) as ready:
            ready.calls.counts.clear()
            ready.calls.weighs = True
            train_step(ready.run, RunState(weight_version=1))
            (line,) = (ready.run.folder.path / "metrics.jsonl").read_text().splitlines()
            assert json.loads(line)["rollout/math/num_rollouts"] == NUM_ROLLOUTS
            return Sent(ready.calls.counts, ready.calls.sizes)

    return step


def test_each_rank_and_engine_is_called_equally_often_whatever_their_number(sent: Callable[[int], Sent]):
    per_actor = []
    for num_ranks in (16, 48):
        counts = sent(num_ranks).counts
        num = {"PolicyActor": num_ranks, "EngineActor": num_ranks // 4}
        # An engine is polled until it has finished; what arrives together is sent to the rewards together.
        per_actor.append(
            {key: count / num[key[0]] for key, count in counts.items() if key[0] in num and key[1] != "poll"}
        )
    assert per_actor[0] == per_actor[1]
    # However many rounds a refit has.
    assert max(per_actor[0].values()) <= 3


def test_ranks_that_train_the_same_rows_are_not_each_sent_the_sequences(sent: Callable[[int], Sent]):
    """Sequences are stored once; what goes to each rank is the indices of its rows."""
    assert sent(16).sizes["PolicyActor", "set_batch"] / 16 / NUM_ROLLOUTS < 20


def test_a_wait_looks_at_the_calls_under_way_a_few_times_not_once_for_each(processes: list):
    references = {index: ray.put(index) for index in range(500)}
    looked_at = 0
    wait = ray.wait

    def counted(references: list, **options: object) -> tuple[list, list]:
        nonlocal looked_at
        looked_at += len(references)
        return wait(references, **options)  # pyright: ignore[reportArgumentType]

    with patch.object(ray, "wait", counted):
        assert wait_all(references, deadline_s=HANG_S, what="nothing") == {index: index for index in range(500)}
    assert looked_at <= 3 * 500
