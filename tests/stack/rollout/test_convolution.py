# SPDX-License-Identifier: Apache-2.0
"""The short convolution of many prompts at once has the bits of vLLM's, which takes one prompt after the other."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_are_those_of_vllm(dtype: torch.dtype) -> None:
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu

    from mrl.rollout.cpu_delta import causal_conv1d

    torch.manual_seed(0)
    for num_sequences in (1, 2, 7, 40):
        lengths = torch.randint(0, 30, (num_sequences,))
        starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
        num_slots = num_sequences + 3
        slots = torch.randperm(num_slots)[:num_sequences].int()
        slots[num_sequences // 2] = -1 if num_sequences > 2 else slots[num_sequences // 2]
        x = torch.randn(int(starts[-1]), 96, dtype=dtype).T
        weight, bias = torch.randn(96, 4, dtype=dtype), torch.randn(96, dtype=dtype)
        states = torch.randn(num_slots, 96, 3, dtype=dtype)
        expected_states, found_states = states.clone(), states.clone()
        # Slots that nobody has used hold anything.
        has_state = torch.rand(num_sequences) < 0.5
        for slot, has in zip(slots.tolist(), has_state.tolist(), strict=True):
            if not has and slot >= 0:
                expected_states[slot] = found_states[slot] = torch.nan
        arguments = {
            "activation": "silu",
            "has_initial_state": has_state,
            "cache_indices": slots,
            "query_start_loc": starts,
        }
        expected = causal_conv1d_fn_cpu(x, weight, bias, conv_states=expected_states, pad_slot_id=-1, **arguments)
        found = causal_conv1d(x, weight, bias, conv_states=found_states, **arguments)
        for (start, stop), slot in zip(starts.unfold(0, 2, 1).tolist(), slots.tolist(), strict=True):
            if slot >= 0:
                assert torch.equal(found[:, start:stop], expected[:, start:stop])
        assert torch.equal(found_states.nan_to_num(), expected_states.nan_to_num())
