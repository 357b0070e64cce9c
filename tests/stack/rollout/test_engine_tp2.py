"""An engine of two worker processes. Logprobs hold to the parity bound; bits are claimed for TP 1 only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mrl.refit.zero import digest
from tests import models
from tests.parity import Parity, hf_scores
from tests.rollouts import StartEngine, random_requests, run
from tests.stack.rollout.trainer import expected_tensors


def test_two_workers_hold_their_halves_and_sample(start_engine: StartEngine, checkpoint: Callable[[int], Path]) -> None:
    engine = start_engine(0, tensor_parallel_size=2)
    assert engine.live_digest() == [digest(expected_tensors(checkpoint(0), tp=2, worker=worker)) for worker in range(2)]
    engine.set_weight_version(0)
    parity, oracle = Parity(), models.nemotron_h(0)
    for rollout in run(engine, random_requests(16)).values():
        parity.add(rollout.generator_logprobs, hf_scores(oracle, rollout.request.token_ids, rollout.token_ids.tolist()))
    assert (parity.num_tokens, parity.num_wrong) == (256, 0)
