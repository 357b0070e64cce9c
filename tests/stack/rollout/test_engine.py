# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from mrl.recipes.tokenizer import byte_tokenizer
from tests import models, routes
from tests.parity import Parity, hf_scores
from tests.rollouts import MAX_MODEL_LEN, StartEngine, differences, random_requests, request, run
from tests.stack.policy.layouts import transformers_model

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

    from mrl.rollout.engine import Engine
    from mrl.types import Rollout

REQUESTS = random_requests(24)


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine) -> Engine:
    engine = start_engine(0)
    with pytest.raises(RuntimeError, match="has not been refitted yet"):
        engine.step()
    engine.set_weight_version(0)
    return engine


@pytest.fixture(scope="module")
def alone(engine: Engine) -> dict[str, Rollout]:
    rollouts = {}
    for one in REQUESTS:
        rollouts |= run(engine, [one])
    return rollouts


def core_of(engine: Engine) -> EngineCore:
    from vllm.v1.engine.core_client import InprocClient

    assert isinstance(engine.llm.engine_core, InprocClient)
    return engine.llm.engine_core.engine_core


def test_the_engine_is_vllms_and_the_replaced_names_are_listed(engine: Engine) -> None:
    import vllm

    from mrl.rollout import cpu

    core = core_of(engine)
    worker = engine.llm.model_executor.driver_worker.worker
    model = worker.get_model()
    assert type(engine.llm) is vllm.LLMEngine
    for part in (core, core.scheduler, worker.model_runner, worker.model_runner.sampler):
        assert type(part).__module__.startswith("vllm.v1."), part
    origins = {type(module).__name__: type(module).__module__ for module in model.modules()}
    print("\n".join(f"replaced: {name}: {reason}" for name, reason in cpu.REPLACED.items()))
    assert origins["NemotronHForCausalLM"] == "vllm.model_executor.models.nemotron_h"
    assert {"MambaMixer2", "NemotronHMoE", "NemotronHAttention", "Attention", "RoutedExperts"} <= origins.keys()
    assert not [name for name, module in origins.items() if not module.startswith(("vllm.", "torch.nn."))]
    assert all(name.startswith(("vllm.", "torch.")) for name in cpu.REPLACED)


def test_same_bits_together(engine: Engine, alone: dict[str, Rollout]) -> None:
    assert differences(alone, run(engine, REQUESTS)) == []


def test_same_bits_shuffled_and_staggered(engine: Engine, alone: dict[str, Rollout]) -> None:
    rng = random.Random(3)
    arrivals: dict[int, list] = {}
    for one in rng.sample(REQUESTS, len(REQUESTS)):
        arrivals.setdefault(rng.randrange(20), []).append(one)
    assert differences(alone, run(engine, arrivals)) == []


def test_seeds(engine: Engine) -> None:
    prompt = list(range(20))
    first = run(engine, [request(prompt, rollout_index=i) for i in range(8)])
    second = run(engine, [request(prompt, rollout_index=i) for i in range(8)])
    assert differences(first, second) == []
    assert len({rollout.token_ids.tobytes() for rollout in first.values()}) == 8


def test_stop_token_ends_and_belongs_to_the_rollout(engine: Engine) -> None:
    free = run(engine, [request(range(9))])["0/p/0"]
    stop = int(free.token_ids[5])
    end = free.token_ids.tolist().index(stop) + 1
    stopped = run(engine, [request(range(9), stop_token_ids=(stop,))])["0/p/0"]
    assert (stopped.finish_reason, free.finish_reason) == ("stop", "length")
    assert np.array_equal(stopped.token_ids, free.token_ids[:end])
    assert np.array_equal(stopped.generator_logprobs, free.generator_logprobs[:end])


def test_end_of_sequence_counts_only_where_listed(engine: Engine) -> None:
    eos = models.TINY_NEMOTRON_H["eos_token_id"]
    rollouts = run(engine, [request(range(9), rollout_index=i, max_new_tokens=200) for i in range(32)])
    assert all(len(rollout.token_ids) == 200 for rollout in rollouts.values())
    assert any(eos in rollout.token_ids for rollout in rollouts.values())


