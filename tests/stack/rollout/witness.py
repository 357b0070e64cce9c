# SPDX-License-Identifier: Apache-2.0
"""The witness: a real engine, loaded by vLLM's own loader, before and after refits by the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from conversion.boxes import Slot
from conversion.families.common import VllmParallel
from conversion.families.registry import FAMILIES
from mrl.refit.checksum import digest
from mrl.types import RolloutRequest
from tests import models
from tests.parity import Parity, hf_scores
from tests.rollouts import StartEngine, differences, run
from tests.stack.rollout.set_ranks import WITH_EXPERTS
from tests.stack.rollout.trainer import SINGLE, Trainer, expected_tensors, refit

GENERATING = tuple(FAMILIES)
TP2, EP2, PP2, GROUPS = VllmParallel(tp=2), VllmParallel(tp=2, ep=2), VllmParallel(pp=2), VllmParallel(ep=2)
MATRIX = [
    (name, layout)
    for name in GENERATING
    for layout in (SINGLE, TP2, EP2, GROUPS)
    if layout.ep == 1 or name in WITH_EXPERTS
]
# The hybrid model's second stage would have no attention.
MATRIX += [(name, PP2) for name in GENERATING if name != "nemotron_h"] + [("qwen3", VllmParallel(tp=2, pp=2))]
"""Every family with every layout of engines that two cores can run."""
_TURNS = {name: (TP2, EP2, GROUPS, PP2) if name in WITH_EXPERTS else (TP2, PP2) for name in GENERATING}
RECORDED = [(name, SINGLE) for name in GENERATING] + [
    (name, _TURNS[name][index % len(_TURNS[name])] if name != "nemotron_h" else EP2)
    for index, name in enumerate(GENERATING)
]
"""Rows of the table: every family on one worker, and on two in one of the layouts."""

# Prompts of the tests are shorter, all of them together are longer.
CHUNK_TOKENS = 128
NUM_ALONE = 3
# The embedding of a padding token is zero, and so are all logits of a router behind a delta net that reads it first.
NO_PADDING: Mapping[str, object] = {"pad_token_id": None}


@dataclass(frozen=True)
class Witness:
    """Observations. `witness` has asserted all that is not here."""

    num_tensors: int
    changed_by_zero: list[str]
    """Tensors on which the tables and vLLM's loader disagree."""
    num_bytes: int
    """Bytes of all workers, without padding."""
    parity: Parity
    """Parity of the engine, after a refit of other weights, with transformers on those weights."""


def witness(
    start_engine: StartEngine, folder: Path, model_type: str, parallel: VllmParallel, requests: Sequence[RolloutRequest]
) -> Witness:
    """Starts an engine, and refits it twice: with the weights it loaded, which must change no byte, and with others.

    The second refit changes every tensor, to what the tables make of the other checkpoint. Then requests have the same
    bits alone as in a full batch in which prompts are cut into chunks; this is claimed without tensor parallelism only.
    """
    loaded, other = (models.save_model(folder / str(seed), model_type, seed, **NO_PADDING) for seed in range(2))
    layout = dict(
        tensor_parallel_size=parallel.tp, expert_parallel_size=parallel.ep, pipeline_parallel_size=parallel.pp
    )
    engine = start_engine(loaded, max_num_batched_tokens=CHUNK_TOKENS, **layout)
    trainer = Trainer(loaded, parallel)
    before = engine.live_digest()
    engine.enter("load")
    engine.prepare_refit(trainer.workers())
    refit(engine, trainer, version=1)
    zero = engine.live_digest()
    trainer.load(other)
    refit(engine, trainer, version=2)
    after = engine.live_digest()
    first, wanted = (
        [digest(expected_tensors(model, parallel, worker)) for worker in range(parallel.num_workers)]
        for model in (loaded, other)
    )
    # A bias that one worker adds is zero on the others.
    assert after == wanted and sorted(_changed(zero, after)) == sorted(_changed(first, wanted))
    rollouts = run(engine, requests)
    if parallel.tp == 1:
        alone = {key: rollout for request in requests[:NUM_ALONE] for key, rollout in run(engine, [request]).items()}
        assert differences(alone, {key: rollouts[key] for key in alone}) == []
    parity, oracle = Parity(), models.tiny_model(model_type, 1, **NO_PADDING)
    for rollout in rollouts.values():
        parity.add(rollout.generator_logprobs, hf_scores(oracle, rollout.request.token_ids, rollout.token_ids.tolist()))
    num_bytes = sum(trainer.schedule.class_of(worker).written_bytes for worker in range(parallel.num_workers))
    return Witness(sum(map(len, after)), _changed(before, zero), num_bytes, parity)


def _changed(before: Sequence[Mapping[Slot, int]], after: Sequence[Mapping[Slot, int]]) -> list[str]:
    return [str(slot) for old, new in zip(before, after, strict=True) for slot in old if old[slot] != new[slot]]
