# SPDX-License-Identifier: Apache-2.0
"""Speculation changes no bit of what is sampled: tokens, logprobs and their ends are those of an engine that proposes nothing."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from conversion.boxes import Slot
from conversion.families.common import VllmParallel
from mrl.types import Proposals, Rollout, RolloutRequest
from tests import models, routes
from tests.rollouts import StartEngine, differences, random_requests, request, run
from tests.stack.policy.layouts import transformers_model
from tests.stack.rollout.trainer import Trainer, refit

MTP = {"method": "mtp", "num_speculative_tokens": 3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
LONG = pytest.mark.long("speculation")
METHODS = [pytest.param(MTP, id="mtp"), pytest.param(NGRAM, id="ngram", marks=LONG)]


def crossed(whole: str, parts: tuple[str, int]) -> pytest.MarkDecorator:
    """Each method with steps that are large and small, under these names; half of the pairs in the long part."""
    small, tokens = parts
    pairs = [
        pytest.param(MTP, 2048, id=f"mtp-{whole}", marks=LONG),
        pytest.param(MTP, tokens, id=f"mtp-{small}"),
        pytest.param(NGRAM, 2048, id=f"ngram-{whole}"),
        pytest.param(NGRAM, tokens, id=f"ngram-{small}", marks=LONG),
    ]
    return pytest.mark.parametrize(("speculation", "chunk"), pairs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_foreseeing(tmp_path_factory.mktemp("mtp"))


def requests_of_all_kinds() -> list[RolloutRequest]:
    """Greedy ones, sampled ones, ones cut by top-k and top-p, ones that stop, and prompts that repeat themselves."""
    found = random_requests(12, max_new_tokens=40)
    found += [request([1, 2, 3, 4] * 8, prompt_id=f"again{i}", max_new_tokens=40) for i in range(4)]
    kinds = [
        dict(temperature=0.0),
        dict(temperature=1.0),
        dict(temperature=0.4),
        dict(top_k=5, top_p=0.9),
        dict(stop_token_ids=tuple(range(40))),
    ]
    return [
        dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, **kinds[index % len(kinds)])) for index, one in enumerate(found)
    ]


def sampled(
    engine_of: StartEngine, folder: Path, requests: Sequence[RolloutRequest], *, refits: bool = False, **settings: object
) -> dict[str, Rollout]:
    """The rollouts of an engine that gets some of the requests late; with `refits`, all are computed anew in the middle."""
    engine = engine_of(folder, **settings)
    engine.set_weight_version(0)
    engine.add(requests[:10])
    rollouts, step = {}, 0
    while engine.num_unfinished:
        if step == 4:
            engine.add(requests[10:])
        if refits and step in (7, 12):
            engine.set_weight_version(step)
        rollouts |= {one.request.request_id: one for one in engine.step()}
        step += 1
    return rollouts


def total(rollouts: dict[str, Rollout]) -> Proposals:
    found = Proposals()
    for rollout in rollouts.values():
        found = found.plus(rollout.proposals)
    return found


PLAIN: dict[bool, dict[str, Rollout]] = {}
"""Rollouts of an engine without proposals, with and without refits."""


def plain_rollouts(engine_of: StartEngine, folder: Path, requests: Sequence[RolloutRequest], *, refits: bool = False) -> dict[str, Rollout]:
    if refits not in PLAIN:
        PLAIN[refits] = sampled(engine_of, folder, requests, refits=refits)
    return PLAIN[refits]


@crossed("whole prompts", ("prompts in parts", 24))
def test_proposals_change_no_bit(start_engine: StartEngine, folder: Path, speculation: dict[str, object], chunk: int):
    requests = requests_of_all_kinds()
    plain = plain_rollouts(start_engine, folder, requests)
    speculated = sampled(start_engine, folder, requests, speculation=speculation, max_num_batched_tokens=chunk, max_num_seqs=16)
    assert differences(plain, speculated) == []
    assert total(plain) == Proposals()
    found = total(speculated)
    assert 0 < found.num_rounds <= found.num_tokens and found.num_accepted > 0.05 * found.num_tokens
    # A rollout has a token of every forward pass, and those that were accepted; its last round may have had more than its limit takes.
    assert found.num_accepted < sum(len(rollout.token_ids) for rollout in speculated.values())


@crossed("at once", ("in parts", 18))
def test_rollouts_that_are_computed_anew_keep_their_bits(
    start_engine: StartEngine, folder: Path, speculation: dict[str, object], chunk: int
):
    """In parts, requests end with a few tokens that look like proposals, and steps have no tokens left for some that run."""
    requests = requests_of_all_kinds()
    plain = plain_rollouts(start_engine, folder, requests, refits=True)
    speculated = sampled(
        start_engine, folder, requests, speculation=speculation, refits=True, max_num_batched_tokens=chunk, max_num_seqs=16
    )
    assert differences(plain, speculated) == []
    assert max(rollout.num_weight_versions for rollout in speculated.values()) == 3


def test_a_rollout_that_full_steps_leave_out_keeps_its_bits(start_engine: StartEngine, folder: Path):
    # Of few tokens, so that n-grams return: how many are proposed changes, and with it for how many rollouts a step has room.
    rng = random.Random(0)
    requests = [request(rng.choices(range(1, 4), k=20), prompt_id=f"p{i}", max_new_tokens=60) for i in range(14)]
    plain = sampled(start_engine, folder, requests, max_num_batched_tokens=16, max_num_seqs=16)
    speculation = NGRAM | dict(num_speculative_tokens=5)
    speculated = sampled(start_engine, folder, requests, speculation=speculation, max_num_batched_tokens=16, max_num_seqs=16)
    assert differences(plain, speculated) == []


@pytest.mark.parametrize("speculation", METHODS)
def test_routes_are_those_of_the_drawn_tokens(start_engine: StartEngine, folder: Path, speculation: dict[str, object]):
    settings = dict(keeps_routes=True, max_num_batched_tokens=64, max_num_seqs=16)
    requests = requests_of_all_kinds()
    plain = sampled(start_engine, folder, requests, refits=True, **settings)
    speculated = sampled(start_engine, folder, requests, refits=True, speculation=speculation, **settings)
    assert differences(plain, speculated) == [] and total(speculated).num_accepted < total(speculated).num_tokens
    for key, rollout in speculated.items():
        np.testing.assert_array_equal(rollout.routes, plain[key].routes)
    routes.assert_own_routes(transformers_model(folder), speculated)


@LONG
def test_a_request_samples_the_same_with_any_number_of_proposals(start_engine: StartEngine, folder: Path):
    requests = requests_of_all_kinds()
    first, second = (sampled(start_engine, folder, requests, speculation=MTP | dict(num_speculative_tokens=n)) for n in (1, 4))
    assert differences(first, second) == []
    assert total(second).num_accepted > total(first).num_accepted


def test_a_refit_writes_and_verifies_the_drafter(start_engine: StartEngine, folder: Path, tmp_path: Path):
    other = models.save_nemotron_h(tmp_path / "other", 1, num_nextn_predict_layers=1)
    requests = random_requests(8)
    wanted_engine = start_engine(other, speculation=MTP)
    wanted_engine.set_weight_version(0)
    wanted, wanted_digest = run(wanted_engine, requests), wanted_engine.live_digest()
    engine = start_engine(folder, speculation=MTP)
    before = engine.live_digest()
    assert Slot("drafter.model.layers.1.mixer.experts.routed_experts.w2_weight") in before[0]
    trainer = Trainer(folder, VllmParallel(has_drafter=True), live=engine.tensor_dtypes())
    engine.enter("load")
    engine.prepare_refit(trainer.workers())
    refit(engine, trainer, 0)
    # vLLM's own loader has written the same.
    assert engine.live_digest() == before
    trainer.load(other)
    refit(engine, trainer, 1)
    assert engine.live_digest() == wanted_digest
    assert differences(run(engine, requests), wanted) == []


@LONG
def test_layers_that_predict_well_are_accepted(start_engine: StartEngine, folder: Path, tmp_path: Path):
    blind = models.save_nemotron_h(tmp_path / "blind", 0, num_nextn_predict_layers=1)
    requests = random_requests(8, max_new_tokens=30)
    rates = []
    for model in (folder, blind):
        found = total(sampled(start_engine, model, requests, speculation=MTP))
        rates.append(found.num_accepted / found.num_tokens)
    assert rates[0] > 0.05 and rates[0] > 5 * rates[1], rates
