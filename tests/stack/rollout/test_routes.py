# SPDX-License-Identifier: Apache-2.0
"""Rollouts' routes are the choices of transformers' routers for the same tokens, whatever the engine does in between.

With preemption: test_engine.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import models, routes
from tests.rollouts import StartEngine, random_requests, run
from tests.stack.policy.layouts import transformers_model

PARALLEL = {
    "tp2": dict(tensor_parallel_size=2),
    "tp2 ep2": dict(tensor_parallel_size=2, expert_parallel_size=2),
    "ep2": dict(expert_parallel_size=2),
    "tp2 ep4": dict(tensor_parallel_size=2, expert_parallel_size=4),
}


def test_routes_are_the_choices_of_transformers(start_engine: StartEngine, checkpoint: Callable[[int], Path]):
    # Prompts are computed in chunks, beside the generation of others; 8 requests run, 16 wait.
    engine = start_engine(0, keeps_routes=True, max_num_seqs=8, max_num_batched_tokens=48)
    engine.set_weight_version(0)
    requests = random_requests(24, lengths=(3, 120), max_new_tokens=24)
    engine.add(requests)
    rollouts = {}
    for step in range(20):
        rollouts |= {rollout.request.request_id: rollout for rollout in engine.step()}
        if step == 9:
            # Running requests start over: what they have sampled so far is computed again.
            engine.set_weight_version(1)
    dropped = list(engine._unfinished)[:3]
    engine.abort(dropped)
    rollouts |= run(engine, [request for request in requests if request.request_id in dropped])
    # A rollout has the version of its first token.
    assert len(rollouts) == 24 and {rollout.weight_version for rollout in rollouts.values()} == {0, 1}
    assert {rollouts[request_id].weight_version for request_id in dropped} == {1}
    routes.assert_own_routes(transformers_model(checkpoint(0)), rollouts)


@pytest.mark.long("parity")
@pytest.mark.parametrize("parallel", PARALLEL)
def test_parallel_engines_know_their_routes(
    start_engine: StartEngine, checkpoint: Callable[[int], Path], parallel: str
):
    engine = start_engine(0, keeps_routes=True, max_num_batched_tokens=64, **PARALLEL[parallel])
    engine.set_weight_version(0)
    routes.assert_own_routes(transformers_model(checkpoint(0)), run(engine, random_requests(32, max_new_tokens=40)))


@pytest.mark.long("parity")
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_other_families_tell_their_routes(start_engine: StartEngine, tmp_path: Path, model_type: str):
    folder = models.save_model(tmp_path, model_type)
    engine = start_engine(folder, keeps_routes=True, max_num_batched_tokens=64)
    engine.set_weight_version(0)
    routes.assert_own_routes(transformers_model(folder), run(engine, random_requests(32, max_new_tokens=40)))
