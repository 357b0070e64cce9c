# SPDX-License-Identifier: Apache-2.0
"""Adapters that engines hold beside the weights: refits move them alone, and engines compute what PEFT does."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import openai
import pytest
import torch

from conversion.boxes import Slot
from mrl.cluster.verbs import EngineVerbs, PolicyVerbs
from mrl.config.load import load_config
from mrl.convert import main as convert
from mrl.loop.rollouts import prepare
from mrl.loop.run import Budget
from mrl.recipes import tokenizer
from mrl.refit.inputs import Part
from mrl.store.run_folder import RunFolder
from mrl.types import Rollout, RolloutRequest
from tests import models
from tests.drivers import do, opened, train_step
from tests.parity import Parity, hf_scores
from tests.rollouts import random_requests
from tests.stack.cluster.conftest import ray_nodes
from tests.stack.loop.conftest import DEADLINE_S, SMALL, LiveRun, toss_coins, write_inputs
from tests.stack.loop.test_refit import expect_refused, is_prevented_from_sampling, process_id, recover
from tests.stack.rollout.test_http import completion
from tests.waiting import HANG_S

ADAPTERS = [
    "policy.megatron_cfg.peft.enabled=true",
    "policy.megatron_cfg.peft.dim=4",
    "policy.megatron_cfg.peft.alpha=12",
    "policy.megatron_cfg.peft.merge=false",
]
DENSE = ["policy.megatron_cfg.expert_model_parallel_size=1", "policy.megatron_cfg.optimizer.lr=0.01"]


@contextmanager
def run_with_adapters(folder: Path, *further: str) -> Iterator[LiveRun]:
    """A run whose engines hold adapters, have two workers each, and answer over HTTP."""
    inputs = write_inputs(folder)
    tokenizer.save(models.save_model(folder / "qwen3", "qwen3", max_position_embeddings=2048), model_max_length=1280)
    (folder / "qwen3/generation_config.json").write_text((folder / "model/generation_config.json").read_text())
    overrides = [
        *inputs,
        f"policy.model_name={folder / 'qwen3'}",
        *SMALL,
        *DENSE,
        *ADAPTERS,
        "policy.generation.vllm_cfg.tensor_parallel_size=2",
        "policy.generation.vllm_cfg.expose_http_server=true",
        "checkpointing.save_period=1000",
        *further,
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MRL_CACHE", str(folder / "cache"))
        config = load_config("grpo_tiny.yaml", overrides)
        training = prepare(config)
        run_folder = RunFolder(training.config)
        run_folder.open()
        with run_folder, opened(training.open(run_folder, Budget(None, started=time.monotonic()))) as run:
            run.supplier.session.rewards.apply(toss_coins)
            yield LiveRun(run, do(run.resume(run_folder.newest_checkpoint())), config)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    """Four ranks (TP2 x DP2), and two engines."""
    with run_with_adapters(tmp_path_factory.mktemp("adapters"), "policy.generation.num_cpu_engines=2") as run:
        yield run


# Functions that run in an engine.


def sampled(engine, requests: Sequence[RolloutRequest]) -> dict[str, Rollout]:
    engine.add(requests)
    found = {}
    while engine.num_unfinished:
        found |= {rollout.request.request_id: rollout for rollout in engine.step()}
    return found


def adapter_digests(engine) -> list[list[int]]:
    """Checksums of all factors of each worker."""
    return engine.llm.collective_rpc(factor_digest)


def flip_adapter_byte(engine, name: str) -> None:
    engine.llm.collective_rpc(flip_after_pull, args=(name,))


# Functions that run in a worker of an engine.


def factor_digest(worker) -> list[int]:
    from mrl.refit.checksum import digest
    from mrl.rollout.held_adapters import adapter_tensors

    return list(digest(adapter_tensors(worker.get_model())).values())


def flip_after_pull(worker, name: str) -> None:
    """The next pull of adapters is followed by a flipped bit in the live factor."""
    puller = worker.sides["adapters"].puller
    pull = puller.pull

    def pull_and_flip(round_index: int) -> int:
        copied = pull(round_index)
        puller._live()[Slot(name)].view(-1).view(torch.uint8)[0] ^= 1
        puller.pull = pull
        return copied

    puller.pull = pull_and_flip


def test_refits_move_the_adapters_alone(live: LiveRun):
    moving = live.run.supplier.session.refit
    report = do(moving.run())
    live.state.weight_version = report.weight_version
    schedule = moving.moves["adapters"].schedule
    targets = [slot for slots in moving.slots.values() for slot in slots]
    assert len(targets) == 4
    assert report.verified_bytes == sum(schedule.class_of(target).written_bytes for target in targets)
    whole = sum(moving.schedule.class_of(target).written_bytes for target in targets)
    assert 0 < report.verified_bytes < whole / 2


def assert_engines_compute_what_peft_does(live: LiveRun, folder: Path) -> None:
    """Trains, and compares all engines, over HTTP too, with transformers and PEFT on the exported adapters."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, PreTrainedModel

    before = live.on_engines(adapter_digests)
    for _ in range(2):
        train_step(live.run, live.state)
    do(live.run.supplier.refit(live.state))
    assert live.on_engines(adapter_digests) != before
    live.run.saver.begin(live.state)
    live.run.saver.finish()
    step = live.run.folder.path / f"step_{live.state.step}"
    assert convert(["adapters", "--mcore", str(step), "--out", str(folder / "peft")]) == 0
    base = AutoModelForCausalLM.from_pretrained(live.config.policy.model_name, dtype=torch.float32)
    requests = random_requests(24)
    together = live.on_engines(sampled, requests)
    plain, parity, scores = Parity(), Parity(), {}
    for key, rollout in together[0].items():
        scores[key] = hf_scores(base, rollout.request.context_ids, rollout.token_ids.tolist())
    tuned = cast(PreTrainedModel, PeftModel.from_pretrained(base, folder / "peft").eval())
    for key, rollout in together[0].items():
        parity.add(
            rollout.generator_logprobs, hf_scores(tuned, rollout.request.context_ids, rollout.token_ids.tolist())
        )
        plain.add(rollout.generator_logprobs, scores[key])
    parity.check(min_tokens=300)
    assert plain.max_difference > 1e-3
    # Alone or together, on any engine, and over HTTP, a request gives the same bits.
    gateways = live.run.supplier.session.collector.gateways
    assert gateways is not None
    url = f"{gateways.urls[0]}/engines/0/v1"
    with openai.OpenAI(base_url=url, api_key=gateways.api_key, max_retries=0, timeout=HANG_S) as client:
        for one in requests[:4]:
            alone, *_ = live.on_engines(sampled, [one])
            (choice,) = completion(client, list(one.token_ids), seed=one.seed, max_tokens=16).choices
            for found in together:
                rollout = found[one.request_id]
                assert (alone[one.request_id].generator_logprobs == rollout.generator_logprobs).all()
                assert choice.token_ids == rollout.token_ids.tolist()
                assert choice.logprobs.token_logprobs == rollout.generator_logprobs.tolist()


