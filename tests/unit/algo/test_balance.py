# SPDX-License-Identifier: Apache-2.0
"""Balance of experts on counts worked by hand."""

import math

import pytest
import torch

from mrl.algo.balance import Routing, balance_metrics, bias_directions

# A dense layer, one in perfect balance, and one that sends 6 of 8 tokens to one expert and none to two.
TOKENS_LE = torch.tensor([[0, 0, 0, 0], [2, 2, 2, 2], [6, 2, 0, 0]])


def test_balance_is_the_mean_over_layers_with_experts_and_the_worst_of_them():
    losses = {"seq_aux_loss": torch.tensor([0.0, 1.0, 1.5], dtype=torch.double)}
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    expected = {
        "moe/max_violation": 1.0,  # (0 + 2) / 2: the busiest expert of the last layer has three times the mean of 2
        "moe/max_violation_worst": 2.0,
        "moe/load_entropy": (1 + entropy) / 2,
        "moe/load_entropy_worst": entropy,
        "moe/unused_experts": 0.25,
        "moe/unused_experts_worst": 0.5,
        "moe/seq_load_balancing_loss": 1.25,
    }
    metrics = balance_metrics(Routing(TOKENS_LE, losses), per_layer=False)
    assert metrics == pytest.approx(expected)
    by_layer = balance_metrics(Routing(TOKENS_LE, losses), per_layer=True)
    assert by_layer.items() > metrics.items()
    assert by_layer["moe/max_violation_layer_2"] == pytest.approx(2.0)
    assert by_layer["moe/seq_load_balancing_loss_layer_1"] == 1.0
    assert {name.rpartition("_")[2] for name in by_layer if "_layer_" in name} == {"1", "2"}


def test_a_model_without_experts_has_no_balance():
    assert balance_metrics(Routing(torch.zeros(3, 0, dtype=torch.int64), {}), per_layer=True) == {}


def test_biases_move_towards_the_mean_also_of_counts_beyond_float32():
    large = 2**25
    tokens_LE = torch.cat([TOKENS_LE, torch.tensor([[large + 1, large, large, large - 1]])])
    assert bias_directions(tokens_LE).tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [-1, 0, 1, 1], [-1, 0, 0, 1]]
