# SPDX-License-Identifier: Apache-2.0
"""The peak of a train step on one rank: states, activations of the microbatches in flight, logits, and workspaces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mrl.config.model import ModelSizes
from mrl.plan.activations import BF16, FP32, Row, backward_bytes, kept_bytes
from mrl.plan.states import States

# Bytes of each logit at the worst moment: of a whole row in bfloat16 and float32; of chunks as
# tests/long/test_memory_long.py measures.
WHOLE_LOGIT, CHUNK_LOGIT = BF16 + FP32, 7


@dataclass(frozen=True)
class Stage:
    """Computation of a rank of a pipeline stage."""

    chunks: Sequence[tuple[Sequence[str], float]]
    """Layers, and microbatches whose activations are kept at the worst moment."""
    is_last: bool = True
    extra_outputs: int = 0
    """MTP depths, each with logits of its own."""


def microbatches_in_flight(
    pp_rank: int, pp: int, vpp: int, num_microbatches: int, group: int | None = None
) -> list[float]:
    """Each chunk's microbatches in flight under 1F1B and interleaved (megatron/core/pipeline_parallel/schedules.py)."""
    if vpp == 1:
        return [min(pp - pp_rank, num_microbatches)]
    group = group or pp
    left = min(2 * (pp - pp_rank - 1) + (vpp - 1) * group + 1, num_microbatches * vpp)
    counts = [0.0] * vpp
    chunk = 0
    while left > 0:
        counts[chunk % vpp] += min(group, left)
        left, chunk = left - group, chunk + 1
    return counts


def activation_bytes(shape: ModelSizes, stage: Stage, row: Row) -> float:
    """Bytes kept by all microbatches in flight."""
    ends = 2 * BF16 * row.sharded_tokens * shape.hidden * (1 + stage.extra_outputs) if stage.is_last else 0.0
    kinds = [(layer, number * count) for layers, count in stage.chunks for layer, number in Counter(layers).items()]
    return ends + sum(number * kept_bytes(shape, layer, row) for layer, number in kinds)


def logits_bytes(
    shape: ModelSizes, stage: Stage, row: Row, logit_bytes: int = WHOLE_LOGIT, chunk_tokens: int | None = None
) -> float:
    """Returns the worst moment of the last stage's output layer."""
    if not stage.is_last:
        return 0.0
    columns = shape.vocabulary / row.tp
    if chunk_tokens is not None:
        # Chunks keep a float32 gradient of the output layer meanwhile.
        return CHUNK_LOGIT * min(chunk_tokens, row.tokens) * columns + FP32 * columns * shape.hidden
    return (logit_bytes + BF16 * stage.extra_outputs) * row.tokens * columns


def persistent_bytes(shape: ModelSizes, stage: Stage, row: Row, *, pp: int, workspaces: float) -> float:
    """Bytes kept between steps besides states: workspaces, tensors at stage borders, output layer's gathered input."""
    stream = BF16 * row.sharded_tokens * shape.hidden
    borders = 2 * len(stage.chunks) * stream if pp > 1 else 0.0
    gathered = BF16 * row.tokens * shape.hidden if stage.is_last and row.is_sequence_parallel else 0.0
    return workspaces + borders + gathered


def train_peak(
    states: States, shape: ModelSizes, stage: Stage, row: Row, *, logits: float, persistent: float
) -> dict[str, float]:
    """Bytes of a step's worst moment: the last microbatch's logits, the widest layer's backward pass, or the update."""
    activations = activation_bytes(shape, stage, row)
    backward = max(
        (backward_bytes(shape, layer, row) for layers, _ in stage.chunks for layer in set(layers)), default=0.0
    )
    moment = max(logits, backward)
    if activations + moment < states.gradient_copy:
        activations, moment = 0.0, states.gradient_copy
    return {
        "weights": states.weights,
        "gradients": states.gradients,
        "optimizer": states.optimizer,
        "activations": activations,
        "logits or backward": moment,
        "buffers": persistent,
    }