def test_engines_compute_what_peft_does(live: LiveRun, tmp_path: Path):
    assert_engines_compute_what_peft_does(live, tmp_path)


@pytest.mark.long("nodes")
def test_an_engine_over_two_nodes_computes_what_peft_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nodes = ["cluster.num_nodes=2", "cluster.cpu_units_per_node=1"]
    with ray_nodes(tmp_path, monkeypatch, 1, 1), run_with_adapters(tmp_path, *nodes) as live:
        (slots,) = live.run.supplier.session.engines.placement.engines
        assert slots.parts(live.run.supplier.session.engines.placement.node_of) == [(0,), (1,)]
        assert_engines_compute_what_peft_does(live, tmp_path)


def test_a_flipped_byte_of_an_adapter_is_caught_by_name(live: LiveRun):
    slot = "model.layers.3.self_attn.qkv_proj.lora_b.1"
    live.on_engines(flip_adapter_byte, slot)
    assert "rank" in expect_refused(live, re.escape(slot))
    assert all(live.on_engines(is_prevented_from_sampling))
    recover(live)


def test_a_restarted_engine_gets_weights_and_adapters(live: LiveRun):
    session = live.run.supplier.session
    expected, base = live.on_engines(adapter_digests), session.engines.call(EngineVerbs.live_digest)
    moving, asked = session.refit, []
    run_rounds = moving._run_rounds

    def noted(engines: Sequence[int], part: Part):
        asked.append((part, list(engines)))
        return run_rounds(engines, part)

    moving._run_rounds = noted
    os.kill(live.on_engines(process_id)[1], signal.SIGKILL)
    do(live.run.supplier.refit(live.state))
    moving._run_rounds = run_rounds
    assert asked[-2:] == [("weights", [1]), ("adapters", [0, 1])]
    assert live.on_engines(adapter_digests) == expected
    assert session.engines.call(EngineVerbs.live_digest) == base
    train_step(live.run, live.state)


def test_adapters_do_not_move_above_other_weights(live: LiveRun):
    session, moving = live.run.supplier.session, live.run.supplier.session.refit
    live.on_ranks(lambda policy: policy.perturb(3))
    moving.attempt += 1
    with pytest.raises(RuntimeError, match="the weights below them have changed since the last"):
        session.policies.call(PolicyVerbs.refit, moving.attempt, (), 60.0, "adapters", deadline_s=DEADLINE_S)
    # All ranks have left, and a start sends the weights again.
    moving.moves["adapters"].address = None
    moving._held.clear()
    recover(live)
