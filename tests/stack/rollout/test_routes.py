"""The routes that come with rollouts are the choices of transformers' routers for the same tokens, whatever the engine does in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from mrl.config.schema_generation import GenerationConfig
from mrl.types import Rollout
from tests import models, routes
from tests.parity import MIN_ROUTER_MARGIN
from tests.rollouts import StartEngine, random_requests, run
from tests.stack.policy.layouts import transformers_model

PARALLEL = {"tp2": dict(tensor_parallel_size=2), "tp2 ep2": dict(tensor_parallel_size=2, expert_parallel_size=2)}


def assert_routes_of_transformers(folder: Path, rollouts: Mapping[str, Rollout]) -> None:
    model = transformers_model(folder)
    num_clear = num_all = 0
    for rollout in rollouts.values():
        tokens = [*rollout.request.token_ids, *rollout.token_ids.tolist()]
        assert rollout.routes is not None and rollout.routes.dtype == np.uint8
        expected, leads = routes.own_routes(model, tokens)
        assert rollout.routes.shape == (len(tokens) - 1, *expected.shape[1:])
        is_clear = leads[:-1] >= MIN_ROUTER_MARGIN
        is_same = (np.sort(rollout.routes.astype(np.int64)) == np.sort(expected[:-1])).all(axis=-1)
        assert is_same[is_clear].all()
        num_clear, num_all = num_clear + int(is_clear.sum()), num_all + is_clear.size
    assert num_clear >= 0.999 * num_all > 3000


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
    dropped = engine.unfinished_ids[:3]
    engine.abort(dropped)
    rollouts |= run(engine, [request for request in requests if request.request_id in dropped])
    assert len(rollouts) == 24 and {rollout.weight_version for rollout in rollouts.values()} == {1}
    assert_routes_of_transformers(checkpoint(0), rollouts)


def test_requests_that_were_preempted_have_one_route_a_token(start_engine: StartEngine, checkpoint: Callable[[int], Path]):
    engine = start_engine(0, keeps_routes=True, kv_cache_memory_mib=1)
    engine.set_weight_version(0)
    assert_routes_of_transformers(checkpoint(0), run(engine, random_requests(32, lengths=(60, 120), max_new_tokens=100)))


def test_a_cached_prefix_has_no_route(checkpoint: Callable[[int], Path]):
    from mrl.rollout.engine import engine_arguments

    config = GenerationConfig(max_new_tokens=16, vllm_kwargs={"enable_prefix_caching": True})
    with pytest.raises(ValueError, match="enable_prefix_caching=True: with policy.router_replay.enabled=true it must be False"):
        engine_arguments(str(checkpoint(0)), config, seed=0, keeps_routes=True)


@pytest.mark.long("parity")
@pytest.mark.parametrize("parallel", PARALLEL)
def test_parallel_engines_know_their_routes(start_engine: StartEngine, checkpoint: Callable[[int], Path], parallel: str):
    engine = start_engine(0, keeps_routes=True, max_num_batched_tokens=64, **PARALLEL[parallel])
    engine.set_weight_version(0)
    assert_routes_of_transformers(checkpoint(0), run(engine, random_requests(32, max_new_tokens=40)))


@pytest.mark.long("parity")
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_other_families_tell_their_routes(start_engine: StartEngine, tmp_path: Path, model_type: str):
    folder = models.save_model(tmp_path, model_type)
    engine = start_engine(folder, keeps_routes=True, max_num_batched_tokens=64)
    engine.set_weight_version(0)
    assert_routes_of_transformers(folder, run(engine, random_requests(32, max_new_tokens=40)))
