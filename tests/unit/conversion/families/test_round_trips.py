# SPDX-License-Identifier: Apache-2.0
"""Every family at five layouts: the ranks' tensors, taken apart again, are the canonical tensors, and copies agree."""

from __future__ import annotations

import math

import numpy as np
import pytest

from conversion.boxes import Layout, lengths
from conversion.families.common import Flavour, MegatronParallel
from conversion.families.registry import FAMILIES
from tests import models
from tests.unit.conversion.dense import UNWRITTEN, build, index_arrays, part

LAYOUTS = {
    "one rank": MegatronParallel(),
    "tp2 pp2 ep2": MegatronParallel(tp=2, pp=2, ep=2, num_layers_in_first_pipeline_stage=3),
    "tp2 ep4 etp2": MegatronParallel(tp=2, ep=4, etp=2),
    "tp1 pp2 ep4": MegatronParallel(pp=2, ep=4, num_layers_in_last_pipeline_stage=1),
    "pp4 vpp2": MegatronParallel(pp=4, vpp=2),
}
# Hybrid models have no virtual stages.
HYBRID_LAYOUTS = {name: parallel for name, parallel in LAYOUTS.items() if parallel.vpp == 1} | {
    "pp4": MegatronParallel(pp=4)
}
CASES = [
    (model_type, layout)
    for model_type, found in sorted(FAMILIES.items())
    for layout in (HYBRID_LAYOUTS if found.model_class == "mamba" else LAYOUTS)
]


@pytest.mark.parametrize("flavour", ["local", "te"])
@pytest.mark.parametrize(("model_type", "layout"), CASES)
def test_megatron_and_back(model_type: str, flavour: Flavour, layout: str):
    found, parallel = FAMILIES[model_type], (LAYOUTS | HYBRID_LAYOUTS)[layout]
    hf_config = {"model_type": model_type, **models.TINY[model_type], "rope_theta": 1e4, "num_hidden_layers": 8}
    if found.model_class == "mamba":
        hf_config |= {"hybrid_override_pattern": "MEM*EME-", "num_nextn_predict_layers": 2}
    canonical = index_arrays(found.canonical(hf_config))
    world_size = parallel.pp * math.lcm(parallel.tp, parallel.ep * parallel.etp)
    back = {name: np.full_like(array, UNWRITTEN) for name, array in canonical.items()}
    for coords in {parallel.coords_of(rank, world_size) for rank in range(world_size)}:
        take_apart(found.megatron_layout(hf_config, parallel, coords, "float32", flavour), canonical, back)
    assert [name for name, array in canonical.items() if not np.array_equal(back[name], array)] == []


@pytest.mark.parametrize("stacked_layers", [False, True])
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_checkpoint_and_back(model_type: str, stacked_layers: bool):
    found, hf_config = FAMILIES[model_type], {"model_type": model_type, **models.TINY[model_type], "rope_theta": 1e4}
    if found.model_class == "mamba":
        hf_config["num_nextn_predict_layers"] = 2
    canonical = index_arrays(found.canonical(hf_config))
    back = {name: np.full_like(array, UNWRITTEN) for name, array in canonical.items()}
    take_apart(found.torch_dist_layout(hf_config, "float32", 512, stacked_layers=stacked_layers), canonical, back)
    assert [name for name, array in canonical.items() if not np.array_equal(back[name], array)] == []


def take_apart(layout: Layout, canonical: dict[str, np.ndarray], back: dict[str, np.ndarray]) -> None:
    """Writes what a holder of the layout has into whole canonical tensors."""
    for content in layout.values():
        array = build(content, canonical)
        for piece in content.pieces:
            values, target = part(array, piece.local).reshape(lengths(piece.box)), part(back[piece.name], piece.box)
            assert ((target == UNWRITTEN) | (target == values)).all(), piece
            target[...] = values


@pytest.mark.parametrize(
    ("model_type", "overrides", "expected"),
    [
        ("nemotron_h", {}, (1, 4, 6)),
        ("qwen3_moe", {"mlp_only_layers": [0, 2]}, (1, 3)),
        ("mixtral", {}, (0, 1, 2, 3)),
        ("glm4_moe", {}, (1, 2, 3)),
        ("qwen3", {}, ()),
    ],
)
def test_layers_with_experts(model_type: str, overrides: dict[str, object], expected: tuple[int, ...]):
    hf_config = {"model_type": model_type, **models.TINY[model_type], "rope_theta": 1e4, **overrides}
    assert FAMILIES[model_type].expert_layers(hf_config) == expected
