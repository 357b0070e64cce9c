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
        (["method: ngram, num_speculative_tokens: 1", "policy.router_replay.enabled=true"], SPECULATE, "router_replay.enabled=false"),
    ],
)
def test_what_cannot_be_speculated_with_is_refused(workplace: Path, overrides: list[str], key: str, part: str):
    first, *others = overrides
    assert [p for p in problems_of(f"{SPECULATE}={{{first}}}", *others) if p.startswith(key) and part in p]


def test_a_model_with_layers_of_multi_token_prediction_proposes_for_itself(workplace: Path):
    (path,) = workplace.rglob("config.json")
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert problems_of(f"{SPECULATE}={{method: mtp, num_speculative_tokens: 3}}") == []
    path.write_text(json.dumps(config | {"num_nextn_predict_layers": 2}))
    assert any(
        "vLLM's drafter has 1; use ngram" in problem for problem in problems_of(f"{SPECULATE}={{method: mtp, num_speculative_tokens: 2}}")
    )