def test_aborted_requests_vanish_and_others_keep_their_bits(engine: Engine, alone: dict[str, Rollout]) -> None:
    engine.add(REQUESTS[:3])
    assert engine.step() == []
    engine.abort([REQUESTS[1].request_id, "unknown"])
    kept = [REQUESTS[0].request_id, REQUESTS[2].request_id]
    assert list(engine._unfinished) == kept
    assert differences({key: alone[key] for key in kept}, run(engine, [])) == []


def test_rollouts_end_at_the_context(engine: Engine) -> None:
    rollout = run(engine, [request([7] * (MAX_MODEL_LEN - 4))])["0/p/0"]
    assert (len(rollout.token_ids), rollout.finish_reason) == (4, "length")
    with pytest.raises(ValueError, match=f"max_model_len={MAX_MODEL_LEN}"):
        engine.add([request([7] * MAX_MODEL_LEN)])
    assert engine.num_unfinished == 0


def test_a_request_id_is_unfinished_only_once(engine: Engine) -> None:
    with pytest.raises(ValueError, match="added twice"):
        engine.add([request([1, 2]), request([1, 2])])
    engine.add([request([1, 2])])
    with pytest.raises(ValueError, match="added twice"):
        engine.add([request([1, 2])])
    engine.abort(list(engine._unfinished))


def test_same_bits_when_a_new_version_finds_requests_running(engine: Engine, alone: dict[str, Rollout]) -> None:
    # The same weights again: what the running requests had cached is dropped and computed anew.
    engine.add(REQUESTS)
    early = [rollout for _ in range(5) for rollout in engine.step()]
    engine.set_weight_version(1)
    late = run(engine, [])
    assert early == [] and {(rollout.weight_version, rollout.num_weight_versions) for rollout in late.values()} == {
        (0, 2)
    }
    assert differences(alone, late) == []


def test_a_further_turn_goes_on_from_the_tokens_so_far(engine: Engine) -> None:
    from mrl.rollout.requests import turn_seed

    first_request = request([1, 2, 3], max_new_tokens=5)
    (first,) = run(engine, [first_request]).values()
    observed = np.array([65, 66], np.int32)
    earlier = replace(
        first,
        token_ids=np.concatenate([first.token_ids, observed]),
        generator_logprobs=np.concatenate([first.generator_logprobs, np.zeros(2, np.float32)]),
        tail_length=2,
    )
    second_request = replace(first_request, earlier=earlier)
    (rollout,) = run(engine, [second_request]).values()
    # The same as one long prompt, drawn with a seed of its own.
    plain = replace(first_request, token_ids=(1, 2, 3, *earlier.token_ids.tolist()), seed=turn_seed(second_request))
    (alone,) = run(engine, [plain]).values()
    assert plain.seed != first_request.seed
    assert rollout.request == first_request
    assert rollout.token_ids.tolist() == [*earlier.token_ids.tolist(), *alone.token_ids.tolist()]
    assert (
        rollout.generator_logprobs.tobytes()
        == np.concatenate([earlier.generator_logprobs, alone.generator_logprobs]).tobytes()
    )
    assert [(turn.start, turn.stop) for turn in rollout.turns] == [(0, 5), (7, 12)]
    assert rollout.num_weight_versions == 1


