# SPDX-License-Identifier: Apache-2.0
"""Routing keys: what the model has is accepted, what would do nothing or something else is refused with a way out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from mrl.config.load import load_config
from mrl.config.rules.plausible import find_doubts
from tests.tiny import TINY
from tests.unit.config.problems import problems_of

MEGATRON = "policy.megatron_cfg"
QWEN3_MOE, LLAMA = ({"model_type": name, **TINY[name], "rope_theta": 1e4} for name in ("qwen3_moe", "llama"))


def found(*overrides: str) -> list[str]:
    return problems_of(*(f"{MEGATRON}.{override}" for override in overrides))


def use_model(folder: Path, config: Mapping[str, object]) -> None:
    (folder / "prepared/tiny/model/config.json").write_text(json.dumps(config))


def test_defaults_fit_every_model(workplace: Path):
    for config in (QWEN3_MOE, LLAMA | {"num_key_value_heads": 2}):
        use_model(workplace, config)
        assert found("expert_model_parallel_size=1") == []


def test_biases_have_no_effect_on_a_model_without(workplace: Path):
    """Megatron moves biases that a router has, and NeMo RL's own files ask for more."""
    use_model(workplace, QWEN3_MOE)
    overrides = [
        "expert_model_parallel_size=1",
        "moe_router_enable_expert_bias=true",
        "moe_router_bias_update_rate=1e-3",
    ]
    assert found(*overrides) == []
    (doubt,) = find_doubts(load_config("grpo_tiny.yaml", [f"{MEGATRON}.{override}" for override in overrides]))
    names = "moe_router_enable_expert_bias, moe_router_bias_update_rate"
    assert doubt.endswith(f"the model has no biases of experts, so these have no effect: {names}; leave them out")
    assert find_doubts(load_config("grpo_tiny.yaml", [f"{MEGATRON}.moe_router_enable_expert_bias=false"])) == []


def test_keys_of_experts_have_no_effect_on_a_model_without(workplace: Path):
    """NeMo RL's sft.yaml and dpo.yaml set them for all models."""
    use_model(workplace, LLAMA)
    overrides = [
        "moe_router_load_balancing_type=aux_loss",
        "moe_router_bias_update_rate=1e-3",
        "moe_token_dispatcher_type=flex",
    ]
    assert found("expert_model_parallel_size=1", *overrides) == []
    (doubt,) = find_doubts(load_config("grpo_tiny.yaml", [f"{MEGATRON}.{override}" for override in overrides]))
    names = ", ".join(override.partition("=")[0] for override in (overrides[0], overrides[1], overrides[2]))
    assert doubt.endswith(f"the model has no experts, so these have no effect: {names}; leave them out")


def test_deepep_on_gpus_needs_several_ranks(workplace: Path):
    deepep = ["moe_enable_deepep=true", "moe_token_dispatcher_type=flex"]

    def problems(*overrides: str) -> list[str]:
        keys = [f"{MEGATRON}.{override}" for override in (*deepep, *overrides)]
        return problems_of(*keys, "cluster.gpus_per_node=8")

    assert problems() == problems("moe_enable_deepep=false") == problems("moe_router_dtype=fp64") == []
    assert "above 1" in problems("expert_model_parallel_size=1")[0]


def test_hybridep_takes_equal_whole_chunks_of_tokens_from_each_rank(workplace: Path):
    """Its kernels take 128 tokens of a rank at a time, and the ranks of a group of experts exchange equal numbers."""
    hybridep = ["moe_flex_dispatcher_backend=hybridep", "moe_token_dispatcher_type=flex", "moe_router_dtype=fp32"]
    keys = [f"{MEGATRON}.{override}" for override in hybridep]

    def problems(*overrides: str) -> list[str]:
        return problems_of(*keys, *(f"{MEGATRON}.{override}" for override in overrides), "cluster.gpus_per_node=8")

    assert problems() == problems("hybridep_num_ranks_per_nvlink_domain=2", "hybridep_use_mnnvl=true") == []
    assert problems("moe_router_dtype=fp64") == []
    assert "above 1" in problems("expert_model_parallel_size=1")[0]
    assert "another library; set it to false" in problems("moe_enable_deepep=true")[0]
    assert "set it to deepep or hybridep" in problems("moe_flex_dispatcher_backend=alltoall")[0]
    assert "does not divide the 2 ranks" in problems("hybridep_num_ranks_per_nvlink_domain=3")[0]
    plain = load_config("grpo_tiny.yaml", ["policy.make_sequence_length_divisible_by=12"]).policy
    sizes = ["tensor_model_parallel_size=2", "context_parallel_size=4", "sequence_parallel=true"]
    overrides = [*keys, *(f"{MEGATRON}.{size}" for size in sizes), "policy.make_sequence_length_divisible_by=12"]
    policy = load_config("grpo_tiny.yaml", overrides).policy
    assert plain.row_multiple % 128 and policy.row_multiple % (128 * 2 * 4) == policy.row_multiple % 12 == 0
