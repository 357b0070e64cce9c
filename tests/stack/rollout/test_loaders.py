"""The tables against vLLM's own loaders, byte for byte, for every worker of engines that no laptop can start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from conversion.families.common import VllmParallel
from conversion.families.registry import FAMILIES, family
from conversion.storage.safetensors_io import read_layout
from mrl.config.schema.generation import Precision
from tests import models
from tests.stack.rollout.set_ranks import differences, load

# Eight workers can cut these heads and groups. Two key heads, so that workers share one; ten experts, which eight do not divide.
HEADS: dict[str, object] = dict(num_attention_heads=8, num_key_value_heads=2)
HYBRID = HEADS | dict(hybrid_override_pattern="ME*-", num_hidden_layers=4, n_groups=8)
TWO_LAYERS = HEADS | dict(num_hidden_layers=2)
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "nemotron_h": ("nemotron_h", HYBRID | dict(n_routed_experts=10)),
    "nemotron_h, one group, as many key heads": ("nemotron_h", HYBRID | dict(n_groups=1, num_key_value_heads=8)),
    "nemotron_h, latent experts": ("nemotron_h", HYBRID | dict(moe_latent_size=32)),
    "qwen2": ("qwen2", TWO_LAYERS | dict(hidden_size=256)),
    "qwen2, tied": ("qwen2", TWO_LAYERS | dict(hidden_size=256, tie_word_embeddings=True)),
    "qwen3": ("qwen3", TWO_LAYERS | dict(tie_word_embeddings=False)),
    "qwen3, tied": ("qwen3", TWO_LAYERS | dict(tie_word_embeddings=True)),
    "qwen3_moe": ("qwen3_moe", TWO_LAYERS | dict(num_experts=10)),
    "qwen3_moe, a dense layer": ("qwen3_moe", TWO_LAYERS | dict(num_key_value_heads=1, mlp_only_layers=[0])),
    "llama": ("llama", TWO_LAYERS),
    "mixtral": ("mixtral", TWO_LAYERS | dict(num_local_experts=10)),
}
DENSE = [VllmParallel(tp=size) for size in (1, 2, 4, 8)]
EXPERTS = [VllmParallel(tp=size, ep=size) for size in (2, 4, 8)]


def test_every_family_that_generates_is_here() -> None:
    assert {model_type for model_type, _ in CASES.values()} == {name for name, found in FAMILIES.items() if found.vllm_layers}


@pytest.mark.parametrize("case", CASES)
def test_tables_are_what_the_loaders_do(case: str, tmp_path: Path) -> None:
    model_type, sizes = CASES[case]
    folder = models.save_model(tmp_path, model_type, 0, **sizes)
    weights = load_file(folder / "model.safetensors").values()
    assert len({weight.numpy().tobytes() for weight in weights}) == len(weights), "equal tensors could be exchanged unseen"
    has_experts = model_type in ("mixtral", "nemotron_h", "qwen3_moe")
    for parallel in DENSE + EXPERTS * has_experts:
        for worker in range(parallel.tp):
            assert disagreements(folder, parallel, worker) == [], (parallel, worker)


@pytest.mark.parametrize("model_type", [name for name, found in FAMILIES.items() if found.vllm_layers])
def test_tables_have_the_dtypes_of_bfloat16_engines(model_type: str, tmp_path: Path) -> None:
    folder = models.save_model(tmp_path, model_type)
    for worker in range(2):
        assert disagreements(folder, VllmParallel(tp=2), worker, precision="bfloat16") == []


def test_another_workers_table_is_not_taken(tmp_path: Path) -> None:
    folder = models.save_model(tmp_path, "qwen3_moe")
    wrong = disagreements(folder, VllmParallel(tp=2, ep=2), 0, table_of=1)
    cut = ("embed_tokens", "lm_head", "qkv_proj", "o_proj", "w13_weight", "w2_weight")
    assert wrong and all(line.endswith(": other bytes") and any(name in line for name in cut) for line in wrong)
    assert all(any(name in line for line in wrong) for name in cut)


def disagreements(
    folder: Path, parallel: VllmParallel, worker: int, *, precision: Precision = "float32", table_of: int | None = None
) -> list[str]:
    """What vLLM holds as `worker` against the table of it, or of worker `table_of`."""
    hf_config = json.loads((folder / "config.json").read_text())
    layout = family(hf_config).vllm_layout(hf_config, parallel, worker if table_of is None else table_of, precision)
    return differences(load(folder, parallel, worker, precision=precision), read_layout(folder, layout))
