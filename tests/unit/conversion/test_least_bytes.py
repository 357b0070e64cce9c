# SPDX-License-Identifier: Apache-2.0
"""The least bytes of hand-worked cases, and of a real model against its schedule."""

from __future__ import annotations

from conversion.boxes import Layout, Piece, Slot, SlotLayout
from conversion.families.common import MegatronParallel, VllmParallel
from conversion.families.registry import family
from conversion.reshard import reshard
from tests.tiny import TINY_CONFIG as TINY
from tests.unit.conversion.least_bytes import LeastBytes, least_bytes


def rows(start: int, stop: int) -> Layout:
    box = ((0, stop - start), (0, 4))
    return {Slot("w"): SlotLayout((stop - start, 4), "float32", (Piece("a", ((start, stop), (0, 4)), box),))}


def test_halves_on_two_nodes():
    # Each rank holds 64 of 128 bytes; two workers on each node want all.
    sources = {0: rows(0, 4), 1: rows(4, 8)}
    targets = {0: rows(0, 8), 2: rows(0, 8), 1: rows(0, 8), 3: rows(0, 8)}
    least = least_bytes(sources, targets, gpu_of={gpu: gpu for gpu in targets}, node_of={0: 0, 2: 0, 1: 1, 3: 1})
    assert least == LeastBytes(between_gpus=64 + 128 + 64 + 128, between_nodes=4 * 64)


def test_workers_of_a_node_that_want_overlapping_parts():
    sources, targets = {0: rows(0, 8)}, {1: rows(0, 6), 2: rows(2, 8)}
    least = least_bytes(sources, targets, gpu_of={1: 1, 2: 2}, node_of={0: 0, 1: 1, 2: 1})
    assert least == LeastBytes(between_gpus=192, between_nodes=192)


def test_a_schedule_moves_no_more_than_the_least():
    parallel, world_size = (
        MegatronParallel(tp=2, pp=2, ep=2, num_layers_in_first_pipeline_stage=3, num_layers_in_last_pipeline_stage=4),
        8,
    )
    found = family(TINY)
    sources = {
        rank: found.megatron_layout(TINY, parallel, parallel.coords_of(rank, world_size), "bfloat16")
        for rank in range(world_size)
    }
    targets = {gpu: found.vllm_layout(TINY, VllmParallel(2), gpu % 2, "bfloat16") for gpu in range(world_size)}
    places = dict(gpu_of={gpu: gpu for gpu in targets}, node_of={gpu: gpu // 4 for gpu in range(world_size)})
    moved = reshard(sources, targets, **places, buffer_bytes=1 << 20).link_bytes()
    least = least_bytes(sources, targets, **places)
    assert moved["node"] + moved["network"] == least.between_gpus
    assert moved["network"] == least.between_nodes > 0
