# SPDX-License-Identifier: Apache-2.0
"""Recomputed activations give the gradients of kept ones, and need less memory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests import models
from tests.megatron import IS_NEWEST
from tests.sources import ROOT
from tests.stack.policy import layout_ranks, memory_ranks
from tests.stack.policy.layouts import Gradients, assert_close, gradients_of, sequences
from tests.stack.ranks import RankPool

FULL: dict[str, object] = dict(activation_checkpointing=True)
MODELS = {
    "nemotron_h": dict(hybrid_override_pattern="MEM*EME-", num_hidden_layers=8),
    "qwen3_moe": dict(mlp_only_layers=[0]),
    "qwen3": {},
}
MODULES = {
    "nemotron_h": ["core_attn", "layernorm", "mlp", "moe", "shared_experts"],
    "qwen3_moe": ["core_attn", "layernorm", "mlp", "moe"],
    "qwen3": ["core_attn", "layernorm", "mlp"],
}
LONG_ROW = [sequences(300, 1, 200, 11)]


def selective(*modules: str) -> dict[str, object]:
    return FULL | dict(recompute_granularity="selective", recompute_modules=list(modules) or None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: models.save_model(tmp_path_factory.mktemp(name), name, pad_token_id=None, **MODELS[name])
        for name in MODELS
    }


@pytest.fixture(scope="module")
def kept(ranks: RankPool, folders: dict[str, Path]) -> dict[str, Gradients]:
    """Gradients by model, without recomputation."""
    return {name: gradients_of(ranks, folder, 1, {}) for name, folder in folders.items()}


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3_moe"])
def test_full_recomputation_gives_the_same_gradients_bit_for_bit(
    ranks: RankPool, folders: dict[str, Path], kept: dict[str, Gradients], name: str
):
    loss, grads = gradients_of(ranks, folders[name], 1, FULL)
    assert loss == kept[name][0]
    assert [tensor for tensor, grad in grads.items() if not np.array_equal(grad, kept[name][1][tensor])] == []


def test_groups_of_layers_are_recomputed_together(ranks: RankPool, folders: dict[str, Path]):
    # Three groups, the last one with two of the eight layers.
    together, apart = ranks.run(
        memory_ranks.hybrid_gradients_by_group_size, folders["nemotron_h"], LONG_ROW, (3, 1), world_size=1
    )[0]
    assert together.keys() == apart.keys()
    assert [name for name in together if not np.array_equal(together[name], apart[name])] == []


def test_the_hybrid_stack_keeps_the_inputs_of_layers_only(ranks: RankPool, folders: dict[str, Path]):
    full, selected, everything = (
        saved(ranks, folders["nemotron_h"], LONG_ROW, **how) for how in (FULL, selective("core_attn", "moe"), {})
    )
    # Inputs of eight layers, what the largest layer keeps while it is computed again, and the output's probabilities.
    assert full < 0.45 * everything
    assert full < selected < everything


@pytest.mark.long("parity")
@pytest.mark.parametrize("name", MODULES)
def test_each_part_that_is_recomputed_gives_the_same_gradients(
    ranks: RankPool, folders: dict[str, Path], kept: dict[str, Gradients], name: str
):
    for module in MODULES[name]:
        loss, grads = gradients_of(ranks, folders[name], 1, selective(module))
        assert loss == kept[name][0]
        assert_close(grads, kept[name][1], 1e-6)


@pytest.mark.long("parity")
def test_memory_of_activations_is_what_the_plan_is_compared_with(ranks: RankPool, tmp_path: Path):
    """The file is what tests/stack/policy/test_plan.py takes for measured."""
    rows = [sequences(3000, 1000, 96)]
    sizes = {
        "nemotron_h": dict(hybrid_override_pattern="MEMEM*EMEMEM*EME-EM*EM-E", num_hidden_layers=24),
        "qwen3_moe": dict(num_hidden_layers=24),
    }
    how = {"nothing": {}, "core_attn, moe": selective("core_attn", "moe"), "all layers": FULL}
    folders = {name: models.save_model(tmp_path / name, name, pad_token_id=None, **sizes[name]) for name in sizes}
    everything = 0
    for row in json.loads((ROOT / "tests/stack/policy/recompute.json").read_text())["rows"]:
        peak = saved(ranks, folders[row["model"]], rows, **how[row["recomputed"]])
        everything = peak if row["recomputed"] == "nothing" else everything
        # The numbers are those of megatron-core 0.16.1.
        assert IS_NEWEST or peak / 1e6 == pytest.approx(row["peak_mb"], rel=0.02), row
        assert row["recomputed"] != "all layers" or peak < 0.25 * everything


def saved(ranks: RankPool, folder: Path, rows: list, **megatron: object) -> int:
    """Bytes kept for the backward pass at the worst moment, on one rank."""
    return ranks.run(memory_ranks.peak_saved_bytes, layout_ranks.policy_config(**megatron), folder, rows, world_size=1)[
        0
    ]
