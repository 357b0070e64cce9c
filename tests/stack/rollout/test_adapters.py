# SPDX-License-Identifier: Apache-2.0
"""Adapters that an engine holds beside its weights: what it samples with them is what PEFT computes with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from conversion.adapters import HOLDING_FAMILIES, RANKS, HeldAdapters, adapted_layers, factor_names
from conversion.families.registry import family
from mrl.config.schema.generation import VllmConfig
from mrl.refit import RefitError
from mrl.rollout.held_adapters import check_experts, experts_are_shuffled_here
from tests import models
from tests.parity import Parity, hf_scores
from tests.rollouts import StartEngine, differences, random_requests, run
from tests.stack.rollout.trainer import TIMEOUT_S, Trainer
from tests.unit.conversion.lora_cases import ALPHA, DIM, export

REQUESTS = random_requests(24)


def exported(folder: Path, out: Path) -> tuple[HeldAdapters, dict[str, torch.Tensor]]:
    """Random adapters, written for PEFT; and their factors, with the scale in B."""
    hf_config = json.loads((folder / "config.json").read_text())
    targets = ("linear_qkv", "linear_proj") if hf_config["model_type"] == "qwen3_moe" else ()
    export(hf_config, load_file(folder / "model.safetensors"), out, targets=targets)
    layers = adapted_layers(family(hf_config), hf_config, target_modules=targets)
    values, factors = load_file(out / "adapter_model.safetensors"), {}
    for weight, names in factor_names(family(hf_config), hf_config, layers).items():
        module = f"base_model.model.{weight.removesuffix('.weight')}"
        for letter, name in zip("AB", names, strict=True):
            factors[name] = values[f"{module}.lora_{letter}.weight"] * (ALPHA / DIM if letter == "B" else 1.0)
    return HeldAdapters(layers, DIM), factors


def test_experts_that_flashinfer_would_shuffle_are_refused():
    held = {"moe_intermediate_size": 768}
    check_experts({}, VllmConfig())
    check_experts(held, VllmConfig(tensor_parallel_size=4))  # 192 a worker: vLLM takes Triton's
    for tp, ep in ((1, 1), (2, 1), (4, 4)):
        with pytest.raises(ValueError, match=r"peft.merge=false: .* FlashInfer, .* set it to true"):
            check_experts(held, VllmConfig(tensor_parallel_size=tp, expert_parallel_size=ep))
    assert not experts_are_shuffled_here()


@pytest.mark.parametrize("model_type", HOLDING_FAMILIES)
def test_samples_with_the_adapter_of_the_last_refit(start_engine: StartEngine, tmp_path: Path, model_type: str):
    folder = models.save_model(tmp_path / "model", model_type)
    held, factors = exported(folder, tmp_path / "peft")
    engine = start_engine(folder, adapters=held)
    weights = Trainer(folder, live=engine.tensor_dtypes())
    none = {name: torch.zeros_like(values) for name, values in factors.items()}
    trainer = Trainer(folder, live=engine.tensor_dtypes("adapters"), adapters=held, factors=none)
    engine.enter("load")
    before = engine.live_digest()
    for part in (weights, trainer):
        engine.prepare_refit(part.workers())
    engine.refit(weights.exchange(), True, TIMEOUT_S)
    with pytest.raises(RuntimeError, match="no refit was finished"):
        engine.serve(1)
    engine.refit(trainer.exchange(), True, TIMEOUT_S, "adapters")
    engine.serve(1)
    assert engine.live_digest() == before
    base = models.tiny_model(model_type)
    assert_computed_by(base, run(engine, REQUESTS))

    trainer = Trainer(folder, live=engine.tensor_dtypes("adapters"), adapters=held, factors=factors)
    engine.prepare_refit(trainer.workers())
    (report,) = engine.refit(trainer.exchange(), True, TIMEOUT_S, "adapters")
    engine.serve(2)
    assert report.num_bytes < report.total_bytes == report.num_bytes + report.padding_bytes
    together, alone = run(engine, REQUESTS), {}
    for one in REQUESTS:
        alone |= run(engine, [one])
    assert differences(alone, together) == []
    with pytest.raises(AssertionError):
        assert_computed_by(base, together)
    assert_computed_by(PeftModel.from_pretrained(base, tmp_path / "peft").eval(), together)

    puller = engine.llm.model_executor.driver_worker.worker.sides["adapters"].puller
    pull = puller.pull

    def pull_and_flip(round_index: int) -> int:
        copied = pull(round_index)
        next(iter(puller._live().values())).view(-1).view(torch.uint8)[0] ^= 1
        return copied

    puller.pull = pull_and_flip
    with pytest.raises(RefitError, match=r"qkv_proj\.lora_a\.0 box .* differs"):
        engine.refit(trainer.exchange(), True, TIMEOUT_S, "adapters")
    with pytest.raises(RuntimeError, match="is being refitted"):
        engine.step()


def assert_computed_by(model, rollouts) -> None:
    parity = Parity()
    for rollout in rollouts.values():
        scores = hf_scores(model, rollout.request.context_ids, rollout.token_ids.tolist())
        parity.add(rollout.generator_logprobs, scores)
    parity.check(min_tokens=300)


def test_the_ranks_are_vllms() -> None:
    from vllm.config.lora import MaxLoRARanks

    assert RANKS == tuple(rank for rank in get_args(MaxLoRARanks) if rank > 1)
