# SPDX-License-Identifier: Apache-2.0
"""Settled weights: current on every replica, equal to the optimizer's main parameters, every differing copy named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from conversion.families.common import MegatronCoords, MegatronParallel, VllmParallel
from conversion.families.registry import family
from conversion.tensors import box_view
from tests import models
from tests.reading import read_layout
from tests.stack.policy import phase_ranks, policy_ranks
from tests.stack.policy.policy_ranks import BF16
from tests.stack.ranks import RankPool
from tests.stack.refit.children import fill


@pytest.mark.parametrize("precision", [[], BF16], ids=["fp32", "bf16"])
def test_settled_weights_are_the_main_parameters_cast_down(ranks: RankPool, folder: Path, precision: list[str]):
    results = ranks.run(
        policy_ranks.settle_after_steps, policy_ranks.run_config(folder, "dp2", *precision), world_size=2
    )
    (raw, settled, weights, _), (other_raw, other_settled, other_weights, _) = results
    # With overlap_param_gather the optimizer leaves half of each replica as it was before the step.
    stale = [name for name in raw if raw[name] != other_raw[name]]
    assert len(stale) > len(raw) / 2
    assert settled == other_settled
    dtype = torch.bfloat16 if precision else torch.float32
    covered = {name: np.zeros(len(values), dtype=bool) for name, values in weights.items()}
    for _, _, _, shards in results:
        for name, start, main in shards:
            cast = torch.from_numpy(main).to(dtype).float().numpy()
            np.testing.assert_array_equal(weights[name][start : start + len(main)], cast, err_msg=name)
            covered[name][start : start + len(main)] = True
    # All but the experts' correction biases, which are no parameters.
    assert {name for name, part in covered.items() if not part.all()} == {
        name for name in weights if name.endswith("expert_bias")
    }
    assert all(np.array_equal(weights[name], other_weights[name]) for name in weights)


@pytest.mark.parametrize("model_type", ["nemotron_h", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("precision", [[], BF16], ids=["fp32", "bf16"])
def test_the_first_refit_after_a_step_brings_the_main_parameters_cast_down(
    ranks: RankPool, tmp_path: Path, model_type: str, precision: list[str]
):
    folder = models.save_model(tmp_path, model_type)
    config = policy_ranks.run_config(folder, "dp2", *precision)
    (live, shards), (_, other_shards) = ranks.run(policy_ranks.refit_after_steps, config, world_size=2)
    dtype = "bfloat16" if precision else "float32"
    hf_config = json.loads((folder / "config.json").read_text())
    # Both ranks hold the whole model, so a slot of theirs is cut out of whole tensors.
    trainer = family(hf_config).megatron_layout(hf_config, MegatronParallel(), MegatronCoords(), dtype)
    mains = read_layout(folder, trainer)
    moved = {slot: torch.zeros_like(tensor, dtype=torch.bool) for slot, tensor in mains.items()}
    by_name = {str(slot): slot for slot in trainer}
    for name, start, main in [*shards, *other_shards]:
        mains[by_name[name]].view(-1)[start : start + len(main)] = torch.from_numpy(main).to(mains[by_name[name]].dtype)
        moved[by_name[name]].view(-1)[start : start + len(main)] = True
    assert all(part.all() for slot, part in moved.items() if not slot.name.endswith("expert_bias"))
    canonical: dict[str, torch.Tensor] = {}
    for slot, content in trainer.items():
        for piece in content.pieces:
            shape = family(hf_config).canonical(hf_config)[piece.name]
            whole = canonical.setdefault(piece.name, torch.full(shape, torch.nan, dtype=mains[slot].dtype))
            box_view(whole, piece.box).copy_(box_view(mains[slot], piece.local))
    expected = fill(family(hf_config).vllm_layout(hf_config, VllmParallel(), 0, dtype), canonical)
    assert live.keys() == {str(slot) for slot in expected}
    assert [
        str(slot) for slot, tensor in expected.items() if not np.array_equal(live[str(slot)], tensor.float().numpy())
    ] == []


def test_a_flipped_byte_in_one_copy_is_named_on_all_ranks(ranks: RankPool, folder: Path):
    # A matrix cut over tp, a norm that all four ranks hold, an expert, and a buffer that is no parameter.
    slots = {
        "decoder.layers.0.mixer.in_proj.weight": "ranks [1] / [3]",
        "decoder.final_norm.weight": "ranks [0, 1, 2] / [3]",
        "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight": "ranks [1] / [3]",
        "decoder.layers.4.mlp.router.expert_bias": "ranks [0, 1, 2] / [3]",
    }
    layout = "tp2 sp dp2 ep2"
    config = policy_ranks.run_config(folder, layout)
    results = ranks.run(
        policy_ranks.settle_with_flipped_bytes, config, list(slots), world_size=policy_ranks.world_size(layout)
    )
    for messages in results:
        assert messages == results[0]
        for (slot, copies), message in zip(slots.items(), messages, strict=True):
            assert "copies of weights differ between ranks (1)" in message
            assert slot in message and copies in message, message


@pytest.mark.parametrize(
    ("model_type", "layout", "slot", "copies"),
    [
        ("qwen3", "pp2 dp2", "output_layer.weight", "ranks [0, 1, 2] / [3]"),
        ("qwen3_moe", "pp2 vpp2", "output_layer.weight (chunk 1)", "ranks [0] / [1]"),
    ],
)
def test_a_flipped_byte_in_the_copy_of_a_tied_embedding_is_named(
    ranks: RankPool, tmp_path: Path, model_type: str, layout: str, slot: str, copies: str
):
    config = policy_ranks.run_config(models.save_model(tmp_path, model_type, tie_word_embeddings=True), layout)
    size = policy_ranks.world_size(layout)
    for (message,) in ranks.run(policy_ranks.settle_with_flipped_bytes, config, [slot], world_size=size):
        assert "copies of weights differ between ranks (1)" in message
        assert "embedding.word_embeddings.weight" in message and copies in message


def test_a_tensor_without_a_conversion_is_an_error(ranks: RankPool, folder: Path):
    (message,) = ranks.run(
        policy_ranks.settle_with_unknown_buffer, policy_ranks.run_config(folder, "one"), world_size=1
    )
    assert "conversion table lacks: scale" in message


@pytest.mark.parametrize("precision", [[], BF16], ids=["fp32", "bf16"])
def test_the_arena_keeps_the_alignment_of_megatrons_buckets(ranks: RankPool, folder: Path, precision: list[str]):
    (places,) = ranks.run(phase_ranks.bucket_places, policy_ranks.run_config(folder, "one", *precision), world_size=1)
    # One buffer of the experts and one of the rest, at least.
    assert sum(in_buffer == 0 for _, _, in_buffer, _ in places) >= 2
    for _, by_megatron, in_buffer, address in places:
        assert in_buffer == by_megatron and address % 256 == 0
