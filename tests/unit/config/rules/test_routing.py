# SPDX-License-Identifier: Apache-2.0
"""Routing keys: what the model has is accepted, and what would do nothing or something else is refused with a way out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from mrl.config.errors import Unchecked
from mrl.config.load import load_config
from mrl.config.rules.plausible import find_doubts
from tests.unit.config.problems import problems_of

MEGATRON = "policy.megatron_cfg"
DECODER = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
QWEN3_MOE = DECODER | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
QWEN3_MOE |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
LLAMA = DECODER | {"model_type": "llama"}


def found(*overrides: str) -> list[str]:
    return problems_of(*(f"{MEGATRON}.{override}" for override in overrides))


def use_model(folder: Path, config: Mapping[str, object]) -> None:
    (folder / "prepared/tiny/model/config.json").write_text(json.dumps(config))


GOOD = [
    # as grpo_nanov3.yaml has them
    [
        "freeze_moe_router=true",
        "moe_router_dtype=fp32",
        "moe_router_load_balancing_type=none",
        "moe_router_bias_update_rate=1e-3",
        "moe_permute_fusion=true",
        "moe_per_layer_logging=true",
        "moe_enable_deepep=false",
        "moe_token_dispatcher_type=alltoall",
        "moe_aux_loss_coeff=0.0",
        "moe_router_enable_expert_bias=true",
        "track_moe_metrics=true",
    ],
    ["moe_router_load_balancing_type=seq_aux_loss", "moe_aux_loss_coeff=1e-4"],
    ["moe_router_dtype=null", "moe_token_dispatcher_type=allgather", "moe_shared_expert_overlap=false"],
    ["moe_shared_expert_overlap=true"],
]
# As grpo-qwen3-235b-16n4g.yaml has it: the dispatcher alone decides.
FLEX = ["moe_token_dispatcher_type=flex", "moe_enable_deepep=false"]  # fmt: skip


@pytest.mark.parametrize("overrides", GOOD)
def test_routing_that_the_model_has(workplace: Path, overrides: list[str]):
    assert found(*overrides) == []


def test_defaults_fit_every_model(workplace: Path):
    for config in (QWEN3_MOE, LLAMA | {"num_key_value_heads": 2}):
        use_model(workplace, config)
        assert found("expert_model_parallel_size=1") == []


BAD = [
    # overrides, key=value, part of the way out
    (["moe_router_enable_expert_bias=false"], "moe_router_enable_expert_bias=false: the model's routers have a bias", "leave it out"),
    (["moe_aux_loss_coeff=0.01"], "moe_aux_loss_coeff=0.01", "set it to 0"),
    (["moe_aux_loss_coeff=-1"], "moe_aux_loss_coeff=-1", "at least 0"),
    (["moe_router_load_balancing_type=aux_loss"], "moe_router_load_balancing_type=aux_loss", "above 0"),
    (["moe_enable_deepep=true"], "moe_enable_deepep=true", "set it to false"),
    (FLEX, "moe_token_dispatcher_type=flex: DeepEP needs GPUs", "use alltoall"),
    (["moe_shared_expert_overlap=true", "moe_token_dispatcher_type=allgather"], "moe_shared_expert_overlap=true", "set it to false"),
    (
        [
            "moe_shared_expert_overlap=true",
            "activation_checkpointing=true",
            "recompute_granularity=selective",
            "recompute_modules=[shared_experts]",
        ],
        "moe_shared_expert_overlap=true: policy.megatron_cfg.recompute_modules",
        "set it to false",
    ),
]


@pytest.mark.parametrize(("overrides", "start", "way_out"), BAD)
def test_routing_that_would_not_be_what_it_says(workplace: Path, overrides: list[str], start: str, way_out: str):
    problem, *others = found(*overrides)
    assert problem.startswith(f"{MEGATRON}.{start}") and way_out in problem
    assert all(isinstance(other, Unchecked) for other in others)


def test_biases_have_no_effect_on_a_model_without(workplace: Path):
    """Megatron moves biases that a router has, and NeMo RL's own files ask for more."""
    use_model(workplace, QWEN3_MOE)
    overrides = ["expert_model_parallel_size=1", "moe_router_enable_expert_bias=true", "moe_router_bias_update_rate=1e-3"]
    assert found(*overrides) == []
    (doubt,) = find_doubts(load_config("grpo_tiny.yaml", [f"{MEGATRON}.{override}" for override in overrides]))
    names = "moe_router_enable_expert_bias, moe_router_bias_update_rate"
    assert doubt.endswith(f"the model has no biases of experts, so these have no effect: {names}; leave them out")
    assert find_doubts(load_config("grpo_tiny.yaml", [f"{MEGATRON}.moe_router_enable_expert_bias=false"])) == []


def test_keys_of_experts_have_no_effect_on_a_model_without(workplace: Path):
    """NeMo RL's sft.yaml and dpo.yaml set them for all models."""
    use_model(workplace, LLAMA)
    overrides = ["moe_router_load_balancing_type=aux_loss", "moe_router_bias_update_rate=1e-3", "moe_token_dispatcher_type=flex"]
    assert found("expert_model_parallel_size=1", *overrides) == []
    (doubt,) = find_doubts(load_config("grpo_tiny.yaml", [f"{MEGATRON}.{override}" for override in overrides]))
    names = ", ".join(override.partition("=")[0] for override in (overrides[0], overrides[1], overrides[2]))
    assert doubt.endswith(f"the model has no experts, so these have no effect: {names}; leave them out")


def test_deepep_on_gpus_needs_float32_weights_and_several_ranks(workplace: Path):
    deepep = ["moe_enable_deepep=true", "moe_token_dispatcher_type=flex"]

    def problems(*overrides: str) -> list[str]:
        keys = [f"{MEGATRON}.{override}" for override in (*deepep, *overrides)]
        return problems_of(*keys, "cluster.gpus_per_node=8")

    assert problems() == problems("moe_enable_deepep=false") == []
    assert "set it to fp32" in problems("moe_router_dtype=fp64")[0]
    assert "above 1" in problems("expert_model_parallel_size=1")[0]


def test_latent_experts_do_not_overlap(workplace: Path):
    path = workplace / "prepared/tiny/model/config.json"
    use_model(workplace, json.loads(path.read_text()) | {"moe_latent_size": 32})
    assert "latent" in found("moe_shared_expert_overlap=true")[0]
