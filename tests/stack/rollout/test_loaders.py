"""The tables against vLLM's own loaders, byte for byte, for every worker of engines that no laptop can start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conversion.families.common import VllmParallel
from conversion.families.registry import family
from conversion.safetensors_io import read_layout
from tests import models
from tests.stack.rollout.set_ranks import differences, load

# Eight workers can cut these heads and groups. Two key heads, so that workers share one; ten experts, which eight do not divide.
HEADS: dict[str, object] = dict(num_attention_heads=8, num_key_value_heads=2)
HYBRID = HEADS | dict(hybrid_override_pattern="ME*-", num_hidden_layers=4)
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "nemotron_h": ("nemotron_h", HYBRID | dict(n_groups=8, n_routed_experts=10)),
    "nemotron_h, one group, as many key heads": ("nemotron_h", HYBRID | dict(n_groups=1, num_key_value_heads=8)),
    "qwen2": ("qwen2", HEADS | dict(hidden_size=256)),
    "qwen2, tied": ("qwen2", HEADS | dict(hidden_size=256, tie_word_embeddings=True)),
    "qwen3": ("qwen3", HEADS | dict(tie_word_embeddings=False)),
    "qwen3, tied": ("qwen3", HEADS | dict(tie_word_embeddings=True)),
    "qwen3_moe": ("qwen3_moe", HEADS | dict(num_experts=10)),
    "qwen3_moe, a dense layer": ("qwen3_moe", HEADS | dict(num_key_value_heads=1, mlp_only_layers=[0])),
    "llama": ("llama", HEADS),
    "mixtral": ("mixtral", HEADS | dict(num_local_experts=10)),
}
DENSE = [VllmParallel(tp=size) for size in (1, 2, 4, 8)]
EXPERTS = [VllmParallel(tp=size, ep=size) for size in (2, 4, 8)]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_tables_are_what_the_loaders_do(case: str, precision: str, tmp_path: Path) -> None:
    model_type, sizes = CASES[case]
    folder = models.save(model_type, tmp_path, 0, **sizes)
    hf_config = json.loads((folder / "config.json").read_text())
    has_experts = any(".experts." in name for name in family(hf_config).canonical(hf_config))
    for parallel in DENSE + (EXPERTS if has_experts else []):
        for worker in range(parallel.tp):
            layout = family(hf_config).vllm_layout(hf_config, parallel, worker, precision)
            live = load(folder, parallel, worker, precision=precision)
            assert differences(live, layout, read_layout(folder, layout)) == [], (parallel, worker)
