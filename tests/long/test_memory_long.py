# SPDX-License-Identifier: Apache-2.0
"""Memory of log-probabilities and their gradients in chunks, against torch's `log_softmax` of float32 logits.

Each case has a process of its own, one rank, whose memory above that of weight and hidden states is what counts.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from scripts.bench.turns import alone, count_memory
from tests.stack.conversion.children import memory

pytestmark = [pytest.mark.long("parity"), pytest.mark.timeout(900)]

# A rank's columns of 131,072 at TP 2. The hidden size does not matter for what is compared; products of bfloat16 take
# long on older hosts.
COLUMNS, HIDDEN = 65_536, 32


@dataclass(frozen=True)
class Case:
    """One way to compute them; without `chunk_tokens`, torch's."""

    tokens: int
    needs_gradients: bool
    chunk_tokens: int | None


def peak_bytes(case: Case) -> int:
    """Most bytes of one pass, above what lies in memory before it."""
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1, timeout=timedelta(minutes=1)
    )
    hidden = torch.randn(case.tokens, HIDDEN, dtype=torch.bfloat16).requires_grad_(case.needs_gradients)
    weight = torch.randn(COLUMNS, HIDDEN, dtype=torch.bfloat16).div_(HIDDEN**0.5).requires_grad_(case.needs_gradients)
    labels = torch.randint(0, COLUMNS, (case.tokens,))
    compute(case, hidden[:8], weight, labels[:8])
    base = count_memory()
    logprobs = compute(case, hidden, weight, labels)
    if case.needs_gradients:
        logprobs.mean().backward()
    peak = memory("VmHWM") - base
    dist.destroy_process_group()
    return peak


def compute(case: Case, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of every label."""
    from mrl.policy.logprobs import OutputColumns, TokenDistribution, scores_of

    if case.chunk_tokens is None:
        return torch.log_softmax(F.linear(hidden, weight).float(), dim=-1).gather(1, labels[:, None])[:, 0]
    group = dist.group.WORLD
    assert group is not None
    columns = OutputColumns(hidden, weight, TokenDistribution(COLUMNS), group, case.chunk_tokens)
    return scores_of(columns, labels).logprobs_T


@pytest.mark.parametrize("needs_gradients", [False, True])
def test_logprobs_in_chunks_need_the_memory_of_a_chunk(needs_gradients: bool):
    plain, chunks, longer = (
        alone(peak_bytes, Case(tokens, needs_gradients, chunk_tokens))
        for tokens, chunk_tokens in ((4096, None), (4096, 512), (16_384, 512))
    )
    assert max(chunks, longer) <= 0.3 * plain
    # Four times as many tokens, hardly more memory.
    assert longer <= 1.25 * chunks
