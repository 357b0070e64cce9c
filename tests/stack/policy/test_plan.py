# SPDX-License-Identifier: Apache-2.0
"""The plan's elements and bytes are those of real models and of real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conversion.families.registry import FAMILIES
from mrl.config.model import ModelSizes
from mrl.plan.activations import FP32, RECOMPUTED, Row, part_bytes
from mrl.plan.facts import PlanModel, read_model, state_rules
from mrl.plan.memory import stage_states
from mrl.policy.mamba_torch import MAX_CHUNK
from tests import models
from tests.sources import ROOT
from tests.stack.policy import critic_ranks, phase_ranks, policy_ranks
from tests.stack.policy.critic_ranks import ppo_config
from tests.stack.policy.policy_ranks import BF16
from tests.stack.ranks import RankPool
from tests.unit.plan.conftest import published

# As a run's, so that padding between tensors does not weigh.
WIDER: dict[str, Any] = dict(
    hidden_size=128, moe_intermediate_size=128, hybrid_override_pattern="MEM*EME-", num_hidden_layers=8
)
LAYOUTS = ("one", "dp2", "tp2 sp", "tp2 sp ep2 etp2", "tp2 sp dp2 ep2", "pp2 dp2 ep2", "tp2 sp pp2 ep2", "cp2 dp2 ep2")
CHANGES: dict[str, dict[str, object]] = {
    "gpt_oss": dict(num_local_experts=4, head_dim=64, intermediate_size=96, num_hidden_layers=2),
    "glm4_moe": dict(attention_bias=False, use_qk_norm=False, first_k_dense_replace=2, n_shared_experts=2),
    "llama": dict(num_key_value_heads=4, intermediate_size=96),
    "mixtral": dict(num_local_experts=4, hidden_size=96),
    "nemotron_h": dict(
        hybrid_override_pattern="M*-EME-M", num_hidden_layers=8, n_groups=4, ssm_state_size=32, vocab_size=300
    ),
    "qwen2": dict(tie_word_embeddings=True),
    "qwen2_moe": dict(mlp_only_layers=[], shared_expert_intermediate_size=32),
    "qwen3": dict(tie_word_embeddings=False, head_dim=64),
    "qwen3_moe": dict(mlp_only_layers=[1], decoder_sparse_step=1, num_experts=12),
    "qwen3_next": dict(layer_types=None, linear_num_value_heads=8, mlp_only_layers=[1], linear_value_head_dim=16),
    "qwen3_5_moe_text": dict(layer_types=None, linear_num_value_heads=8, shared_expert_intermediate_size=32),
    "qwen3_5_text": dict(layer_types=None, linear_key_head_dim=16, tie_word_embeddings=True),
    "deepseek_v3": dict(q_lora_rank=None, first_k_dense_replace=2, n_shared_experts=1),
}


def meta_elements(hf_config: dict[str, object]) -> int:
    """Elements of transformers' model, without memory, and of the router biases, which it keeps as buffers."""
    with torch.device("meta"):
        settings = {key: value for key, value in hf_config.items() if key != "model_type"}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(str(hf_config["model_type"]), **settings))
    buffers = sum(buffer.numel() for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
    return buffers + sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("is_changed", [False, True], ids=["tiny", "changed"])
def test_parameters_are_those_of_models_on_the_meta_device(name: str, is_changed: bool):
    hf_config = {"model_type": name, **models.TINY[name], **(CHANGES[name] if is_changed else {})}
    config = AutoConfig.for_model(**hf_config).to_dict()
    assert PlanModel(config).num_parameters == meta_elements(hf_config)


# mixtral's and qwen3_5_text's defaults are those of Mixtral-8x7B and Qwen3.5-9B.
PUBLISHED: dict[str, dict[str, object]] = published() | {
    name: AutoConfig.for_model(name).to_dict() for name in ("mixtral", "qwen3_5_text")
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models_are_those_on_the_meta_device(name: str):
    config = PUBLISHED[name] | {"num_nextn_predict_layers": 0}  # transformers has no such layers
    assert PlanModel(config).num_parameters == meta_elements(config)


def test_every_family_has_a_published_model():
    assert {config["model_type"] for config in PUBLISHED.values()} == set(FAMILIES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_of_ranks_are_as_planned(ranks: RankPool, tmp_path: Path, layout: str):
    folder = models.save_nemotron_h(tmp_path, **WIDER)
    config = policy_ranks.run_config(folder, layout, *BF16)
    model, world = read_model(config), policy_ranks.world_size(layout)
    config.cluster.cpu_units_per_node = world
    found = ranks.run(phase_ranks.trained_bytes, config, world_size=world)
    per_stage = world // config.policy.megatron_cfg.pipeline_model_parallel_size
    for rank, measured in enumerate(found):
        planned = stage_states(config, model, rank // per_stage)
        for name, size in zip(("weights", "gradients", "optimizer"), measured, strict=True):
            assert size == pytest.approx(getattr(planned, name), rel=0.02), (name, rank, state_rules(config))


@pytest.mark.parametrize("layout", ["one", "tp2 sp", "pp2 dp2 ep2"])
def test_states_of_a_critic_are_as_planned(ranks: RankPool, tmp_path: Path, layout: str):
    # Enough tokens for the output layer, which does not learn, to weigh.
    folder = models.save_nemotron_h(tmp_path, **WIDER, vocab_size=2048)
    words = ["value.precision=bfloat16", "value.megatron_cfg.optimizer.bf16=true"]
    world = policy_ranks.world_size(layout)
    config = ppo_config(folder, "one" if world == 1 else "dp2", layout, *words)
    config.cluster.cpu_units_per_node = world
    found = ranks.run(critic_ranks.trained_bytes, config, world_size=world)
    critic = read_model(config).beside["critic"]
    per_stage = world // config.value.megatron_cfg.pipeline_model_parallel_size
    for rank, measured in enumerate(found):
        planned = stage_states(config, critic, rank // per_stage, "critic")
        for name, size in zip(("weights", "gradients", "optimizer"), measured, strict=True):
            assert size == pytest.approx(getattr(planned, name), rel=0.02), (name, rank)


TOKENS = 4096
LONG = {
    "nemotron_h": dict(hybrid_override_pattern="MEMEM*EMEMEM*EME-EM*EM-E", num_hidden_layers=24),
    "qwen3_moe": dict(num_hidden_layers=24),
}
CALLED = {"nothing": (), "core_attn, moe": ("core_attn", "moe"), "all layers": ("full",)}
# What each recomputed module does not keep of `kept_by_torch`.
FREED = {"core_attn": ("*.padded",), "moe": ("E.routed", "E.gate")}


def kept_by_torch(shape: ModelSizes, letter: str) -> dict[str, int]:
    """Elements of a token that autograd keeps beyond Transformer Engine, where plain torch computes layer parts."""
    kept = {"norm": shape.hidden}
    if letter == "*":
        projected, core = (shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.heads * shape.head_dim
        # Padded sequences in and out of the attention; norms of heads and rotary positions, which hybrid models lack.
        return kept | {"padded": projected + 2 * core, "heads": 0 if shape.mamba_heads else 2 * projected}
    if letter == "-":
        return kept | {"gate": 2 * shape.ffn if shape.is_gated else 0}
    if letter == "E":
        return kept | {
            "routed": shape.topk * shape.hidden,
            "gate": 2 * shape.topk * shape.expert_ffn if shape.is_gated else 0,
        }
    states = (shape.mamba_heads + 2 * shape.mamba_groups) * shape.mamba_state
    steps = 9 * shape.mamba_inner + 2 * (shape.mamba_inner + 2 * shape.mamba_groups * shape.mamba_state)
    return kept | {"scan": steps + states, "decays": MAX_CHUNK * (2 * shape.mamba_heads + shape.mamba_groups)}


@pytest.mark.parametrize(
    "measured", json.loads((ROOT / "tests/stack/policy/recompute.json").read_text())["rows"], ids=str
)
def test_activations_are_those_that_ranks_without_gpus_keep(measured: dict[str, Any]):
    name, modules = measured["model"], CALLED[measured["recomputed"]]
    shape = PlanModel(AutoConfig.for_model(name, **{**models.TINY[name], **LONG[name]}).to_dict()).shape
    left_out = {tensor for module in modules for tensor in (*RECOMPUTED.get(module, ()), *FREED.get(module, ()))}

    def kept(layer: str, without: set[str]) -> float:
        total = 0.0
        for letter in layer:
            # The plan counts in bfloat16 all but what is float32 on GPUs, too.
            of_plan = {
                n: size * (1 if n in ("router", "softmax") else 2)
                for n, size in part_bytes(shape, letter, Row(tokens=TOKENS)).items()
            }
            of_torch = {f"torch {n}": FP32 * TOKENS * size for n, size in kept_by_torch(shape, letter).items()}
            total += sum(
                size
                for n, size in (of_plan | of_torch).items()
                if f"{letter}.{n.removeprefix('torch ')}" not in without
            )
        return total

    layers = {
        layer: FP32 * TOKENS * shape.hidden if "full" in modules else kept(layer, left_out)
        for layer in set(shape.layers)
    }
    again = max(kept(layer, set()) - layers[layer] for layer in layers) if modules else 0.0
    # Inputs of the final norm and of the output layer, and the probabilities.
    ends = FP32 * TOKENS * (2 * shape.hidden + shape.vocabulary)
    planned = sum(layers[layer] for layer in shape.layers) + again + ends
    assert planned / 1e6 == pytest.approx(measured["peak_mb"], rel=0.15)
