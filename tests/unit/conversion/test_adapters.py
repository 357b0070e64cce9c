# SPDX-License-Identifier: Apache-2.0
"""Adapter factors: on every rank of random layouts, and in checkpoints, B A is the weight's part of the whole B A."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from conversion.adapters import (
    HOLDING_FAMILIES,
    INPUT,
    OUTPUT,
    HeldAdapters,
    adapted_layers,
    adapter_family,
    engine_adapter_family,
    factor_names,
    held_apart,
    layers_of_keys,
    linear_layers,
)
from conversion.boxes import Layout, Slot
from conversion.families.common import VllmParallel
from conversion.families.registry import family
from tests.proof.models import RandomCase, random_case
from tests.unit.conversion import test_table_version as pinned
from tests.unit.conversion.hf_folders import tiny_config

DIM = 3

HYBRID = pinned.HYBRID | {"model_type": "nemotron_h"}


def canonical_values(case: RandomCase, layers: tuple[str, ...]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Random whole numbers for all factors, and the weights that are their products."""
    base, rng = family(case.hf_config), np.random.default_rng(0)
    shapes = adapter_family(base, layers, DIM).canonical(case.hf_config)
    factors = {name: rng.integers(-9, 10, shape) for name, shape in shapes.items()}
    products = {
        weight: factors[b] @ factors[a] for weight, (a, b) in factor_names(base, case.hf_config, layers).items()
    }
    assert {name: values.shape for name, values in products.items()}.items() <= base.canonical(case.hf_config).items()
    return factors, products


def filled(layout: Layout, values: dict[str, np.ndarray]) -> dict[Slot, np.ndarray]:
    """The tensors of a holder that consist of these canonical ones."""
    tensors = {}
    for slot, content in layout.items():
        if content.pieces and all(piece.name in values for piece in content.pieces):
            tensors[slot] = np.zeros(content.shape, np.int64)
            for piece in content.pieces:
                part = values[piece.name][tuple(slice(*bounds) for bounds in piece.box)]
                tensors[slot][tuple(slice(*bounds) for bounds in piece.local)] = part.reshape(
                    [stop - start for start, stop in piece.local]
                )
    return tensors


@pytest.mark.parametrize("seed", range(40))
def test_the_parts_of_a_rank_fit_together(seed: int):
    case = random_case(random.Random(seed))
    base = family(case.hf_config)
    layers = tuple(linear_layers(base, case.hf_config))
    factors, products = canonical_values(case, layers)
    adapters, num_checked = adapter_family(base, layers, DIM), 0
    for rank in range(case.world_size):
        coords = case.parallel.coords_of(rank, case.world_size)
        weights = filled(base.megatron_layout(case.hf_config, case.parallel, coords, "float32", case.flavour), products)
        parts = filled(
            adapters.megatron_layout(case.hf_config, case.parallel, coords, "float32", case.flavour), factors
        )
        for slot, a in parts.items():
            if slot.name.endswith(INPUT):
                layer = slot.name.removesuffix(INPUT)
                weight = f"{layer}.weight"
                if case.flavour == "te":
                    weight = re.sub(r"\.local_experts\.(\d+)\.(.*)", r".\2\1", weight)
                assert (parts[Slot(layer + OUTPUT, slot.chunk)] @ a == weights.pop(Slot(weight, slot.chunk))).all()
                num_checked += 1
        assert not weights
    assert num_checked


@pytest.mark.parametrize("seed", range(10))
def test_the_parts_in_a_checkpoint_fit_together(seed: int):
    case = random_case(random.Random(seed))
    base = family(case.hf_config)
    layers = tuple(linear_layers(base, case.hf_config))
    factors, products = canonical_values(case, layers)
    layout = adapter_family(base, layers, DIM).torch_dist_layout(case.hf_config, "float32")
    parts = filled(layout, factors)
    weights = filled(base.torch_dist_layout(case.hf_config, "float32"), products)
    assert sorted(layers_of_keys([slot.name for slot in layout])) == sorted(layers)
    for slot, b in parts.items():
        if OUTPUT in slot.name:
            layer, _, section = slot.name.partition(OUTPUT)
            assert (b @ parts[Slot(layer + INPUT)] == weights.pop(Slot(f"{layer}.weight{section}"))).all()
    assert not weights


