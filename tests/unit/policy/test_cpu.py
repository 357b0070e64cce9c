# SPDX-License-Identifier: Apache-2.0
"""The optimizer that stands in for FusedAdam on hosts without CUDA."""

from __future__ import annotations

import torch

from mrl.policy.cpu import CpuFusedAdam


def test_adam_takes_the_steps_of_torch_and_keeps_its_step_count_in_the_group():
    torch.manual_seed(0)
    start = [torch.randn(3, 4), torch.randn(5), torch.randn(2)]
    ours, theirs = ([torch.nn.Parameter(tensor.clone()) for tensor in start] for _ in range(2))
    adam = CpuFusedAdam(ours, lr=1e-2, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1)
    reference = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1)
    for _ in range(5):
        # The last parameter never gets a gradient, and must stay.
        for our, their in list(zip(ours, theirs, strict=True))[:-1]:
            our.grad = torch.randn_like(our)
            their.grad = our.grad.clone()
        adam.step()
        reference.step()
    for our, their in zip(ours, theirs, strict=True):
        assert torch.allclose(our, their, rtol=1e-6, atol=1e-7)
    assert torch.equal(ours[-1], start[-1])
    assert adam.param_groups[0]["step"] == 5
    assert set(adam.state[ours[0]]) == {"exp_avg", "exp_avg_sq"}
