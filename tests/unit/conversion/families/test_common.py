# SPDX-License-Identifier: Apache-2.0
"""Coordinates and pipeline stages against hand-written tables of Megatron's order."""

from __future__ import annotations

import pytest

from conversion.boxes import Slot
from conversion.families.common import MegatronCoords, MegatronParallel, VllmParallel
from conversion.families.registry import FAMILIES, family
from tests.proof.models import MODELS
from tests.tiny import TINY_CONFIG as TINY


def test_ranks_run_through_tp_then_dp_then_pp_and_experts_through_ep():
    parallel = MegatronParallel(tp=2, pp=2, ep=2)
    # World 8 = pp 2 x dp 2 x tp 2; for experts pp 2 x edp 2 x ep 2.
    found = [parallel.coords_of(rank, 8) for rank in range(8)]
    assert [(coords.tp, coords.pp, coords.ep, coords.etp) for coords in found] == [
        (0, 0, 0, 0),
        (1, 0, 1, 0),
        (0, 0, 0, 0),
        (1, 0, 1, 0),
        (0, 1, 0, 0),
        (1, 1, 1, 0),
        (0, 1, 0, 0),
        (1, 1, 1, 0),
    ]


def test_expert_tensor_parallel_ranks_come_before_expert_parallel_ones():
    parallel = MegatronParallel(tp=4, ep=2, etp=2)
    assert [(parallel.coords_of(rank, 4).ep, parallel.coords_of(rank, 4).etp) for rank in range(4)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]


def test_context_parallel_ranks_are_replicas():
    parallel = MegatronParallel(tp=2, cp=2)
    assert [parallel.coords_of(rank, 4).tp for rank in range(4)] == [0, 1, 0, 1]


def test_sizes_that_do_not_divide_the_world_are_refused():
    with pytest.raises(ValueError, match=r"tp\*cp\*pp=4 does not divide the world size 6"):
        MegatronParallel(tp=2, pp=2).coords_of(0, 6)
    with pytest.raises(ValueError, match=r"etp\*ep\*pp=4 does not divide the world size 2"):
        MegatronParallel(tp=2, ep=4).coords_of(0, 2)


@pytest.mark.parametrize(
    ("pp", "first", "last", "num_layers", "sizes"),
    [
        (1, None, None, 7, [7]),
        (2, None, None, 8, [4, 4]),
        (2, 3, None, 7, [3, 4]),
        (2, None, 3, 7, [4, 3]),
        (2, 5, 2, 7, [5, 2]),
        (4, 2, 1, 9, [2, 3, 3, 1]),
        (4, 1, None, 10, [1, 3, 3, 3]),
    ],
)
def test_layers_go_to_stages_in_order(pp: int, first: int | None, last: int | None, num_layers: int, sizes: list[int]):
    parallel = MegatronParallel(pp=pp, num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last)
    stages = [parallel.layers_of(stage, num_layers) for stage in range(pp)]
    assert [len(stage) for stage in stages] == sizes
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))


@pytest.mark.parametrize(("pp", "first", "last"), [(2, None, None), (3, 2, None), (2, 3, 3), (2, 8, None)])
def test_stages_that_would_lose_layers_are_refused(pp: int, first: int | None, last: int | None):
    parallel = MegatronParallel(pp=pp, num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last)
    with pytest.raises(ValueError, match="set num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage"):
        parallel.layers_of(0, 7)


def test_layers_are_counted_within_the_stage_and_ends_lie_on_the_outer_stages():
    parallel = MegatronParallel(pp=2, num_layers_in_first_pipeline_stage=3)
    first, last = (
        family(TINY).megatron_layout(TINY, parallel, MegatronCoords(pp=stage), "float32") for stage in range(2)
    )
    outer = [
        Slot(name) for name in ("embedding.word_embeddings.weight", "decoder.final_norm.weight", "output_layer.weight")
    ]
    assert [slot in first for slot in outer] == [True, False, False]
    assert [slot in last for slot in outer] == [False, True, True]
    # Layer 3, the attention layer, is the first of the last stage.
    (piece,) = last[Slot("decoder.layers.0.self_attention.linear_proj.weight")].pieces
    assert piece.name == "backbone.layers.3.mixer.o_proj.weight"


@pytest.mark.parametrize(
    ("pp", "num_layers", "sizes"),
    [(1, 7, [7]), (2, 8, [4, 4]), (2, 7, [4, 3]), (3, 5, [2, 2, 1]), (4, 9, [2, 2, 3, 2]), (4, 11, [3, 3, 3, 2])],
)
def test_layers_left_over_go_to_the_stages_before_the_last(pp: int, num_layers: int, sizes: list[int]):
    stages = [VllmParallel(pp=pp).layers_of(stage, num_layers) for stage in range(pp)]
    assert [len(stage) for stage in stages] == sizes
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))


def test_engine_expert_parallelism_is_none_or_of_whole_groups():
    assert [
        (one.num_groups, one.num_workers) for one in (VllmParallel(4, 4), VllmParallel(2, 8), VllmParallel(4, pp=2))
    ] == [
        (1, 4),
        (4, 8),
        (1, 8),
    ]
    with pytest.raises(ValueError, match="expert_parallel_size=2 must be 1 or a multiple of tensor_parallel_size=4"):
        VllmParallel(4, 2)
    with pytest.raises(
        ValueError, match="expert_parallel_size=4 must be at most tensor_parallel_size=2 with pipeline stages"
    ):
        VllmParallel(2, 4, pp=2)


def test_an_unknown_model_type_is_refused():
    with pytest.raises(ValueError, match=r"model_type='bert' is not supported; use one of \['deepseek_v3', "):
        family({"model_type": "bert"})
    with pytest.raises(ValueError, match=r"model_type='kimi_k2' is a name for 'deepseek_v3' .*; write 'deepseek_v3'"):
        family({"model_type": "kimi_k2"})


def test_the_proof_covers_every_family():
    assert set(MODELS) == set(FAMILIES)
