# SPDX-License-Identifier: Apache-2.0
"""nemotron_h: kinds of layers, dtypes, multi-token prediction, arguments and refusals."""

from __future__ import annotations

import math

import pytest

from conversion.boxes import Slot, tiling_fault
from conversion.families.common import MegatronCoords, MegatronParallel, VllmParallel, read_by_engines
from conversion.families.nemotron_h import layer_pattern
from conversion.families.registry import family
from tests.tiny import TINY_CONFIG as TINY
from tests.unit.conversion.dense import build_layout, index_arrays

FAMILY = family(TINY)


def test_both_forms_of_the_layer_list_are_read():
    kinds = ["linear_attention", "moe", "linear_attention", "full_attention", "moe", "linear_attention", "mlp"]
    assert layer_pattern({"layers_block_type": kinds}) == "MEM*EM-"
    assert layer_pattern({"hybrid_override_pattern": "MEM*EM-"}) == "MEM*EM-"
    for broken in (
        {},
        {"layers_block_type": ["conv"]},
        {"hybrid_override_pattern": "MXE"},
        {"hybrid_override_pattern": ""},
    ):
        with pytest.raises(ValueError, match="config.json"):
            layer_pattern(broken)
    with pytest.raises(ValueError, match="num_hidden_layers=3, but 2 layers are listed"):
        layer_pattern({"hybrid_override_pattern": "ME", "num_hidden_layers": 3})


FLAVOURS = ("local", "te")


def test_virtual_stages_are_refused():
    with pytest.raises(ValueError, match="virtual_pipeline_model_parallel_size=2: Megatron's hybrid models"):
        FAMILY.megatron_layout(TINY, MegatronParallel(pp=2, vpp=2), MegatronCoords(), "float32")


def test_fixed_dtypes_in_a_bfloat16_run():
    megatron = FAMILY.megatron_layout(TINY, MegatronParallel(), MegatronCoords(), "bfloat16")
    assert {slot.name.split(".")[-1] for slot, content in megatron.items() if content.dtype == "float32"} == {
        "expert_bias"
    }


def test_an_engine_layout_has_the_dtypes_of_the_live_model():
    live = (
        ("model.layers.0.mixer.A", "float32"),
        ("model.layers.1.mixer.gate.weight", "float16"),
        ("unknown", "float32"),
    )
    vllm = FAMILY.vllm_layout(TINY, VllmParallel(), 0, "bfloat16", live)
    assert {slot.name: content.dtype for slot, content in vllm.items() if content.dtype != "bfloat16"} == dict(live[:2])
    assert FAMILY.vllm_layout(TINY, VllmParallel(), 0, "bfloat16", (*live,)) is vllm
    with pytest.raises(ValueError, match="gate.weight is float8_e4m3fn in the engine"):
        FAMILY.vllm_layout(
            TINY, VllmParallel(), 0, "bfloat16", (("model.layers.1.mixer.gate.weight", "float8_e4m3fn"),)
        )


def test_vllm_keeps_minus_exp_of_a_log():
    layout = FAMILY.vllm_layout(TINY, VllmParallel(), 0, "float32")
    transforms = {
        piece.transform for content in layout.values() for piece in content.pieces if piece.name.endswith("A_log")
    }
    assert transforms == {"neg_exp"}
    assert {
        piece.transform for content in layout.values() for piece in content.pieces if not piece.name.endswith("A_log")
    } == {None}


@pytest.mark.parametrize("parallel", [VllmParallel(1), VllmParallel(2), VllmParallel(2, 2), VllmParallel(2, 4)])
def test_every_layout_tiles_its_slots(parallel: VllmParallel):
    layouts = [FAMILY.vllm_layout(TINY, parallel, worker, "float32") for worker in range(parallel.num_workers)]
    layouts.append(FAMILY.torch_dist_layout(TINY, "float32", 512))
    for layout in layouts:
        for content in layout.values():
            assert (
                tiling_fault(content.shape, [piece.local for piece in content.pieces] + list(content.padding)) is None
            )


