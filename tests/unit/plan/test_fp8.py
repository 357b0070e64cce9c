# SPDX-License-Identifier: Apache-2.0
"""Memory of training in FP8, by hand from the layouts in which Transformer Engine keeps tensors."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from transformers import AutoConfig

from mrl.config.load import load_config
from mrl.config.model import sizes_of
from mrl.plan.activations import Row, _weight_copies, backward_bytes, kept_bytes, part_bytes
from mrl.plan.facts import row_of
from tests.sources import ROOT

MEGATRON = "policy.megatron_cfg"
# A scale of 4 bytes for 128 inputs; one for each 128 x 128 weights, of which there are two copies.
INPUT, WEIGHTS = 1 + 4 / 128, 2 * (1 + 4 / 16384)
T = 4096


QWEN3 = sizes_of(json.loads((ROOT / "scripts/bench/models/qwen3_30b_a3b.config.json").read_text()))


def test_tensors_of_qwen3_30b_by_hand():
    """Hidden 2048, 32 heads and 4 of keys of 128, 128 experts of 768, of which 8 are chosen; 16 are on a rank."""
    row = Row(tokens=T, ep=8, fp8="blockwise")
    assert part_bytes(QWEN3, "*", row) == {
        "input": 2 * T * 2048,
        "norm": INPUT * T * 2048,  # its kernel gives what the projection reads, and nothing else
        "softmax": 4 * T * 32,
        "qkv": 2 * T * (32 + 2 * 4) * 128,
        "core": 2 * T * 32 * 128,  # attention keeps its output, and the projection that
        "weights": WEIGHTS * 2048 * 128 * (40 + 32),
    }
    # Tokens of each expert are padded to 16: 7.5 more on average.
    received = T * 8 + 16 * 7.5
    assert part_bytes(QWEN3, "E", row) == {
        "input": 2 * T * 2048,
        "norm": 2 * T * 2048,  # the router reads it
        "router": 12 * T * 128,
        "dispatched": INPUT * received * 2048,
        "fc1": 2 * received * 2 * 768,
        "activation": INPUT * received * 768,
        "shared": 0,
        "weights": WEIGHTS * 16 * 3 * 768 * 2048,
        "shared_weights": 0,
    }
    # In a row of 4,096 tokens the copies of weights are more than what inputs in FP8 save.
    assert round(kept_bytes(QWEN3, "*E", row) / 1e6) == 527
    assert round(kept_bytes(QWEN3, "*E", replace(row, fp8="")) / 1e6) == 435


def test_tensors_of_deepseek_v3_by_hand():
    """Hidden 7168, 128 heads of 128 + 64 with values of 128, ranks 1536 and 512; 8 ranks cut heads and widths."""
    shape = sizes_of(AutoConfig.for_model("deepseek_v3").to_dict())  # the published sizes are its defaults
    row = Row(tokens=T, tp=8, ep=64, is_sequence_parallel=True, fp8="mxfp8")
    scaled = 1 + 1 / 32
    found = part_bytes(shape, "*", row)
    assert found["norm"] == 2 * scaled * T / 8 * 7168  # of the two projections that read it
    assert found["down"] == T / 8 * (2 * (1536 + 512 + 64) + scaled * (1536 + 512))
    heads = 128 // 8
    weights = 7168 * (1536 + 512 + 64) + 1536 * heads * 192 + 512 * heads * 256 + heads * 128 * 7168
    assert found["weights"] == 2 * scaled * weights
    dense = part_bytes(shape, "-", row)
    assert dense["activation"] == scaled * T * 18432 / 8 and dense["fc1"] == 2 * T * 2 * 18432 / 8
    assert dense["weights"] == 2 * scaled * 3 * 7168 * 18432 / 8
    experts = part_bytes(shape, "E", row)
    # Those of the shared expert read what the router keeps. 256 experts on 64 ranks.
    assert experts["shared"] == T * 2048 / 8 * (2 * 2 + scaled)
    assert experts["shared_weights"] == 2 * scaled * 3 * 7168 * 2048 / 8
    assert experts["dispatched"] == scaled * (T / 8 * 8 + 4 * 15.5) * 7168


def test_layers_that_stay_in_bfloat16_have_no_copies():
    assert _weight_copies(QWEN3, "M", Row(tokens=T, ep=8, fp8="blockwise")) == {}


@pytest.mark.parametrize("fp8", ["", "tensorwise", "blockwise", "mxfp8"])
def test_recomputed_layers_keep_their_inputs_alone(fp8: str):
    """Copies of weights are then those of a layer at a time."""
    row = Row(tokens=T, ep=8, fp8=fp8, recompute=frozenset(["full"]))
    assert kept_bytes(QWEN3, "*E", row) == 2 * T * 2048
    assert kept_bytes(QWEN3, "*E", replace(row, recompute=frozenset(["moe"]))) == sum(
        part_bytes(QWEN3, "*", row).values()
    ) + 2 * (2 * T * 2048)
    kept = sum(sum(part_bytes(QWEN3, letter, row).values()) for letter in "*E")
    gradients = backward_bytes(QWEN3, "*E", replace(row, fp8="", recompute=frozenset()))
    again = kept - 2 * T * 2048
    # The widest gradient is rounded for the product that gives the weights', and for the other.
    widest = 2 * (T * 8) * 2 * 768 if fp8 else 0
    scaled = {"": 0, "tensorwise": 1.0, "blockwise": INPUT, "mxfp8": 1 + 1 / 32}[fp8]
    assert backward_bytes(QWEN3, "*E", row) == again + gradients + scaled * widest


@pytest.mark.usefixtures("workplace")
def test_a_run_plans_with_its_recipe():
    words = [f"{MEGATRON}.fp8_cfg.fp8_recipe=tensorwise", f"{MEGATRON}.expert_model_parallel_size=4"]
    for enabled, fp8 in (("true", "tensorwise"), ("false", "")):
        config = load_config("grpo_tiny.yaml", [*words, f"{MEGATRON}.fp8_cfg.enabled={enabled}"])
        row = row_of(config, is_training=True)
        assert (row.fp8, row.ep) == (fp8, 4)
