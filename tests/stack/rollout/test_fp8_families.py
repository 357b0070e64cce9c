# SPDX-License-Identifier: Apache-2.0
"""FP8 tensors of every family, as vLLM's own models and loader make them for a worker, against the plan's rule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from conversion.boxes import Slot
from conversion.families.common import VllmParallel
from conversion.families.registry import FAMILIES, family
from conversion.tensors import dtype_name
from mrl.config.fp8 import MX, has_whole_blocks, kept_layers, quantised_bytes
from mrl.config.model import sizes_of
from mrl.config.schema.generation import GenerationConfig, VllmConfig
from tests import models
from tests.reading import read_layout
from tests.stack.rollout.set_ranks import CASES, WITH_EXPERTS, differences, load

SCALES = {"fp8_per_block": "_scale_inv", "fp8_per_channel": "_scale", "fp8_per_tensor": "_scale", MX: "_scale"}
# Workers agree on other scales by messages, which a worker alone cannot send.
LAYOUTS = [
    *((form, VllmParallel()) for form in SCALES),
    *((form, VllmParallel(tp=2)) for form in ("fp8_per_block", MX)),
    *((form, VllmParallel(tp=2, ep=2)) for form in ("fp8_per_block", MX)),
]
# Experts whose halves are whole blocks; ranks that 32 divides.
WIDE: dict[str, dict[str, object]] = {
    "mixtral": dict(hidden_size=256, intermediate_size=256),
    "deepseek_v3": dict(hidden_size=256, moe_intermediate_size=256, q_lora_rank=64),
    "qwen2": dict(hidden_size=256),
    "qwen2_moe": dict(hidden_size=256, moe_intermediate_size=256, shared_expert_intermediate_size=128),
    "llama": {},
    "qwen3": {},
}


REFUSED = ("gpt_oss", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
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


def test_every_family_is_here() -> None:
    assert {CASES[case][0] for case in CASES if "tied" not in case} == set(FAMILIES)
