# SPDX-License-Identifier: Apache-2.0
"""Rules of speculation, on the tiny model with and without layers of multi-token prediction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.config.problems import problems_of

SPECULATE = "policy.generation.vllm_kwargs.speculative_config"


@pytest.mark.parametrize(
    ("overrides", "key", "part"),
    [
        (["method: eagle3, num_speculative_tokens: 2"], f"{SPECULATE}.method=eagle3", "use method mtp or ngram"),
        (["num_speculative_tokens: 2"], SPECULATE, "use method mtp or ngram"),
        (["method: ngram, num_speculative_token: 1"], f"{SPECULATE}.num_speculative_token=1: no argument", "is num_speculative_tokens"),
        (["method: ngram, num_speculative_tokens: few"], f"{SPECULATE}.num_speculative_tokens=few: not a value", "whole number"),
        (["method: ngram, num_speculative_tokens: 1, model: m"], f"{SPECULATE}.model=m: a refit brings", "remove the key"),
        (["method: ngram, rejection_sample_method: synthetic"], f"{SPECULATE}.rejection_sample_method=synthetic: ", "remove the key"),
        (["method: ngram"], SPECULATE, "set num_speculative_tokens, for example to 1"),
        (["method: mtp, num_speculative_tokens: 1"], f"{SPECULATE}.method=mtp", "the model's num_nextn_predict_layers is 0"),
    ],
)
def test_what_cannot_be_speculated_with_is_refused(workplace: Path, overrides: list[str], key: str, part: str):
    first, *others = overrides
    assert [p for p in problems_of(f"{SPECULATE}={{{first}}}", *others) if p.startswith(key) and part in p]


MEGATRON = "policy.megatron_cfg"
LAYERS, REPEATS = f"{MEGATRON}.mtp_num_layers", f"{MEGATRON}.mtp_use_repeated_layer"


@pytest.mark.parametrize(
    ("num_steps", "overrides", "key", "part"),
    [
        (0, [f"{LAYERS}=1"], f"{LAYERS}=1", "the model has no MTP layers (num_nextn_predict_layers of its config.json); set it to 0"),
        (2, [f"{LAYERS}=1"], f"{LAYERS}=1", "the model has MTP layers for 2 tokens"),
        (1, [f"{LAYERS}=5"], f"{LAYERS}=5", f"set it to 1, or {REPEATS} to true"),
        (2, [f"{LAYERS}=5", f"{REPEATS}=true"], f"{REPEATS}=true", f"set it to false, and {LAYERS} to 2"),
        (1, [f"{LAYERS}=1", f"{MEGATRON}.peft.enabled=true"], f"{LAYERS}=1", "or train without adapters"),
        (1, [f"{LAYERS}=1", "algorithm=rm"], f"{LAYERS}=1", "a reward model predicts no tokens"),
        (1, [f"{LAYERS}=-1"], f"{LAYERS}=-1", "at least 0"),
    ],
)
def test_layers_that_cannot_learn_are_refused(workplace: Path, num_steps: int, overrides: list[str], key: str, part: str):
    with_mtp(workplace, num_steps)
    assert [p for p in problems_of(*overrides) if p.startswith(key) and part in p], problems_of(*overrides)


def test_layers_learn_or_are_left_alone(workplace: Path):
    with_mtp(workplace, 1)
    factor = f"{MEGATRON}.mtp_loss_scaling_factor"
    assert problems_of(f"{LAYERS}=1") == problems_of(f"{LAYERS}=5", f"{REPEATS}=true", f"{MEGATRON}.mtp_detach_heads=true") == []
    with_mtp(workplace, 0)
    # Nothing is trained, so that the rest says nothing.
    assert problems_of(f"{LAYERS}=5", f"{factor}=0.0", f"{REPEATS}=true") == problems_of(f"{LAYERS}=0", f"{factor}=0.3") == []


def with_mtp(workplace: Path, num_steps: int) -> None:
    (path,) = workplace.rglob("config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": num_steps}))


def test_a_model_with_layers_of_multi_token_prediction_proposes_for_itself(workplace: Path):
    with_mtp(workplace, 1)
    assert problems_of(f"{SPECULATE}={{method: mtp, num_speculative_tokens: 3}}", "policy.router_replay.enabled=true") == []
    with_mtp(workplace, 2)
    assert any(
        "vLLM's drafter has 1; use ngram" in problem for problem in problems_of(f"{SPECULATE}={{method: mtp, num_speculative_tokens: 2}}")
    )
