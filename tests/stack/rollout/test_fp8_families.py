# SPDX-License-Identifier: Apache-2.0
"""FP8 tensors of every family, as vLLM's own models and loader make them for a worker, against the plan's rule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from conversion.boxes import Slot
from conversion.families.common import VllmParallel
from conversion.families.registry import FAMILIES, family
from conversion.tensors import dtype_name
from mrl.config.fp8 import MX, form_of, has_whole_blocks, kept_layers, quantised_bytes
from mrl.config.model import sizes_of
from mrl.config.schema.generation import GenerationConfig, VllmConfig
from mrl.refit.staging import completed_rounds, plan_turns
from tests import models
from tests.reading import read_layout
from tests.rehearsal.capabilities import prepared
from tests.sources import ROOT
from tests.stack.rollout.set_ranks import CASES, WITH_EXPERTS, differences, fp8_model, load

SCALES = {"fp8_per_block": "_scale_inv", "fp8_per_channel": "_scale", "fp8_per_tensor": "_scale", MX: "_scale"}
# Workers agree on other scales by messages, which a worker alone cannot send.
LAYOUTS = [
    *((form, VllmParallel()) for form in SCALES),
    *((form, VllmParallel(tp=2)) for form in ("fp8_per_block", MX)),
    *((form, VllmParallel(tp=2, ep=2)) for form in ("fp8_per_block", MX)),
]
# Experts whose halves are whole blocks; ranks that 32 divides.
WIDE: dict[str, dict[str, object]] = {
    **dict.fromkeys(("gpt_oss", "mixtral"), dict(hidden_size=256, intermediate_size=256)),
    "deepseek_v3": dict(hidden_size=256, moe_intermediate_size=256, q_lora_rank=64),
    "qwen2": dict(hidden_size=256),
    **dict.fromkeys(
        ("qwen2_moe", "qwen3_5_moe_text", "qwen3_next"),
        dict(hidden_size=256, moe_intermediate_size=256, shared_expert_intermediate_size=128),
    ),
    "llama": {},
    "qwen3": {},
}


REFUSED = ("gpt_oss",)
"""`check_blocks` refuses FP8 in engines of these families."""


@pytest.mark.parametrize("case", [case for case in CASES if "tied" not in case and case not in REFUSED])
def test_the_rule_names_what_vllm_quantises(case: str, tmp_path: Path) -> None:
    model_type, sizes = CASES[case]
    wide = WIDE.get(model_type, dict(hidden_size=256, moe_intermediate_size=256))
    if "moe_latent_size" in sizes:
        wide = wide | dict(moe_latent_size=128)
    folder = models.save_model(tmp_path, model_type, 0, **{**sizes, **wide})
    hf_config = json.loads((folder / "config.json").read_text())
    model = sizes_of(hf_config)
    for form, parallel in LAYOUTS:
        generation = GenerationConfig(
            vllm_cfg=VllmConfig(tensor_parallel_size=parallel.tp, expert_parallel_size=parallel.ep)
        )
        if parallel.ep > 1 and model_type not in WITH_EXPERTS:
            continue
        if form == "fp8_per_block":
            assert has_whole_blocks(generation, model)
        live = load(folder, parallel, parallel.tp - 1, precision="fp8", quantization=form)
        dtypes = tuple(
            (slot.name, dtype_name(tensor.dtype)) for slot, tensor in live.items() if tensor.dtype == torch.float32
        )
        layout = family(hf_config).vllm_layout(hf_config, parallel, parallel.tp - 1, "bfloat16", dtypes)
        planned = {
            slot: num_bytes
            for slot, content in layout.items()
            if (num_bytes := quantised_bytes(slot.name, content.shape, form, kept_layers(generation, model)))
        }
        scales = {slot: Slot(slot.name + SCALES[form]) for slot in planned}
        assert {slot for slot, tensor in live.items() if tensor.dtype == torch.float8_e4m3fn} == planned.keys()
        assert live.keys() == layout.keys() | set(scales.values())
        assert {slot: live[slot].nbytes + live[scales[slot]].nbytes for slot in planned} == planned
        # All others are as the trainer has them, in bfloat16.
        kept = {slot: tensor for slot, tensor in read_layout(folder, layout).items() if slot not in planned}
        assert differences({slot: live[slot] for slot in kept}, kept) == []


def test_vllm_leaves_biases_of_experts_unset(tmp_path: Path) -> None:
    """Once this fails, `check_blocks` can let gpt_oss through."""
    folder = models.save_model(tmp_path, "gpt_oss", 0, **{**CASES["gpt_oss"][1], **WIDE["gpt_oss"]})
    live = load(folder, VllmParallel(), 0, precision="fp8", quantization="fp8_per_channel")
    hf_config = json.loads((folder / "config.json").read_text())
    biases = {
        slot: tensor
        for slot, tensor in read_layout(
            folder, family(hf_config).vllm_layout(hf_config, VllmParallel(), 0, "bfloat16")
        ).items()
        if slot.name.endswith(("w13_bias", "w2_bias"))
    }
    assert len(biases) == 4 and len(differences({slot: live[slot] for slot in biases}, biases)) == 4


def test_every_family_is_here() -> None:
    assert {CASES[case][0] for case in CASES if "tied" not in case} == set(FAMILIES)


def published(name: str) -> dict[str, object]:
    """A model's config.json: of scripts/bench/models, of its hub.json, or transformers' defaults for a model type."""
    folder = ROOT / "scripts/bench/models"
    if (path := folder / f"{name}.config.json").exists():
        return json.loads(path.read_text())
    groups = json.loads((folder / "hub.json").read_text())
    if found := next((group["config"] for group in groups if name in group["ids"]), None):
        return found
    return {**AutoConfig.for_model(name).to_dict(), "architectures": [ARCHITECTURES[name]]}


ARCHITECTURES = {"deepseek_v3": "DeepseekV3ForCausalLM", "mixtral": "MixtralForCausalLM"}
"""Model types whose defaults are DeepSeek-V3 and Mixtral 8x7B."""
TWO: dict[str, object] = {"num_hidden_layers": 2}
FOUR: dict[str, object] = {"num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"]}
NANO: dict[str, object] = {"hybrid_override_pattern": "MEM*E", "num_hidden_layers": 5}
PUBLISHED: dict[str, tuple[dict[str, object], VllmParallel, str]] = {
    "nemotron3_nano_30b_a3b": (NANO, VllmParallel(), "fp8_per_channel"),  # experts of 1856 are 14.5 blocks
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": (NANO, VllmParallel(tp=4, ep=4), "fp8_per_block"),
    "qwen3_30b_a3b": (TWO, VllmParallel(tp=2, ep=2), "fp8_per_block"),
    "Qwen/Qwen3-235B-A22B": (TWO, VllmParallel(tp=4, ep=4), "fp8_per_block"),
    "deepseek_v3": ({"num_hidden_layers": 4, "topk_method": "noaux_tc"}, VllmParallel(tp=8, ep=8), "fp8_per_block"),
    "mixtral": (TWO, VllmParallel(tp=4), "fp8_per_block"),
    "Qwen/Qwen2-57B-A14B": (TWO, VllmParallel(tp=2), "fp8_per_block"),
    "zai-org/GLM-4.5-Air": (TWO, VllmParallel(tp=2, ep=2), "fp8_per_block"),
    "meta-llama/Llama-3.1-70B": (TWO, VllmParallel(tp=8), "fp8_per_block"),
    "Qwen/Qwen2.5-7B": (TWO, VllmParallel(tp=4), "fp8_per_block"),
    "Qwen/Qwen3-32B": (TWO, VllmParallel(tp=4), "fp8_per_block"),
    "qwen3_next_80b_a3b": (FOUR, VllmParallel(tp=2, ep=2), "fp8_per_block"),
    "qwen3_5_35b_a3b_text": (FOUR, VllmParallel(tp=2, ep=2), "fp8_per_block"),
}
"""Models at their published widths, with fewer layers; the layout of an engine, and the form that follows."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_quantised_and_refitted_on_the_meta_device(name: str, tmp_path: Path) -> None:
    """Models as vLLM builds and quantises them, without memory; a refit brings the weights of every layer once."""
    from mrl.rollout.worker import engine_tensors, quantisers

    changed, parallel, form = PUBLISHED[name]
    hf_config = {**published(name), **changed}
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    model, sizes = fp8_model(tmp_path, parallel, parallel.tp - 1), sizes_of(hf_config)
    generation = GenerationConfig(
        vllm_cfg=VllmConfig(precision="fp8", tensor_parallel_size=parallel.tp, expert_parallel_size=parallel.ep)
    )
    assert form_of(generation, sizes) == form
    # On this device views cannot be told, such as those of layers that vLLM pads to whole blocks.
    live = engine_tensors(model) | {Slot(name): tensor.data for name, tensor in model.named_parameters()}
    found = quantisers([model])
    dtypes = tuple(
        (slot.name, dtype_name(tensor.dtype))
        for slot, tensor in live.items()
        if tensor.dtype == torch.float32 and "weight_scale" not in slot.name
    )
    layout = family(hf_config).vllm_layout(hf_config, parallel, parallel.tp - 1, "bfloat16", dtypes)
    planned = {
        slot: num_bytes
        for slot, content in layout.items()
        if (num_bytes := quantised_bytes(slot.name, content.shape, form, kept_layers(generation, sizes)))
    }
    loaded = {slot: tuple(tensor.shape) for quantiser in found for slot, tensor in quantiser.loaded.items()}
    assert loaded == {slot: layout[slot].shape for slot in planned}
    assert sum(planned.values()) == sum(live[slot].nbytes for quantiser in found for slot in quantiser.made)
    assert {tensor.dtype for slot, tensor in live.items() if slot in planned} == {torch.float8_e4m3fn}
    assert {slot.name for slot in layout.keys() - planned.keys()} >= {"model.embed_tokens.weight", "lm_head.weight"}
    schedule, fault = prepared(tmp_path, parallel, {parallel.tp - 1: model})
    assert fault == ""
    turns = plan_turns(found, schedule.pulls(parallel.tp - 1), completed_rounds(schedule, range(parallel.num_workers)))
    assert [
        turn.quantiser for groups in turns.rounds for turn in groups if turn.quantiser
    ] and turns.offsets.keys() == loaded.keys()
    # vLLM makes what it has: also of new weights, which a refit brings.
    weights = {slot: torch.empty_like(tensor) for slot, tensor in found[-1].loaded.items()}
    made = found[-1].make(weights)
    assert {slot: (tensor.shape, tensor.dtype) for slot, tensor in made.items()} == {
        slot: (live[slot].shape, live[slot].dtype) for slot in found[-1].made
    }
