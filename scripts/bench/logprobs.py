# SPDX-License-Identifier: Apache-2.0
"""Peak memory of log-probabilities and their gradients, three ways: a JSON line per case, and docs/data/logprobs.json.

Usage: python -m scripts.bench.logprobs [--no-record]

Each case has a process of its own, one rank, whose memory above that of weight and hidden states is what is reported.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from scripts.bench.turns import alone, bench_parser, count_memory, report
from tests.long.record import Row
from tests.stack.conversion.children import memory

# A rank's columns of 131,072 at TP 2. The hidden size does not matter for what is compared; products of bfloat16 take
# long on older hosts.
COLUMNS, HIDDEN = 65_536, 32
PASSES = ("logprobs", "logprobs and gradients")


@dataclass(frozen=True)
class Case:
    """One way to compute them."""

    method: str
    tokens: int
    needs_gradients: bool
    chunk_tokens: int | None = None


CASES = [
    Case(method, tokens, needs_gradients, chunk_tokens)
    for needs_gradients in (False, True)
    for method, tokens, chunk_tokens in (
        ("log_softmax of float32 logits", 4096, None),
        ("whole row", 4096, None),
        ("chunks", 4096, 512),
        ("chunks", 16_384, 512),
    )
]


def measure(case: Case) -> Row:
    """The row of one case; what it is a share of comes later."""
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
    base, start = count_memory(), time.monotonic()
    logprobs = compute(case, hidden, weight, labels)
    if case.needs_gradients:
        logprobs.mean().backward()
    seconds = time.monotonic() - start
    peak = memory("VmHWM") - base
    dist.destroy_process_group()
    return {
        "pass": PASSES[case.needs_gradients],
        "method": case.method,
        "tokens": case.tokens,
        "columns": COLUMNS,
        "chunk tokens": case.chunk_tokens,
        "peak gb": round(peak / 1e9, 2),
        "seconds": round(seconds, 1),
    }


def compute(case: Case, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of every label by the method of the case."""
    from mrl.policy.logprobs import CHUNK_TOKENS, OutputColumns, TokenDistribution, scores_of

    if case.method.startswith("log_softmax"):
        return torch.log_softmax(F.linear(hidden, weight).float(), dim=-1).gather(1, labels[:, None])[:, 0]
    group, distribution = dist.group.WORLD, TokenDistribution(COLUMNS)
    assert group is not None
    given = (F.linear(hidden, weight), None) if case.chunk_tokens is None else (hidden, weight)
    return scores_of(OutputColumns(*given, distribution, group, case.chunk_tokens or CHUNK_TOKENS), labels).logprobs_T


def rows() -> Iterator[Row]:
    """Every case, with its share of what log_softmax takes for as many tokens."""
    naive = dict[tuple, float]()
    for case in CASES:
        row, key = alone(measure, case), (case.needs_gradients, case.tokens)
        peak = float(row["peak gb"] or 0)
        if case.method.startswith("log_softmax"):
            naive[key] = peak
        yield row | {"of log_softmax": round(peak / (naive[key] or 1), 3) if key in naive else None}


if __name__ == "__main__":
    report("logprobs", rows(), bench_parser(__doc__).parse_args())
