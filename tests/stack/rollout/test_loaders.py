# SPDX-License-Identifier: Apache-2.0
"""The tables against vLLM's own loaders, byte for byte, for every worker of engines that no laptop can start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from conversion.boxes import Slot
from conversion.families.common import VllmParallel
from conversion.families.registry import FAMILIES, family
from conversion.files.hf_folder import EMBEDDING, OUTPUT, SINGLE_FILE
from conversion.tensors import dtype_name
from mrl.config.schema.generation import Precision
from tests import models
from tests.reading import read_layout
from tests.stack.rollout.set_ranks import CASES, MORE_LAYERS, differences, layouts, load, staged_layouts


def test_every_family_is_here() -> None:
    assert {model_type for model_type, _ in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize("case", CASES)
def test_tables_are_what_the_loaders_do(case: str, tmp_path: Path) -> None:
    model_type, sizes = CASES[case]
    folder = models.save_model(tmp_path, model_type, 0, **sizes)
    weights = load_file(folder / "model.safetensors").values()
    assert len({weight.numpy().tobytes() for weight in weights}) == len(weights), (
        "equal tensors could be exchanged unseen"
    )
    for parallel in layouts(model_type):
        for worker in range(parallel.num_workers):
            assert disagreements(folder, parallel, worker) == [], (parallel, worker)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_tables_are_what_the_loaders_do_in_bfloat16_engines(model_type: str, tmp_path: Path) -> None:
    folder = models.save_model(tmp_path, model_type)
    for worker in range(2):
        assert disagreements(folder, VllmParallel(tp=2), worker, precision="bfloat16") == []


@pytest.mark.parametrize("case", [case for case in CASES if case in FAMILIES or case.endswith("tied")])
def test_tables_are_what_the_loaders_do_on_every_stage(case: str, tmp_path: Path) -> None:
    model_type, sizes = CASES[case]
    folder = models.save_model(
        tmp_path, model_type, 0, **sizes | MORE_LAYERS.get(model_type, dict(num_hidden_layers=5))
    )
    for parallel in staged_layouts(model_type):
        for worker in range(parallel.num_workers):
            assert disagreements(folder, parallel, worker) == [], (parallel, worker)


def test_vllm_reads_no_tied_embedding_stored_as_the_output_layer_alone(tmp_path: Path) -> None:
    """Reason of the rule in `mrl.config.rules.models`."""
    folder = models.save_model(tmp_path, "qwen3", 0, **CASES["qwen3, tied"][1])
    weights = load_file(folder / SINGLE_FILE)
    weights[OUTPUT] = weights.pop(EMBEDDING)
    save_file(weights, folder / SINGLE_FILE)
    assert load(folder, VllmParallel(), 0)[Slot(EMBEDDING)].isnan().all(), "as it was before the loader came"


@pytest.mark.parametrize(
    "model_type", ["deepseek_v3", "glm4_moe", "nemotron_h", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"]
)
def test_vllm_reads_experts_in_one_tensor_where_the_family_says_so(model_type: str, tmp_path: Path) -> None:
    hf, stacked = models.save_model(tmp_path / "hf", model_type), tmp_path / "stacked"
    AutoModelForCausalLM.from_pretrained(hf).save_pretrained(stacked, save_original_format=False)
    assert any(name.endswith(".experts.down_proj") for name in load_file(stacked / SINGLE_FILE))
    if not FAMILIES[model_type].vllm_reads_stacked_experts:
        with pytest.raises(KeyError, match="experts.down_proj"):
            load(stacked, VllmParallel(), 0)
        return
    for parallel in (VllmParallel(tp=2), VllmParallel(tp=2, ep=2)):
        for worker in range(2):
            assert disagreements(stacked, parallel, worker) == []


def test_another_workers_table_is_not_taken(tmp_path: Path) -> None:
    folder = models.save_model(tmp_path, "qwen3_moe")
    wrong = disagreements(folder, VllmParallel(tp=2, ep=2), 0, table_of=1)
    cut = ("embed_tokens", "lm_head", "qkv_proj", "o_proj", "w13_weight", "w2_weight")
    assert wrong and all(line.endswith(": other bytes") and any(name in line for name in cut) for line in wrong)
    assert all(any(name in line for line in wrong) for name in cut)


def disagreements(
    folder: Path, parallel: VllmParallel, worker: int, *, precision: Precision = "float32", table_of: int | None = None
) -> list[str]:
    """Compares the tensors of vLLM's `worker` with its table, or that of worker `table_of`."""
    hf_config = json.loads((folder / "config.json").read_text())
    tensors = load(folder, parallel, worker, precision=precision)
    live = tuple((slot.name, dtype_name(tensor.dtype)) for slot, tensor in tensors.items())
    layout = family(hf_config).vllm_layout(
        hf_config, parallel, worker if table_of is None else table_of, precision, live
    )
    return differences(tensors, read_layout(folder, layout))
