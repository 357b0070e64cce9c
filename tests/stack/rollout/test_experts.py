# SPDX-License-Identifier: Apache-2.0
"""The experts of CPU hosts: each token's sum, whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

NUM_TOKENS, NUM_EXPERTS, NUM_CHOICES, HIDDEN, INNER = 70, 8, 3, 48, 40


@pytest.mark.parametrize("is_gated", [True, False])
# Global expert -> its index here; -1: on another rank.
@pytest.mark.parametrize(
    "here", [list(range(NUM_EXPERTS)), [-1, -1, 0, 1, 2, 3, -1, -1], [-1, -1, -1, -1, -1, 0, -1, -1]]
)
def test_each_token_gets_the_sum_of_its_experts(is_gated: bool, here: list[int]):
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG

    from mrl.rollout.cpu_experts import PlainExperts

    torch.manual_seed(0)
    x, w2 = torch.randn(NUM_TOKENS, HIDDEN), torch.randn(NUM_EXPERTS, HIDDEN, INNER) / 6
    w1 = torch.randn(NUM_EXPERTS, (1 + is_gated) * INNER, HIDDEN) / 6
    # No token chooses expert 5.
    weights, ids = (
        torch.randn(NUM_TOKENS, NUM_EXPERTS).index_fill(1, torch.tensor([5]), -9.0).softmax(-1).topk(NUM_CHOICES)
    )
    is_here = torch.tensor([index >= 0 for index in here])

    def run(rows: slice) -> torch.Tensor:
        output, none = torch.full_like(x[rows], float("nan")), torch.empty(0)
        experts = PlainExperts.__new__(PlainExperts)  # without what vLLM configures
        experts.quant_config = FUSED_MOE_UNQUANTIZED_CONFIG
        PlainExperts.apply(
            experts, output, x[rows], w1[is_here], w2[is_here], weights[rows], ids[rows].int(),
            MoEActivation.SILU if is_gated else MoEActivation.RELU2_NO_MUL, NUM_EXPERTS, torch.tensor(here), None, None,
            none, none, None,
            apply_router_weight_on_input=False,
        )  # fmt: skip
        return output

    together = run(slice(None))
    assert torch.equal(together, torch.cat([run(slice(start, start + 7)) for start in range(0, NUM_TOKENS, 7)]))
    for token in range(NUM_TOKENS):
        expected = torch.zeros(HIDDEN, dtype=torch.float64)
        for weight, expert in zip(weights[token].tolist(), ids[token].tolist(), strict=True):
            if here[expert] >= 0:
                up = w1[expert].double() @ x[token].double()
                inner = F.silu(up[:INNER]) * up[INNER:] if is_gated else F.relu(up) ** 2
                expected += weight * (w2[expert].double() @ inner)
        torch.testing.assert_close(together[token].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("group", [None, 128, 32])
def test_experts_that_no_token_chooses_give_zero_in_every_form_of_fp8(group: int | None):
    from functools import partial

    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from mrl.rollout.cpu_experts import mixture, rounded

    x, w1, w2 = torch.randn(1, 64), torch.randn(2, 128, 64), torch.randn(2, 64, 64)
    weights, ids, here = torch.ones(1, 1), torch.tensor([[3]]), torch.tensor([0, 1, -1, -1])
    read = partial(rounded, group=group)
    found = mixture(x, w1, w2, weights, ids, MoEActivation.SILU, here, weighs_inputs=False, read=read)
    assert torch.equal(found, torch.zeros(1, 64))
