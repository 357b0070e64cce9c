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

# Eight workers can cut these. Two key heads, so that several workers share one; expert counts that eight do not divide.
CASES = {
    "nemotron_h": (
        "nemotron_h",
        dict(num_attention_heads=8, n_groups=8, n_routed_experts=10, hybrid_override_pattern="ME*-", num_hidden_layers=4),
    ),
    "nemotron_h, one group": ("nemotron_h", dict(num_attention_heads=8, n_groups=1, num_hidden_layers=4, hybrid_override_pattern="ME*-")),
}
DENSE = [VllmParallel(tp=size) for size in (1, 2, 4, 8)]
EXPERTS = [VllmParallel(tp=size, ep=size) for size in (2, 4, 8)]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_tables_are_what_the_loaders_do(case: str, precision: str, tmp_path: Path) -> None:
    model_type, sizes = CASES[case]
    folder = models.save_nemotron_h(tmp_path, 0, **sizes)
    hf_config = json.loads((folder / "config.json").read_text())
    for parallel in DENSE + EXPERTS:
        for worker in range(parallel.tp):
            layout = family(hf_config).vllm_layout(hf_config, parallel, worker, precision)
            live = load(folder, parallel, worker, precision=precision)
            assert differences(live, layout, read_layout(folder, layout)) == [], (parallel, worker)
