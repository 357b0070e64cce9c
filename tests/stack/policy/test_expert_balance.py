# SPDX-License-Identifier: Apache-2.0
"""Counts of tokens by expert in a whole train step: metrics and biases, against routing done by transformers."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import models
from tests.stack.policy import policy_ranks
from tests.stack.policy.balancing import router_inputs
from tests.stack.ranks import RankPool

RATE = 0.015625
EXPERT_LAYERS = (1, 4, 6)
"""Layers with experts in the pattern MEM*EME."""

MEGATRON = "policy.megatron_cfg"
SETTINGS = [
    f"{MEGATRON}.freeze_moe_router=true",
    f"{MEGATRON}.moe_router_bias_update_rate={RATE}",
    f"{MEGATRON}.moe_per_layer_logging=true",
    "loss_fn.reference_policy_kl_penalty=0.01",
    "policy.make_sequence_length_divisible_by=8",  # padding, which must not count
]
CASES = {
    "one": (),
    "tp2 sp dp2 ep2": (f"{MEGATRON}.activation_checkpointing=true",),
    "pp2 dp2 ep2": (f"{MEGATRON}.activation_checkpointing=true", f"{MEGATRON}.moe_token_dispatcher_type=allgather"),
}


@pytest.fixture(scope="module")
def tokens_by_layer() -> dict[int, list[int]]:
    """Choices of each expert by the tokens of all rollouts, by layer, one token after the other."""
    model = models.nemotron_h()
    counts = {layer: [0] * 8 for layer in EXPERT_LAYERS}
    with torch.no_grad():
        for _, rollout, _, _ in policy_ranks.rollouts():
            inputs = router_inputs(model, [*rollout.request.token_ids, *rollout.token_ids.tolist()])
            for layer, (gate, hidden) in zip(EXPERT_LAYERS, inputs, strict=True):
                for scores in (hidden @ gate.get_parameter("weight").T).sigmoid():
                    for expert in (scores + gate.get_buffer("e_score_correction_bias")).topk(2).indices.tolist():
                        counts[layer][expert] += 1
    return counts


@pytest.mark.parametrize("layout", CASES)
def test_a_step_counts_every_token_once(
    ranks: RankPool, folder: Path, tokens_by_layer: dict[int, list[int]], layout: str
):
    config = policy_ranks.run_config(folder, layout, *SETTINGS, *CASES[layout])
    results = ranks.run(policy_ranks.routing_of_step, config, world_size=policy_ranks.world_size(layout))
    seen = set()
    for metrics, biases, trained in results:
        assert metrics == results[0][0]
        assert trained and not any("router" in slot for slot in trained), "a frozen router has no optimizer state"
        for name, (before, after) in biases.items():
            layer = int(name.split(".")[2])
            seen.add(layer)
            mean = sum(tokens_by_layer[layer]) / 8
            moves = [(tokens < mean) - (tokens > mean) for tokens in tokens_by_layer[layer]]
            np.testing.assert_allclose(after - before, RATE * np.array(moves), atol=1e-7, err_msg=name)
    assert seen == set(EXPERT_LAYERS)
    check_metrics(results[0][0], tokens_by_layer)


def check_metrics(metrics: dict[str, float], tokens_by_layer: dict[int, list[int]]) -> None:
    violations, entropies = [], []
    for layer, tokens in tokens_by_layer.items():
        violations.append(max(tokens) / (sum(tokens) / 8) - 1)
        entropies.append(-sum(n / sum(tokens) * math.log(n / sum(tokens)) for n in tokens if n) / math.log(8))
        assert metrics[f"train/moe/max_violation_layer_{layer}"] == pytest.approx(violations[-1])
        assert metrics[f"train/moe/load_entropy_layer_{layer}"] == pytest.approx(entropies[-1])
        assert metrics[f"train/moe/unused_experts_layer_{layer}"] == tokens.count(0) / 8
    assert metrics["train/moe/max_violation"] == pytest.approx(sum(violations) / 3)
    assert metrics["train/moe/max_violation_worst"] == pytest.approx(max(violations))
    assert metrics["train/moe/load_entropy_worst"] == pytest.approx(min(entropies))


@pytest.mark.parametrize("overrides", [[], [f"{MEGATRON}.track_moe_metrics=false"]])
def test_metrics_of_layers_only_where_asked_for(ranks: RankPool, folder: Path, overrides: list[str]):
    config = policy_ranks.run_config(folder, "one", *overrides)
    ((metrics,),) = ranks.run(policy_ranks.metrics_of_steps, config, 1, world_size=1)
    assert not any("_layer_" in name for name in metrics)
    assert any(name.startswith("train/moe/") for name in metrics) == (not overrides)
