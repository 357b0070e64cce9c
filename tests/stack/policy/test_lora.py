# SPDX-License-Identifier: Apache-2.0
"""Adapters: any layout gives transformers' loss and gradients on weights with the adapters' product added by hand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from conversion.adapters import adapted_layers, adapter_family, factor_names
from conversion.families.registry import family
from mrl.config.schema.megatron import PeftConfig
from tests import models
from tests.stack.policy.layouts import Gradients, assert_close, gradients_of, transformers_gradients
from tests.stack.policy.sizes import sizes
from tests.stack.ranks import RankPool

SCALE = 1.5

CASES = [
    ("nemotron_h", "tp2 sp dp2 ep2"),
    *(
        pytest.param(name, layout, marks=pytest.mark.long("parity"))
        for name, layout in [
            *(("nemotron_h", layout) for layout in ("one", "pp2 uneven", "tp2 sp etp2", "cp2 ep2", "one, recomputed")),
            *(("qwen3_moe", layout) for layout in ("one", "tp2 sp dp2 ep2", "pp2 uneven", "tp2 sp etp2")),
            *(("qwen2", layout) for layout in ("one", "tp2", "tp2 sp", "pp2 vpp2", "one, recomputed")),
            *(("deepseek_v3", layout) for layout in ("one", "tp2 sp dp2 ep2")),
            *(("qwen3_next", layout) for layout in ("one", "tp2 sp dp2 ep2")),
        ]
    ),
]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Gradients]]:
    """Makes, by family, a model with random adapters next to its weights, and transformers' gradients for both."""
    return cache(lambda name: make_adapted(name, tmp_path_factory.mktemp(name)))


def make_adapted(name: str, folder: Path) -> tuple[Path, Gradients]:
    models.save_model(folder / "model", name, 0, pad_token_id=None)
    hf_config = json.loads((folder / "model/config.json").read_text())
    base = family(hf_config)
    layers = adapted_layers(base, hf_config)
    shapes = adapter_family(base, layers, 4).canonical(hf_config)
    generator = torch.Generator().manual_seed(1)
    factors = {tensor: torch.randn(shape, generator=generator) * 0.1 for tensor, shape in shapes.items()}
    save_file(factors, folder / "model/adapters.safetensors")
    shutil.copytree(folder / "model", folder / "merged")
    (folder / "merged/adapters.safetensors").unlink()
    weights = load_file(folder / "model/model.safetensors")
    names = factor_names(base, hf_config, layers)
    for weight, (a, b) in names.items():
        weights[weight] += SCALE * factors[b] @ factors[a]
    save_file(weights, folder / "merged/model.safetensors", {"format": "pt"})
    (folder / "scratch").mkdir()
    loss, grads = transformers_gradients(folder / "merged", folder / "scratch")
    # W = W0 + s B A, so that dB = s dW A' and dA = s B' dW, summed over the weights that share A.
    expected = {a: np.zeros(shapes[a], np.float32) for a, _ in names.values()}
    for weight, (a, b) in names.items():
        expected[b] = (SCALE * grads[weight] @ factors[a].numpy().T).astype(np.float32)
        expected[a] += SCALE * factors[b].numpy().T @ grads[weight]
    return folder / "model", (loss, expected)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_layout_gives_the_gradients_of_transformers(
    ranks: RankPool, adapted: Callable[[str], tuple[Path, Gradients]], name: str, layout: str
):
    folder, (expected_loss, expected) = adapted(name)
    world_size, megatron = sizes(layout)
    loss, grads = gradients_of(
        ranks, folder, world_size, megatron | dict(peft=PeftConfig(enabled=True, dim=4, alpha=6.0))
    )
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert_close(grads, expected, 2e-5)