def test_layers_are_chosen_by_name_or_pattern():
    base = family(HYBRID)
    every = linear_layers(base, HYBRID)
    assert every == [
        "decoder.layers.0.mixer.in_proj",
        "decoder.layers.0.mixer.out_proj",
        "decoder.layers.1.mlp.experts.linear_fc1",
        "decoder.layers.1.mlp.experts.linear_fc2",
        "decoder.layers.1.mlp.shared_experts.linear_fc1",
        "decoder.layers.1.mlp.shared_experts.linear_fc2",
        "decoder.layers.2.self_attention.linear_qkv",
        "decoder.layers.2.self_attention.linear_proj",
        "decoder.layers.3.mlp.linear_fc1",
        "decoder.layers.3.mlp.linear_fc2",
    ]
    assert adapted_layers(base, HYBRID) == tuple(every)
    assert adapted_layers(base, HYBRID, target_modules=["linear_qkv", "*.layers.1.*.linear_fc2"]) == tuple(
        every[i] for i in (3, 5, 6)
    )
    assert adapted_layers(base, HYBRID, exclude_modules=["*.experts.*", "linear_fc2"]) == tuple(
        every[i] for i in (0, 1, 4, 6, 7, 8)
    )


def test_a_pattern_without_a_layer_is_refused():
    with pytest.raises(
        ValueError, match=r"'q_proj' names no linear layer of the model; use in_proj, out_proj, linear_fc1"
    ):
        adapted_layers(family(HYBRID), HYBRID, target_modules=["linear_qkv", "q_proj"])


@pytest.mark.parametrize("model_type", HOLDING_FAMILIES)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_slices_of_an_engine_make_its_part_of_the_product(model_type: str, tp: int):
    hf_config, held_rank = tiny_config(model_type), 8
    base = family(hf_config)
    experts = held_apart(base, hf_config, linear_layers(base, hf_config))
    assert bool(experts) == (model_type == "qwen3_moe") and all("linear_fc" in name for name in experts)
    held = HeldAdapters(tuple(name for name in linear_layers(base, hf_config) if name not in experts), DIM)
    assert held.rank == held_rank
    rng = np.random.default_rng(0)
    shapes = adapter_family(base, held.layers, DIM).canonical(hf_config)
    factors = {name: rng.integers(-9, 10, shape) for name, shape in shapes.items()}
    names = factor_names(base, hf_config, held.layers)
    products = {weight: factors[b] @ factors[a] for weight, (a, b) in names.items()}
    tables = engine_adapter_family(base, held)
    for worker in range(tp):
        weights = filled(base.vllm_layout(hf_config, VllmParallel(tp), worker, "float32"), products)
        parts = filled(tables.vllm_layout(hf_config, VllmParallel(tp), worker, "float32"), factors)
        modules = dict.fromkeys(slot.name.partition(".lora_")[0] for slot in parts)
        assert list(modules) == held.modules(base, hf_config)
        for module in modules:
            weight = weights[Slot(f"{module}.weight")]
            slices = range(sum(slot.name.startswith(f"{module}.lora_b.") for slot in parts))
            a = [parts[Slot(f"{module}.lora_a.{index}")] for index in slices]
            b = [parts[Slot(f"{module}.lora_b.{index}")] for index in slices]
            assert all(part.shape == (held_rank, weight.shape[1]) and not part[DIM:].any() for part in a)
            assert all(part.shape[1] == held_rank for part in b)
            assert np.array_equal(np.concatenate([two @ one for one, two in zip(a, b, strict=True)]), weight)


def test_families_that_no_engine_was_shown_to_hold_are_merged():
    hf_config = tiny_config("glm4_moe")
    layers = linear_layers(family(hf_config), hf_config)
    assert held_apart(family(hf_config), hf_config, layers) == layers
