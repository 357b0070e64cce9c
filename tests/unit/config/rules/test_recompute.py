# SPDX-License-Identifier: Apache-2.0
"""Parts that selective recomputation names must be parts of the model; virtual stages must divide its stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.config.problems import problems_of as found

MEGATRON = "policy.megatron_cfg"
SELECTIVE = [f"{MEGATRON}.activation_checkpointing=true", f"{MEGATRON}.recompute_granularity=selective"]
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}


def use_qwen3_moe(workplace: Path, **changes: object) -> None:
    (workplace / "prepared/tiny/model/config.json").write_text(json.dumps(QWEN3_MOE | changes))


def modules(*names: str) -> str:
    return f"{MEGATRON}.recompute_modules=[{','.join(names)}]"


def test_every_part_of_a_hybrid_model_may_be_recomputed(workplace: Path):
    # The laptop's model has no dense MLP.
    assert found(*SELECTIVE) == []
    assert found(*SELECTIVE, modules("core_attn", "layernorm", "moe", "shared_experts")) == []
    assert found(*SELECTIVE, modules("moe_act"), "cluster.gpus_per_node=8") == []


@pytest.mark.parametrize(
    ("names", "rule"),
    [
        ([], "it names nothing"),
        (["moe", "mamba"], "'mamba' is nothing that Megatron recomputes"),
        (["mla_up_proj"], "'mla_up_proj' is nothing that Megatron recomputes"),
        (["mlp"], "the model has no dense MLP layers"),
        (["moe_act"], "Transformer Engine's experts"),
    ],
)
def test_parts_that_would_be_ignored_are_named(workplace: Path, names: list[str], rule: str):
    (problem,) = found(*SELECTIVE, modules(*names))
    assert problem.startswith(f"{MEGATRON}.recompute_modules={names}: ") and rule in problem


def test_parts_of_transformers(workplace: Path):
    use_qwen3_moe(workplace)
    assert found(*SELECTIVE, modules("moe")) == []
    (problem,) = found(*SELECTIVE, modules("moe", "shared_experts"))
    assert "the model has no shared experts, which 'shared_experts' recomputes; leave it out" in problem
    use_qwen3_moe(workplace, mlp_only_layers=[0])
    assert found(*SELECTIVE, modules("moe", "mlp")) == []


def test_full_recomputation_names_no_parts(workplace: Path):
    (problem,) = found(f"{MEGATRON}.activation_checkpointing=true", modules("moe"))
    assert "recompute_granularity=full" in problem


PIPELINE = [f"{MEGATRON}.{name}" for name in ("pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size={}")]


@pytest.mark.parametrize(
    ("num_chunks", "others", "rule"),
    [
        (3, [], "does not divide the layers of each stage [4, 4]"),
        (2, [f"{MEGATRON}.num_layers_in_first_pipeline_stage=3"], "does not divide the layers of each stage [3, 5]"),
        (2, [f"{MEGATRON}.num_layers_in_first_pipeline_stage=2", f"{MEGATRON}.num_layers_in_last_pipeline_stage=6"], "a third stage"),
        (2, [f"{MEGATRON}.pipeline_model_parallel_size=1"], "needs pipeline_model_parallel_size of at least 2"),
    ],
)
def test_virtual_stages_that_do_not_fit(workplace: Path, num_chunks: int, others: list[str], rule: str):
    use_qwen3_moe(workplace)
    pipeline = [item.format(num_chunks) for item in PIPELINE]
    (problem,) = found(*pipeline, *others)
    assert problem.startswith(f"{MEGATRON}.virtual_pipeline_model_parallel_size={num_chunks}: ") and rule in problem


def test_virtual_stages_that_fit(workplace: Path):
    use_qwen3_moe(workplace)
    assert found(*[item.format(4) for item in PIPELINE]) == []
    assert found(*[item.format(2) for item in PIPELINE], f"{MEGATRON}.num_layers_in_first_pipeline_stage=6") == []
    assert found(f"{MEGATRON}.virtual_pipeline_model_parallel_size=1") == []


def test_hybrid_models_have_no_virtual_stages(workplace: Path):
    (problem,) = found(*[item.format(2) for item in PIPELINE], f"{MEGATRON}.num_layers_in_first_pipeline_stage=3")
    assert "Megatron's hybrid models have no virtual stages; set it to null" in problem
