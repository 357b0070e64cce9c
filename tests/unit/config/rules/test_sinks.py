# SPDX-License-Identifier: Apache-2.0
"""Models with attention sinks: what is not built for them is refused by name, on the config.json of gpt-oss-20b."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mrl.config.load import load_config
from mrl.config.model import sizes_of
from mrl.config.rules.checks import find_problems
from tests.sources import ROOT

HUB = json.loads((ROOT / "scripts/bench/models/hub.json").read_text())
(OF_20B,) = [group["config"] for group in HUB if "openai/gpt-oss-20b" in group["ids"]]
MEGATRON, ENGINE = "policy.megatron_cfg", "policy.generation.vllm_cfg"


@pytest.mark.parametrize(
    ("word", "rule"),
    [
        (f"{MEGATRON}.context_parallel_size=2", "attention with sinks and windows over several ranks"),
        (f"{MEGATRON}.expert_tensor_parallel_size=2", "experts have biases, which Megatron adds on every rank"),
        (f"{MEGATRON}.peft.enabled=true", "adapters of models with attention sinks"),
        ("policy.share_prefixes=true", "attention sinks, with which attention computes no trees of prefixes"),
        (f"{MEGATRON}.fp8_cfg.enabled=true", "attention sinks in FP8 is not built"),
        (f"{ENGINE}.tensor_parallel_size=16", "gives each worker key-value heads of its own"),
        (f"{ENGINE}.precision=fp8", "loads no biases of experts that it rounds to FP8"),
    ],
)
def test_what_is_not_built_is_refused(tmp_path: Path, word: str, rule: str):
    (tmp_path / "config.json").write_text(json.dumps(OF_20B))
    config = load_config("grpo_qwen3_30ba3b.yaml", [f"policy.model_name={tmp_path}", word])
    found = [problem for problem in find_problems(config) if problem.key == word.partition("=")[0]]
    assert any(rule in problem.rule for problem in found), found


@pytest.mark.parametrize("method", ["eagle3", "mtp", "ngram"])
def test_drafters_with_weights_of_their_own_are_refused(tmp_path: Path, method: str):
    (tmp_path / "config.json").write_text(json.dumps(OF_20B))
    section = "policy.generation.vllm_kwargs.speculative_config"
    word = f"++{section}={{method: {method}, num_speculative_tokens: 2}}"
    config = load_config("grpo_qwen3_30ba3b.yaml", [f"policy.model_name={tmp_path}", word])
    found = [problem.key for problem in find_problems(config) if problem.key.startswith(section)]
    assert found == ([] if method == "ngram" else [f"{section}.method"])


def test_experts_that_workers_cannot_share_evenly_are_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(OF_20B | dict(num_local_experts=36)))
    key = f"{ENGINE}.expert_parallel_size"
    config = load_config("grpo_qwen3_30ba3b.yaml", [f"policy.model_name={tmp_path}", f"{key}=8"])
    found = [problem.rule for problem in find_problems(config) if problem.key == key]
    assert found == ["with sinks vLLM gives each worker equally many experts, and the model has 36"]


@pytest.mark.parametrize(
    ("config_json", "weights"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, "_blocks"),
        ({}, "_blocks"),
        # Plain numbers beside a config.json by which vLLM makes MXFP4 of them.
        ({"quantization_config": {"quant_method": "mxfp4"}}, ""),
    ],
)
def test_experts_in_mxfp4_are_refused_with_the_way_to_plain_ones(
    tmp_path: Path, config_json: dict[str, object], weights: str
):
    (tmp_path / "config.json").write_text(json.dumps(OF_20B | config_json))
    stored = torch.zeros(2, 4, 1, 16, dtype=torch.uint8) if weights else torch.zeros(2, 4, 16, dtype=torch.bfloat16)
    save_file({f"model.layers.0.mlp.experts.down_proj{weights}": stored}, tmp_path / "model.safetensors")
    config = load_config("grpo_qwen3_30ba3b.yaml", [f"policy.model_name={tmp_path}"])
    (found,) = [problem for problem in find_problems(config) if "MXFP4" in problem.rule and "engines" in problem.rule]
    assert found.key == "policy.model_name" and "hf-to-mcore, then mcore-to-hf" in found.way_out


def test_sizes_have_the_window():
    sizes = sizes_of(OF_20B)
    assert (sizes.window, sizes.layers, sizes.num_parameters) == (128, ("*E",) * 24, 20_914_757_184)