def test_same_bits_and_whole_routes_after_preemption(
    engine: Engine, start_engine: StartEngine, checkpoint: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = random_requests(32, lengths=(120, 120), max_new_tokens=24)
    reference = run(engine, requests)
    # Every request outgrows its first block of 128 tokens, and there are too few blocks for all.
    small = start_engine(0, keeps_routes=True, max_num_seqs=16, kv_cache_memory_mib=2)
    small.set_weight_version(0)
    scheduler = core_of(small).scheduler
    preempted, preempt = [], getattr(scheduler, "_preempt_request")  # noqa: B009  not in vLLM's interface
    monkeypatch.setattr(scheduler, "_preempt_request", lambda *a, **k: (preempted.append(a), preempt(*a, **k)))
    rollouts = run(small, requests)
    assert differences(reference, rollouts) == []
    assert preempted
    routes.assert_own_routes(transformers_model(checkpoint(0)), rollouts)


def test_same_bits_chunked(start_engine: StartEngine, alone: dict[str, Rollout]) -> None:
    # Prompts of up to 60 tokens in chunks of at most 11, some of them a single token.
    engine = start_engine(0, max_num_seqs=8, max_num_batched_tokens=11)
    engine.set_weight_version(0)
    assert differences(alone, run(engine, REQUESTS)) == []


def test_running_requests_may_keep_what_they_have_cached(
    start_engine: StartEngine, alone: dict[str, Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start_engine(0, keeps_kv_cache=True)
    engine.set_weight_version(0)
    preempted = []
    monkeypatch.setattr(core_of(engine).scheduler, "_preempt_request", lambda *a, **k: preempted.append(a))
    engine.add(REQUESTS[:12])
    engine.step()
    # The same weights again, so that the bits tell whether a new version disturbs what is under way.
    engine.set_weight_version(1)
    engine.step()
    engine.set_weight_version(2)
    engine.add(REQUESTS[12:])
    rollouts = run(engine, [])
    seen = {key: (rollout.weight_version, rollout.num_weight_versions) for key, rollout in rollouts.items()}
    assert seen == {one.request_id: (0, 3) if index < 12 else (2, 1) for index, one in enumerate(REQUESTS)}
    assert differences(alone, rollouts) == [] and not preempted


def test_stop_strings_may_be_special_tokens_and_padding_is_never_drawn(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    byte_tokenizer(4096).save_pretrained(tmp_path)
    reserved = 262  # <|reserved_0|>; the two tokens from 262 on are no text
    engine = start_engine(0, tokenizer=tmp_path, num_tokens=reserved)
    engine.set_weight_version(0)
    free = [rollout.token_ids.tolist() for rollout in run(engine, REQUESTS).values()]
    assert max(max(ids) for ids in free) < reserved
    # The likeliest special token that is drawn, and where a rollout first has it.
    stop, rollout_index = next(
        (token_id, index) for index, ids in enumerate(free) for token_id in ids if token_id >= 256
    )
    text = str(byte_tokenizer(4096).decode([stop]))
    one = REQUESTS[rollout_index]
    stopped = run(engine, [replace(one, sampling=replace(one.sampling, stop_strings=(text,)))])[one.request_id]
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids.tolist() == free[rollout_index][: free[rollout_index].index(stop) + 1]
    # The distribution is that of transformers over the tokens that are left.
    prompt, drawn = list(one.token_ids), free[rollout_index]
    with torch.inference_mode():
        logits = (
            models.nemotron_h(0)(input_ids=torch.tensor([[*prompt, *drawn]]))
            .logits[0, len(prompt) - 1 : -1, :reserved]
            .float()
        )
    expected = logits.log_softmax(dim=-1)[range(len(drawn)), drawn].numpy()
    np.testing.assert_allclose(run(engine, [one])[one.request_id].generator_logprobs, expected, atol=1e-4)


def test_logprobs_are_those_of_transformers(start_engine: StartEngine) -> None:
    parity = Parity()
    for seed in range(3):
        engine = start_engine(seed)
        engine.set_weight_version(0)
        oracle = models.nemotron_h(seed)
        for rollout in run(engine, random_requests(32, lengths=(3, 120), max_new_tokens=24, seed=seed)).values():
            parity.add(
                rollout.generator_logprobs, hf_scores(oracle, rollout.request.token_ids, rollout.token_ids.tolist())
            )
    print(parity)
    parity.check(min_tokens=2000)