def test_expert_parallel_workers_hold_whole_experts():
    canonical = index_arrays(FAMILY.canonical(TINY))
    workers = [
        build_layout(FAMILY.vllm_layout(TINY, VllmParallel(2, 2), worker, "float32"), canonical) for worker in range(2)
    ]
    slot = Slot("model.layers.1.mixer.experts.routed_experts.w13_weight")
    for worker in range(2):
        for index in range(4):
            expert = canonical[f"backbone.layers.1.mixer.experts.{4 * worker + index}.up_proj.weight"]
            assert (workers[worker][slot][index] == expert).all()


def test_megatron_arguments_follow_the_config():
    arguments = FAMILY.megatron_arguments(
        TINY | dict(layer_norm_epsilon=1e-5, n_group=4, topk_group=2, num_experts_per_tok=4)
    )
    transformer, model = arguments["transformer"], arguments["model"]
    assert transformer["moe_router_topk_scaling_factor"] == 2.5
    assert (transformer["moe_router_num_groups"], transformer["moe_router_group_topk"]) == (4, 2)
    assert (transformer["num_query_groups"], transformer["kv_channels"], transformer["mamba_num_groups"]) == (2, 32, 2)
    assert (model["hybrid_override_pattern"], model["vocab_size"], model["position_embedding_type"]) == (
        "MEM*EME",
        264,
        "none",
    )
    assert FAMILY.megatron_arguments(TINY)["transformer"]["moe_router_num_groups"] is None
    with pytest.raises(ValueError, match="num_experts_per_tok=2 with topk_group=2 is not supported"):
        FAMILY.megatron_arguments(TINY | dict(n_group=4, topk_group=2))
    assert (
        "num_moe_experts"
        not in FAMILY.megatron_arguments(TINY | dict(hybrid_override_pattern="M*-", num_hidden_layers=3))["transformer"]
    )
    dense = TINY | dict(hybrid_override_pattern="*-", num_hidden_layers=2, layer_norm_epsilon=1e-6)
    assert FAMILY.megatron_arguments(dense)["transformer"]["layernorm_epsilon"] == 1e-6


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_bias", True),
        ("mlp_bias", True),
        ("conv_kernel", 3),
        ("mlp_hidden_act", "silu"),
        ("moe_latent_size", 0),
        ("norm_topk_prob", False),
        ("num_nextn_predict_layers", -1),
        ("quantization_config", {"quant_method": "fp8"}),
        ("tie_word_embeddings", True),
        ("layer_norm_epsilon", 1e-6),
        ("time_step_limit", [0.001, 0.1]),
        ("num_attention_heads", 3),
        ("mamba_num_heads", 3),
        ("hidden_size", None),
        ("vocab_size", -1),
    ],
)
def test_what_we_do_not_do_is_refused_by_name(key: str, value: object):
    with pytest.raises(ValueError, match=rf"config.json: {key}="):
        FAMILY.canonical(TINY | {key: value})


MTP = TINY | dict(num_nextn_predict_layers=2, mtp_layers_block_type=["full_attention", "moe"])


