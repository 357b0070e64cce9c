# SPDX-License-Identifier: Apache-2.0
"""Steps that take the first groups of more than they need."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mrl.loop.queue import QueuePlan, TakenLengths, carried_metrics
from mrl.store.ledger import Ledger, replay
from mrl.types import Prompt, RolloutGroup, RolloutInfo, RunState
from tests.unit.loop.test_rollout_queue import (
    SAMPLING,
    Groups,
    ages,
    do,
    names,
    new_group,
    plan,
    prompts,
    queue_of,
    run,
)
from tests.unit.loop.test_rollout_queue import ledger as ledger  # noqa: PLC0414 -- a fixture


def first_of(under_way: int, lag: int) -> QueuePlan:
    return plan(lag, under_way=under_way, samples_ahead=False, waits_for_refit=False, takes_first=True)


def test_a_step_takes_the_first_groups_and_waits_for_those_that_get_too_old(ledger: Ledger):
    source = Groups({"p0": 9, "p1": 2, "p2": 3, "p3": 9, "p4": 1})
    queue = queue_of(first_of(4, 1), source, ledger, prompts(6), SAMPLING, last_step=3)
    do(queue.go_on(RunState(weight_version=1)))
    assert not source.asked  # the engines have no memory while the policy is trained
    taken = run(queue, ledger, steps=3)
    assert names(taken) == [["p1", "p2"], ["p0", "p3"], ["p4", "p5"]]
    assert ages(taken) == [[0, 0], [1, 1], [1, 1]] and source.now == 9
    assert [one.metrics["rollout/unfinished_groups"] for one in taken] == [2, 0, 0]
    assert sorted(source.asked) == [((0, f"p{i}"), 1 if i < 4 else 2) for i in range(6)]
    assert not source.under_way and not replay(ledger.path).taken


def of_lengths(version: int, *lengths: int) -> RolloutGroup:
    found = new_group(0, Prompt("p", (1,), "", "", "math"), version)
    for i, length in enumerate(lengths):
        found.note_sampled(RolloutInfo(f"0/p/{i}", "p", i, version, 1, length, "stop", None))
    return found


def test_the_length_of_rollouts_that_went_on_is_compared_with_that_of_the_others():
    trained = [of_lengths(4, 30, 50), of_lengths(5, 10, 14), of_lengths(5, 4, 12)]
    left = [of_lengths(5, 3), of_lengths(5, 3, 4)]
    assert list(carried_metrics(trained, left, 5).values()) == [1.0, 4.0]
    assert carried_metrics(trained[1:], left, 5) == {"rollout/unfinished_groups": 1.0}


def test_the_length_of_rollouts_that_a_step_takes_is_compared_with_that_of_all_it_has_asked_for():
    lengths, late = TakenLengths(), of_lengths(1, 40, 60)
    assert lengths.note([of_lengths(1, 8, 12)], [late], 1) == {} and not lengths.are_below(1.0)
    # 10 of a mean of 30; what the second step has taken is known when what it has asked for is.
    assert lengths.note([late, of_lengths(2, 20, 20)], [of_lengths(2, 1)], 2) == {"rollout/taken_length_ratio": 1 / 3}
    assert lengths.are_below(0.4) and not lengths.are_below(0.3) and not lengths.are_below(None)
    # Known at once: 35 of a mean of 50/3 by the second step, and 50/3 of 20 by the third.
    found = lengths.note([of_lengths(2, 10), of_lengths(3, 20, 20)], [], 3)
    assert found == {"rollout/taken_length_ratio": (50 / 3) / 20} and not lengths.are_below(0.9)


@pytest.mark.parametrize(("limit", "fourth"), [(None, ["p6", "p8"]), (0.7, ["p6", "p8"]), (0.8, ["p6", "p7"])])
def test_a_step_waits_for_all_while_short_rollouts_are_preferred(
    ledger: Ledger, limit: float | None, fourth: list[str]
):
    """The first step takes 2.5 tokens of 5.75, the second 1 of 1; the third has waited for the longest."""
    source = Groups({"p0": 9, "p1": 2, "p2": 3, "p3": 9, "p7": 9})
    numbers = replace(first_of(4, 2), min_length_ratio=limit)
    taken = run(queue_of(numbers, source, ledger, prompts(14), SAMPLING, last_step=7), ledger, steps=4)
    assert names(taken) == [["p1", "p2"], ["p4", "p5"], ["p0", "p3"], fourth]
    assert [one.metrics.get("rollout/taken_length_ratio") for one in taken[:3]] == [None, 1.0, 2.5 / 5.75]
