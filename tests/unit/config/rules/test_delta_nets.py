# SPDX-License-Identifier: Apache-2.0
"""Models with gated delta nets: what is not built for them is refused by name, on the file of Qwen3-Next-80B-A3B."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from conversion.families.registry import family
from conversion.files.hf_folder import read_config
from mrl.config.load import load_config
from mrl.config.model import sizes_of
from mrl.config.rules.checks import find_problems
from tests.sources import ROOT

FILE = ROOT / "scripts/bench/models/qwen3_next_80b_a3b.config.json"
MEGATRON, ENGINE, KWARGS = (
    "policy.megatron_cfg",
    "policy.generation.vllm_cfg",
    "policy.generation.vllm_kwargs",
)


@pytest.mark.parametrize(
    ("word", "key", "rule"),
    [
        (f"{MEGATRON}.context_parallel_size=2", "", "gated delta nets, whose state"),
        (f"{MEGATRON}.tensor_model_parallel_size=4", "", "at most as many parts as key-value heads, 2"),
        (f"{ENGINE}.tensor_parallel_size=32", "", "divide the model's 16 attention heads, 16 linear key heads"),
        ("policy.share_prefixes=true", "", "gated delta nets, which compute no trees"),
        (f"{MEGATRON}.fp8_cfg.enabled=true", "", "gated delta nets in FP8"),
        (
            f"++{KWARGS}.speculative_config={{method: ngram, num_speculative_tokens: 2}}",
            f"{KWARGS}.speculative_config",
            "speculation with gated delta nets",
        ),
    ],
)
def test_what_is_not_built_is_refused(tmp_path: Path, word: str, key: str, rule: str):
    shutil.copy(FILE, tmp_path / "config.json")
    config = load_config("grpo_qwen3_30ba3b.yaml", [f"policy.model_name={tmp_path}", word])
    found = [problem for problem in find_problems(config) if problem.key == (key or word.partition("=")[0])]
    assert any(rule in problem.rule for problem in found), found


def test_sizes_are_those_of_the_file_and_left_out_layers_have_their_name():
    hf_config = read_config(FILE)
    sizes = sizes_of(hf_config)
    assert sizes.layers == ("GE", "GE", "GE", "*E") * 12
    assert (sizes.num_parameters, sizes.mamba_projection) == (79_674_391_296, 12_352)
    names = ("mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate.weight")
    assert [family(hf_config).is_left_out(hf_config, name) for name in names] == [True, True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(linear_num_value_heads=24), "must be a multiple of linear_num_key_heads=16"),
        (dict(layer_types=["linear_attention"]), "must be a list with a name for each of 48 layers"),
        (dict(layer_types=["sliding_attention"] * 48), "only linear_attention and full_attention are supported"),
        (dict(attn_output_gate=False), "attn_output_gate=False is not supported"),
        (dict(output_gate_type="sigmoid"), "output_gate_type='sigmoid' is not supported"),
        (dict(tie_word_embeddings=True), "tie_word_embeddings=True is not supported"),
        (dict(linear_conv_kernel_dim=3), "linear_conv_kernel_dim=3 is not supported"),
        (dict(model_type="qwen3_5"), "model_type='qwen3_5' is a text model with a vision tower"),
        (dict(model_type="qwen3_5_moe_text", norm_topk_prob=False), "norm_topk_prob=False is not supported"),
    ],
)
def test_settings_that_the_tables_do_not_know_are_refused(change: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        sizes_of({**read_config(FILE), **change})