def test_layers_of_multi_token_prediction_are_on_the_last_stage():
    shapes = FAMILY.canonical(MTP)
    own = {name: shape for name, shape in shapes.items() if name.startswith("mtp.")}
    assert shapes.keys() - own.keys() == FAMILY.canonical(TINY).keys()
    # As the index of NVIDIA-Nemotron-3.5-Lightning lists them: the layers of all steps are numbered through.
    assert (
        own["mtp.layers.0.eh_proj.weight"],
        own["mtp.layers.2.enorm.weight"],
        own["mtp.layers.3.final_layernorm.weight"],
    ) == (
        (64, 128),
        (64,),
        (64,),
    )
    assert not own.keys() & {"mtp.layers.1.enorm.weight", "mtp.layers.0.final_layernorm.weight"}
    assert {"mtp.layers.0.mixer.q_proj.weight", "mtp.layers.1.mixer.experts.7.down_proj.weight"} <= own.keys()
    keys = {slot.name for slot in FAMILY.torch_dist_layout(MTP, "float32")}
    # As megatron-core from 0.17 on names the modules of its hybrid models.
    assert {
        "mtp.layers.1.eh_proj.weight",
        "mtp.layers.1.mtp_model_layer.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "mtp.layers.1.mtp_model_layer.layers.1.mlp.experts.experts.linear_fc1.weight",
        "mtp.layers.0.mtp_model_layer.layers.1.mlp.router.expert_bias",
    } <= keys
    for flavour in FLAVOURS:
        stages = [
            FAMILY.megatron_layout(MTP, MegatronParallel(pp=7), MegatronCoords(pp=pp), "bfloat16", flavour)
            for pp in range(7)
        ]
        found = [{slot.name for slot in stage if slot.name.startswith("mtp.")} for stage in stages]
        assert [len(names) > 0 for names in found] == [False] * 6 + [True]
        # A rank has them under the names of its layer specs, which fuse norms or do not.
        fused = "mtp.layers.0.mtp_model_layer.layers.0.self_attention.linear_qkv.layer_norm_weight"
        assert (fused in found[-1]) == (flavour == "te")


def test_a_drafter_holds_these_layers_only_where_it_is_asked_for():
    plain, drafting = (
        FAMILY.vllm_layout(MTP | dict(num_nextn_predict_layers=1), VllmParallel(2, 2, drafts), 0, "float32")
        for drafts in (False, True)
    )
    added = {slot.name: content.shape for slot, content in drafting.items() if slot not in plain}
    assert all(name.startswith("drafter.model.layers.") for name in added)
    assert added["drafter.model.layers.0.eh_proj.weight"] == (32, 128)
    assert added["drafter.model.layers.1.mixer.experts.routed_experts.w13_weight"] == (4, 64, 64)
    sources = FAMILY.megatron_layout(
        MTP | dict(num_nextn_predict_layers=1), MegatronParallel(), MegatronCoords(), "float32"
    )
    assert read_by_engines(sources, VllmParallel(has_drafter=True)) is sources
    assert read_by_engines(sources, VllmParallel()) == FAMILY.megatron_layout(
        TINY, MegatronParallel(), MegatronCoords(), "float32"
    )
    with pytest.raises(ValueError, match="no MTP layers to propose tokens with; use method ngram"):
        FAMILY.vllm_layout(TINY, VllmParallel(has_drafter=True), 0, "float32")


@pytest.mark.parametrize("pattern", [dict(mtp_layers_block_type=["mamba"]), dict(mtp_hybrid_override_pattern="M*")])
def test_layers_that_no_drafter_knows_are_refused(pattern: dict[str, object]):
    with pytest.raises(ValueError, match="config.json: mtp layers .* only attention and moe"):
        FAMILY.canonical(TINY | dict(num_nextn_predict_layers=1) | pattern)


@pytest.mark.parametrize("limit", [None, [0.0, math.inf], [0, "Infinity"], [0.0, {"__float__": "Infinity"}]])
def test_every_spelling_of_no_limit_is_accepted(limit: object):
    assert FAMILY.canonical(TINY | {"time_step_limit": limit})


def test_a_layout_that_does_not_divide_the_model_is_refused():
    with pytest.raises(
        ValueError,
        match="tensor_model_parallel_size=4 does not divide the 2 heads or groups in section B of backbone.layers.0",
    ):
        FAMILY.megatron_layout(TINY, MegatronParallel(tp=4), MegatronCoords(), "float32")
    with pytest.raises(ValueError, match="expert_model_parallel_size=3 does not divide the 8 experts"):
        FAMILY.megatron_layout(TINY, MegatronParallel(ep=3), MegatronCoords(), "float32")
    with pytest.raises(ValueError, match=r"vllm_cfg.tensor_parallel_size=3 does not divide"):
        FAMILY.vllm_layout(TINY, VllmParallel(3), 0, "float32")
