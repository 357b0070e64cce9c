# SPDX-License-Identifier: Apache-2.0
"""Engines that schedule a step before they take in the one before: the same rollouts, nothing under way at changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mrl.types import Rollout
from tests.rollouts import StartEngine, differences, random_requests, request, run
from tests.stack.rollout.ahead import schedule_ahead
from tests.stack.rollout.test_engine import core_of
from tests.stack.rollout.trainer import Trainer, refit

if TYPE_CHECKING:
    from mrl.rollout.engine import Engine

REQUESTS = random_requests(12)
# Of 16 tokens: some are drawn before the refit, some after it.
STEPS = 7
LAST = request([1, 2, 3], prompt_id="last", max_new_tokens=STEPS)


def refitted_under_way(engine: Engine, checkpoint: Callable[[int], Path]) -> dict[str, Rollout]:
    """Rollouts that a refit with other weights finds half done; beside one that ends in the last pass before it."""
    trainer = Trainer(checkpoint(0))
    engine.enter("load")
    engine.prepare_refit(trainer.workers())
    refit(engine, trainer, 0)
    engine.add([*REQUESTS, LAST])
    early = [rollout for _ in range(STEPS) for rollout in engine.step()]
    trainer.load(checkpoint(1))
    refit(engine, trainer, 1)
    assert not core_of(engine).batch_queue
    return {rollout.request.request_id: rollout for rollout in early} | run(engine, [])


@pytest.fixture(scope="module")
def plain(start_engine: StartEngine, checkpoint: Callable[[int], Path]) -> dict[str, Rollout]:
    return refitted_under_way(start_engine(0), checkpoint)


@pytest.fixture(scope="module")
def engine(plain: object, start_engine: StartEngine) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        schedule_ahead(patch)
        yield start_engine(0)


@pytest.fixture(scope="module")
def refitted(engine: Engine, checkpoint: Callable[[int], Path]) -> dict[str, Rollout]:
    return refitted_under_way(engine, checkpoint)


def test_a_refit_takes_in_what_is_under_way(
    engine: Engine, plain: dict[str, Rollout], refitted: dict[str, Rollout]
) -> None:
    assert type(core_of(engine).scheduler).__name__ == "AsyncScheduler" and core_of(engine).batch_queue_size == 2
    assert differences(plain, refitted) == []
    versions = {key: (rollout.weight_version, rollout.num_weight_versions) for key, rollout in refitted.items()}
    assert versions == {one.request_id: (0, 2) for one in REQUESTS} | {LAST.request_id: (0, 1)}


def test_tokens_are_those_of_other_batches(engine: Engine, refitted: object) -> None:
    together = run(engine, REQUESTS)
    alone = {key: rollout for one in REQUESTS for key, rollout in run(engine, [one]).items()}
    assert differences(together, alone) == []


def test_an_abort_drops_what_has_ended_unseen(engine: Engine, refitted: object) -> None:
    requests = random_requests(3, max_new_tokens=STEPS)
    whole = run(engine, requests)
    engine.add(requests)
    assert [engine.step() for _ in range(STEPS)] == [[]] * STEPS and core_of(engine).batch_queue
    engine.abort([requests[1].request_id])
    # All have drawn their last token; the next step gives what was not aborted, though vLLM has nothing left to
    # compute.
    assert not core_of(engine).batch_queue and engine.num_unfinished == 2
    kept = run(engine, [])
    assert differences({one.request_id: whole[one.request_id] for one in (requests[0], requests[2])}, kept) == []
