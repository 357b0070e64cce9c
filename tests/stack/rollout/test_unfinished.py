# SPDX-License-Identifier: Apache-2.0
"""Rollouts that go on from the tokens of an engine that has ended."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from mrl.types import Rollout
from tests.rollouts import StartEngine, differences, random_requests, request, run

if TYPE_CHECKING:
    from mrl.rollout.engine import Engine
    from mrl.types import RolloutRequest

REQUESTS = random_requests(12, max_new_tokens=24)


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine) -> Engine:
    engine = start_engine(0, keeps_routes=True)
    engine.set_weight_version(0)
    return engine


def broken_off(engine: Engine, requests: list[RolloutRequest], *, steps: int) -> dict[str, Rollout]:
    """Rollouts of requests as far as so many steps have sampled them; the engine drops them."""
    engine.add(requests)
    for _ in range(steps):
        assert engine.step() == []
    found = {rollout.request.request_id: rollout for rollout in engine.unfinished()}
    engine.abort(list(found))
    assert engine.num_unfinished == 0
    return found


def going_on(requests: list[RolloutRequest], begun: dict[str, Rollout]) -> list[RolloutRequest]:
    return [replace(one, earlier=begun[one.request_id]) for one in requests]


def test_a_rollout_that_is_broken_off_twice_is_that_of_an_unbroken_one(engine: Engine):
    unbroken = run(engine, REQUESTS)
    first = broken_off(engine, REQUESTS, steps=5)
    assert {(len(one.token_ids), one.finish_reason) for one in first.values()} == {(5, "abort")}
    # The second attempt has asked, and none of its steps has come to an end.
    again = broken_off(engine, going_on(REQUESTS, first), steps=0)
    assert all(again[name] is begun for name, begun in first.items())
    second = broken_off(engine, going_on(REQUESTS, first), steps=7)
    assert {len(one.token_ids) for one in second.values()} == {12}
    steps_before = engine.num_steps
    whole = run(engine, going_on(REQUESTS, second))
    assert differences(unbroken, whole) == []
    # A pass for each token that is left, and none for those that were there.
    assert engine.num_steps - steps_before == 24 - 12
    for name, rollout in whole.items():
        assert (rollout.request, rollout.finish_reason) == (unbroken[name].request, unbroken[name].finish_reason)
        assert rollout.num_weight_versions == 1


def test_the_tokens_that_it_gets_stay_as_they_are(engine: Engine):
    """Tokens and logprobs that no engine of this seed would draw: they are kept, and the model continues these."""
    one = request([5, 6, 7], max_new_tokens=20)
    (begun,) = broken_off(engine, [one], steps=6).values()
    changed = replace(begun, token_ids=begun.token_ids[::-1].copy(), generator_logprobs=np.full(6, -9, np.float32))
    (found,) = run(engine, [replace(one, earlier=changed)]).values()
    assert found.token_ids[:6].tolist() == changed.token_ids.tolist() and len(found.token_ids) == 20
    assert found.generator_logprobs[:6].tolist() == [-9.0] * 6
    # The same as a prompt that ends with them.
    plain = replace(one, token_ids=(*one.token_ids, *changed.token_ids.tolist()))
    plain = replace(plain, sampling=replace(one.sampling, max_new_tokens=14), seed=seed_behind(one, changed))
    (expected,) = run(engine, [plain]).values()
    assert found.token_ids[6:].tolist() == expected.token_ids.tolist()
    assert found.generator_logprobs[6:].tobytes() == expected.generator_logprobs.tobytes()
    assert found.routes is not None and expected.routes is not None
    assert np.array_equal(found.routes, expected.routes)


def seed_behind(one: RolloutRequest, begun: Rollout) -> int:
    """Seed of a request, so many of splitmix64's steps later."""
    return (one.seed + len(begun.token_ids) * 0x9E3779B97F4A7C15) % 2**64


def test_seeds_are_those_that_vllm_takes():
    from mrl.rollout.requests import sampling_params

    one = request([5, 6, 7], max_new_tokens=20)
    for length in range(1, 20):
        tokens = np.zeros(length, np.int32)
        begun = Rollout(one, 0, tokens, tokens.astype(np.float32), "abort")
        seed = sampling_params(replace(one, earlier=begun), max_model_len=64).seed
        # On GPUs vLLM writes it into an array of int64.
        generator = torch.Generator().manual_seed(int(np.array(seed, np.int64)))
        assert generator.initial_seed() == seed_behind(one, begun)


def test_a_further_turn_goes_on(engine: Engine):
    one = request([1, 2, 3], max_new_tokens=9)
    (first,) = run(engine, [one]).values()
    observed, zeros = np.array([65, 66], np.int32), np.zeros(2, np.float32)
    earlier = replace(
        first,
        token_ids=np.concatenate([first.token_ids, observed]),
        generator_logprobs=np.concatenate([first.generator_logprobs, zeros]),
        tail_length=2,
    )
    second = replace(one, earlier=earlier)
    unbroken = run(engine, [second])
    begun = broken_off(engine, [second], steps=4)
    assert [[(turn.start, turn.stop) for turn in found.turns] for found in begun.values()] == [[(0, 9), (11, 15)]]
    whole = run(engine, going_on([one], begun))
    assert differences(unbroken, whole) == []
    assert [[(turn.start, turn.stop) for turn in found.turns] for found in whole.values()] == [[(0, 9), (11, 20)]]


def test_versions_count_over_the_break(engine: Engine):
    one = request([9, 8, 7], max_new_tokens=12)
    engine.add([one])
    engine.step()
    version = engine.weight_version
    assert version is not None
    engine.set_weight_version(version + 1)
    engine.step()
    (begun,) = engine.unfinished()
    engine.abort([one.request_id])
    assert (begun.weight_version, begun.num_weight_versions) == (version, 2)
    (same,) = run(engine, [replace(one, earlier=begun)]).values()
    assert (same.weight_version, same.num_weight_versions) == (version, 2)
    engine.set_weight_version(version + 2)
    (newer,) = run(engine, [replace(one, earlier=begun)]).values()
    assert (newer.weight_version, newer.num_weight_versions) == (version, 3)


@pytest.mark.parametrize("max_new_tokens", [4, 5])
def test_no_rollout_gets_longer_than_it_may(engine: Engine, max_new_tokens: int):
    one = request([9, 8, 7], max_new_tokens=max_new_tokens)
    begun = broken_off(engine, [one], steps=3)
    (whole,) = run(engine, going_on([one], begun)).values()
    assert (len(whole.token_ids), whole.finish_reason) == (max_new_tokens, "length")
