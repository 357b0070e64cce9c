# SPDX-License-Identifier: Apache-2.0
"""Speculation changes no bit of what is sampled: tokens, logprobs and their ends are those of an engine without it."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from conversion.boxes import Slot
from conversion.families.common import VllmParallel
from mrl.types import Proposals, Rollout, RolloutRequest
from tests import models, routes
from tests.rollouts import StartEngine, differences, random_requests, request, run
from tests.stack.policy.layouts import transformers_model
from tests.stack.rollout.trainer import Trainer, refit

if TYPE_CHECKING:
    from mrl.rollout.engine import Engine

MTP = {"method": "mtp", "num_speculative_tokens": 3}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
LONG = pytest.mark.long("speculation")
METHODS = [
    pytest.param(MTP, 18, id="mtp-in parts"),
    pytest.param(MTP, 64, id="mtp-in large parts"),
    pytest.param(MTP, 2048, id="mtp-whole", marks=LONG),
    pytest.param(NGRAM, 18, id="ngram-in parts", marks=LONG),
    pytest.param(NGRAM, 2048, id="ngram-whole"),
]


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
        dataclasses.replace(one, sampling=dataclasses.replace(one.sampling, **kinds[index % len(kinds)]))
        for index, one in enumerate(found)
    ]


def crowd() -> list[RolloutRequest]:
    """Requests of few tokens, so n-grams return: the number proposed varies, and so how many rollouts fit a step."""
    rng = random.Random(0)
    return [request(rng.choices(range(1, 4), k=20), prompt_id=f"p{i}", max_new_tokens=60) for i in range(14)]


def sampled(engine: Engine, *, refits: bool = False) -> dict[str, Rollout]:
    """The rollouts of requests of all kinds, some late; with `refits`, all are computed anew in the middle."""
    requests = requests_of_all_kinds()
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


@pytest.fixture(scope="module")
def plain(start_engine: StartEngine, folder: Path) -> dict[str, dict[str, Rollout]]:
    """Rollouts of an engine without proposals."""
    engine = start_engine(folder, keeps_routes=True, max_num_seqs=16)
    return {"once": sampled(engine), "anew": sampled(engine, refits=True), "crowd": run(engine, crowd())}


@pytest.mark.parametrize(("speculation", "chunk"), METHODS)
def test_proposals_change_no_bit(
    start_engine: StartEngine,
    folder: Path,
    plain: dict[str, dict[str, Rollout]],
    speculation: dict[str, object],
    chunk: int,
):
    """In parts, recomputed requests end with a few proposal-like tokens, and steps lack tokens for some that run."""
    engine = start_engine(
        folder, keeps_routes=True, speculation=speculation, max_num_batched_tokens=chunk, max_num_seqs=16
    )
    for name in ("once", "anew"):
        speculated = sampled(engine, refits=name == "anew")
        assert differences(plain[name], speculated) == [] and total(plain[name]) == Proposals()
        found = total(speculated)
        assert (
            0 < found.num_rounds <= found.num_tokens and 0.05 * found.num_tokens < found.num_accepted < found.num_tokens
        )
        # A rollout has a token of every forward pass, and those that were accepted; its last round may have had more
        # than its limit takes.
        assert found.num_accepted < sum(len(rollout.token_ids) for rollout in speculated.values())
        # Routes are those of the drawn tokens.
        for key, rollout in speculated.items():
            np.testing.assert_array_equal(rollout.routes, plain[name][key].routes)
    assert max(rollout.num_weight_versions for rollout in speculated.values()) == 3
    routes.assert_own_routes(transformers_model(folder), speculated)


@pytest.mark.parametrize("speculation", [MTP, NGRAM], ids=["mtp", "ngram"])
def test_rollouts_that_are_broken_off_twice_are_those_of_an_unbroken_engine(
    start_engine: StartEngine, folder: Path, plain: dict[str, dict[str, Rollout]], speculation: dict[str, object]
):
    engine = start_engine(folder, keeps_routes=True, speculation=speculation, max_num_seqs=16)
    engine.set_weight_version(0)
    requests, found, lengths = requests_of_all_kinds(), dict[str, Rollout](), list[int]()
    for num_steps in (4, 5, 200):
        engine.add([one for one in requests if one.request_id not in found])
        for _ in range(num_steps):
            found |= {one.request.request_id: one for one in engine.step()}
        begun = {one.request.request_id: one for one in engine.unfinished()}
        assert begun.keys() == {one.request_id for one in requests} - found.keys()
        lengths.append(sum(len(one.token_ids) for one in begun.values()))
        engine.abort(list(begun))
        requests = [dataclasses.replace(one, earlier=begun.get(one.request_id)) for one in requests]
    assert lengths[0] > 0 < lengths[1] and lengths[2] == 0
    assert differences(plain["once"], found) == [] and total(found).num_accepted > 0


def test_a_rollout_that_full_steps_leave_out_keeps_its_bits(
    start_engine: StartEngine, folder: Path, plain: dict[str, dict[str, Rollout]]
):
    engine = start_engine(
        folder, speculation=NGRAM | dict(num_speculative_tokens=5), max_num_batched_tokens=16, max_num_seqs=16
    )
    engine.set_weight_version(0)
    assert differences(plain["crowd"], run(engine, crowd())) == []


@pytest.mark.parametrize("chunk", [16, 2048])
def test_n_grams_change_no_bit_of_attention_with_sinks_and_windows(
    start_engine: StartEngine, tmp_path: Path, chunk: int
):
    model, found = models.tiny_model("gpt_oss"), []
    # Layers that add little: a token mostly follows from the one before, and n-grams return.
    factors = {"o_proj.weight": 0.3, "down_proj": 0.3, "embed_tokens.weight": 10, "lm_head.weight": 10}
    for name, parameter in model.named_parameters():
        parameter.data *= next((factor for end, factor in factors.items() if name.endswith(end)), 1)
    model.save_pretrained(tmp_path)
    for speculation in (None, NGRAM):
        engine = start_engine(tmp_path, speculation=speculation, max_num_batched_tokens=chunk, max_num_seqs=16)
        engine.set_weight_version(0)
        found.append([run(engine, crowd()), run(engine, requests_of_all_kinds())])
    for plain, speculated in zip(*found, strict=True):
        assert differences(plain, speculated) == [] and total(speculated).num_accepted > 0


@LONG
def test_a_request_samples_the_same_with_any_number_of_proposals(start_engine: StartEngine, folder: Path):
    first, second = (sampled(start_engine(folder, speculation=MTP | dict(num_speculative_tokens=n))) for n in (1, 4))
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
    rates = []
    for model in (folder, blind):
        found = total(sampled(start_engine(model, speculation=MTP)))
        rates.append(found.num_accepted / found.num_tokens)
    assert rates[0] > 0.05 and rates[0] > 5 * rates[1], rates
