# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import json

import pytest
from transformers import AutoConfig

from conversion.families.common import VllmParallel
from conversion.families.registry import family
from mrl.config.errors import Problems
from mrl.config.fp8 import MX, form_of, input_widths, kept_layers, quantised_bytes
from mrl.config.load import load_config
from mrl.config.model import sizes_of
from mrl.config.rules.checks import find_problems
from mrl.config.rules.fp8 import check_blocks, check_training
from mrl.config.rules.plausible import find_doubts
from mrl.config.schema.generation import GenerationConfig, VllmConfig
from mrl.plan.facts import PlanModel
from tests.sources import ROOT

MEGATRON, ENGINE = "policy.megatron_cfg", "policy.generation.vllm_cfg"


def _qwen2() -> dict[str, object]:
    return AutoConfig.for_model("qwen2").to_dict()


def published(name: str) -> dict[str, object]:
    return json.loads((ROOT / "scripts/bench/models" / f"{name}.config.json").read_text())


@pytest.mark.parametrize("recipe, tokens", [("blockwise", 128), ("mxfp8", 32), ("tensorwise", 16)])
def test_each_rank_has_whole_blocks_of_tokens(recipe: str, tokens: int):
    sizes = {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": "true"}
    policy = load_config("grpo_tiny.yaml", [f"{MEGATRON}.{name}={size}" for name, size in sizes.items()]).policy
    policy.sequence_packing.sequence_length_round = policy.make_sequence_length_divisible_by = 1
    assert policy.row_multiple == 8
    policy.megatron_cfg.fp8_cfg.enabled = True
    policy.megatron_cfg.fp8_cfg.fp8_recipe = recipe  # type: ignore[assignment]  # a parameter of the test
    assert policy.row_multiple == tokens * 2 * 2


@pytest.mark.parametrize(
    "given, key",
    [(f"{ENGINE}.precision=fp8", f"{ENGINE}.precision"), (f"{MEGATRON}.fp8_cfg.enabled=true", f"{MEGATRON}.fp8_cfg")],
)
def test_a_run_without_importance_sampling_is_warned(given: str, key: str):
    for corrected in ("false", "true"):
        config = load_config("grpo_tiny.yaml", [given, f"loss_fn.use_importance_sampling_correction={corrected}"])
        warned = [doubt for doubt in find_doubts(config) if doubt.startswith(key)]
        assert bool(warned) == (corrected == "false")


def test_nemotrons_experts_are_no_whole_blocks():
    forms = {
        name: form_of(GenerationConfig(vllm_cfg=VllmConfig(precision="fp8")), sizes_of(published(name)))
        for name in ("nemotron3_nano_30b_a3b", "qwen3_30b_a3b")
    }
    assert forms == {"nemotron3_nano_30b_a3b": "fp8_per_channel", "qwen3_30b_a3b": "fp8_per_block"}
    # 768 over 4 workers are one and a half blocks.
    cut = GenerationConfig(vllm_cfg=VllmConfig(precision="fp8", tensor_parallel_size=4))
    assert form_of(cut, sizes_of(published("qwen3_30b_a3b"))) == "fp8_per_channel"


def test_scales_of_mxfp8_are_for_32_inputs():
    """vLLM refuses others in the first start on a GPU: 'MXFP8 requires input_size_per_partition to be divisible'."""
    sizes = sizes_of(published("qwen3_30b_a3b"))
    cut = GenerationConfig(vllm_cfg=VllmConfig(precision="fp8", is_mx=True, tensor_parallel_size=4))
    # 32 heads of 128 over 4 workers; no dense layers, and no shared expert.
    assert input_widths(4, sizes) == [2048, 0, 1024, 0, 0]
    assert form_of(cut, sizes) == MX
    config = load_config("grpo_tiny.yaml", [f"{ENGINE}.precision=fp8", f"{ENGINE}.is_mx=true"])
    odd = dataclasses.replace(sizes_of(published("nemotron3_nano_30b_a3b")), experts=0, shared_ffn=3_728)
    problems = Problems(config)
    check_blocks(config, odd, problems)
    (problem,) = problems.merged
    assert problem.key == f"{ENGINE}.is_mx" and "have [3728] inputs" in problem.rule


@pytest.mark.parametrize("recipe, multiple, odd", [("blockwise", 16, []), ("tensorwise", 16, []), ("mxfp8", 32, [112])])
def test_products_of_training_take_whole_groups_of_inputs(recipe: str, multiple: int, odd: list[int]):
    """896 inputs of Qwen2.5-0.5B over 8 ranks; Transformer Engine says it in the first step."""
    model = sizes_of(
        {**_qwen2(), "num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 896, "intermediate_size": 4096}
    )
    words = [f"{MEGATRON}.fp8_cfg.enabled=true", f"{MEGATRON}.fp8_cfg.fp8_recipe={recipe}"]
    config = load_config("grpo_tiny.yaml", [*words, f"{MEGATRON}.tensor_model_parallel_size=8"])
    problems = Problems(config)
    check_training(config, model, problems)
    rules = [problem.rule for first in problems.merged for problem in (first, *first.also)]
    said = f"linear layers of a rank have {odd} inputs, and {recipe} takes multiples of {multiple}"
    assert [rule for rule in rules if "inputs, and" in rule] == ([said] if odd else [])


def test_chosen_layers_stay_in_bfloat16():
    hf_config = published("qwen3_30b_a3b")
    vllm = VllmConfig(
        precision="fp8",
        num_first_layers_in_bf16=1,
        num_last_layers_in_bf16=2,
        quantization_ignored_layer_kws=["q_proj", "k_proj", "v_proj"],
    )
    generation, sizes = GenerationConfig(vllm_cfg=vllm), sizes_of(hf_config)
    kept, layout = (
        kept_layers(generation, sizes),
        family(hf_config).vllm_layout(hf_config, VllmParallel(), 0, "bfloat16"),
    )
    found = {
        slot.name.removeprefix("model.layers.")
        for slot, content in layout.items()
        if quantised_bytes(slot.name, content.shape, "fp8_per_block", kept) is not None
    }
    experts = ("mlp.experts.routed_experts.w13_weight", "mlp.experts.routed_experts.w2_weight")
    assert found == {f"{layer}.{name}" for layer in range(1, 46) for name in ("self_attn.o_proj.weight", *experts)}


def test_the_plan_counts_values_scales_and_the_largest_layer():
    model = PlanModel(published("qwen3_30b_a3b"))
    saved, largest = model.fp8_bytes(GenerationConfig(vllm_cfg=VllmConfig(precision="fp8")))
    experts, attention = 128 * 3 * 768 * 2048, 5120 * 2048 + 2048 * 4096
    assert largest == 2 * experts
    # A scale of 4 bytes for a block of 16,384 numbers.
    assert saved == 48 * (experts + attention) * (1 - 4 / 16384)


@pytest.mark.usefixtures("workplace")
def test_keys_of_fp8_say_nothing_without_it():
    """NeMo RL's files have them, null or not, beside `fp8_cfg.enabled=false`."""
    config = load_config("grpo_tiny.yaml")
    engine = ("num_first_layers_in_bf16", "num_last_layers_in_bf16", "use_deep_gemm")
    keys = [f"{MEGATRON}.fp8_cfg.{name}" for name in ("enabled", "fp8", "fp8_recipe", "fp8_param")]
    nulls = [f"{key}=null" for key in (*keys, *(f"{ENGINE}.{name}" for name in engine))]
    assert load_config("grpo_tiny.yaml", nulls).policy == config.policy
    given = [f"{MEGATRON}.first_last_layers_bf16=true", f"{MEGATRON}.num_layers_at_start_in_bf16=1"]
    assert find_problems(load_config("grpo_tiny.yaml", given)) == []


@pytest.mark.usefixtures("workplace")
def test_what_no_host_has_is_refused():
    from mrl.check import examine

    settings = {"enabled": "true", "fp8_recipe": "delayed", "fp8_param": "true"}
    given = [f"{MEGATRON}.fp8_cfg.{key}={value}" for key, value in settings.items()]
    given.append(f"{MEGATRON}.first_last_layers_bf16=true")
    said = " ".join(map(str, examine(ROOT / "configs/grpo_tiny.yaml", given).refused))
    layers = "with the first and last layers in bfloat16 is not built"
    for rule in (
        "only Transformer Engine computes in FP8",
        "the same weights give other logprobs",
        "want the weights as they are",
    ):
        assert rule in said
    assert layers in said
