# SPDX-License-Identifier: Apache-2.0
"""Names and sizes of all families; stages, checkpoint keys, arguments and refusals of transformer decoders."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from conversion.boxes import Slot
from conversion.families.common import HfConfig, MegatronCoords, MegatronParallel, VllmParallel
from conversion.families.registry import FAMILIES, family
from conversion.families.rope import rope_settings
from conversion.families.settings import Settings, known_keys
from tests import models
from tests.sources import ROOT
from tests.unit.conversion.dense import build_layout, index_arrays

DECODERS = ("glm4_moe", "llama", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")

_CONFIGS = ROOT / "scripts" / "bench" / "models"
_HUB = {name: group["config"] for group in json.loads((_CONFIGS / "hub.json").read_text()) for name in group["ids"]}
QWEN3_30B, NANO_30B = (
    json.loads((_CONFIGS / f"{name}.config.json").read_text()) for name in ("qwen3_30b_a3b", "nemotron3_nano_30b_a3b")
)
LLAMA_31_8B, QWEN25_7B, QWEN3_06B = (
    _HUB[name] for name in ("meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-0.6B")
)
MIXTRAL_8X7B = dict(
    model_type="mixtral",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    num_local_experts=8,
    num_experts_per_tok=2,
    hidden_act="silu",
    rms_norm_eps=1e-5,
    rope_theta=1000000.0,
    max_position_embeddings=32768,
    sliding_window=None,
)


@pytest.fixture(scope="module", params=[*DECODERS, "deepseek_v3"])
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[HfConfig, dict[str, tuple[int, ...]]]:
    """config.json and the stored names and shapes of a tiny model, saved by transformers."""
    folder = models.save_model(tmp_path_factory.mktemp("hf"), request.param)
    return read_folder(folder)


def read_folder(folder: Path) -> tuple[HfConfig, dict[str, tuple[int, ...]]]:
    with safe_open(folder / "model.safetensors", framework="np") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    return json.loads((folder / "config.json").read_text()), stored


def tiny(model_type: str, **changes: object) -> HfConfig:
    return {"model_type": model_type, **models.TINY[model_type], "rope_theta": 10000.0, **changes}


def test_canonical_tensors_are_those_that_transformers_writes(saved: tuple[HfConfig, dict[str, tuple[int, ...]]]):
    hf_config, stored = saved
    assert family(hf_config).canonical(hf_config) == stored


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3_moe", dict(mlp_only_layers=[1], decoder_sparse_step=2)),
        ("llama", dict(tie_word_embeddings=True, head_dim=16)),
        ("deepseek_v3", dict(q_lora_rank=None, n_shared_experts=1)),
        ("nemotron_h", dict(hybrid_override_pattern="MEM*EM-", num_hidden_layers=7)),
        ("nemotron_h", dict(moe_latent_size=32)),
        ("nemotron_h", dict(n_groups=1)),
    ],
)
def test_canonical_tensors_of_rarer_forms(model_type: str, changes: dict[str, object], tmp_path: Path):
    hf_config, stored = read_folder(models.save_model(tmp_path, model_type, 0, **changes))
    assert family(hf_config).canonical(hf_config) == stored


@pytest.mark.parametrize(
    ("hf_config", "num_parameters"),
    [
        (QWEN3_30B, 30_532_122_624),
        (LLAMA_31_8B, 8_030_261_248),
        (MIXTRAL_8X7B, 46_702_792_704),
        (QWEN25_7B, 7_615_616_512),
        (QWEN3_06B, 596_049_920),
        (_HUB["Qwen/Qwen1.5-MoE-A2.7B"], 14_315_784_192),
        (_HUB["Qwen/Qwen2-57B-A14B"], 57_408_658_944),
        # Without the layer of multi-token prediction behind the last, as transformers and vLLM read them.
        (_HUB["zai-org/GLM-4.5-Air"], 106_852_251_264),
        (_HUB["zai-org/GLM-4.6"], 352_797_829_024),
        (NANO_30B, 31_577_940_288),
        # The drafter is among those that Megatron-Bridge's verification card counts.
        (next(config for name, config in _HUB.items() if "Lightning" in name), 32_913_266_240),
    ],
)
def test_published_models_have_their_published_sizes(hf_config: HfConfig, num_parameters: int):
    assert sum(map(math.prod, family(hf_config).canonical(hf_config).values())) == num_parameters


# pp, vpp, stages with a given number of layers, and the layers of each stage's chunks, as Megatron's own comments lay
# them out.
STAGES = [
    (MegatronParallel(), 4, [[[0, 1, 2, 3]]]),
    (MegatronParallel(pp=2, vpp=2), 8, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
    (MegatronParallel(pp=2, vpp=4), 8, [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]),
    (
        MegatronParallel(pp=4, vpp=2, num_layers_in_first_pipeline_stage=2, num_layers_in_last_pipeline_stage=2),
        12,
        [[[0], [6]], [[1, 2], [7, 8]], [[3, 4], [9, 10]], [[5], [11]]],
    ),
    (MegatronParallel(pp=2, vpp=2, num_layers_in_first_pipeline_stage=2), 6, [[[0], [3]], [[1, 2], [4, 5]]]),
]


@pytest.mark.parametrize(("parallel", "num_layers", "expected"), STAGES)
def test_chunks_are_interleaved_over_the_stages(
    parallel: MegatronParallel, num_layers: int, expected: list[list[list[int]]]
):
    found = [
        [list(parallel.layers_of(stage, num_layers, chunk)) for chunk in range(parallel.vpp)]
        for stage in range(parallel.pp)
    ]
    assert found == expected


def test_checkpoints_have_keys_by_layer_or_stacked_layers():
    hf_config = tiny("qwen3_moe")
    found = family(hf_config)
    canonical = index_arrays(found.canonical(hf_config))
    plain = build_layout(found.torch_dist_layout(hf_config, "float32"), canonical)
    stacked = build_layout(found.torch_dist_layout(hf_config, "float32", stacked_layers=True), canonical)
    experts = plain[Slot("decoder.layers.2.mlp.experts.experts.linear_fc1.weight")]
    assert experts.shape == (8, 2 * 64, 64)
    assert np.array_equal(experts[5, :64], canonical["model.layers.2.mlp.experts.5.gate_proj.weight"])
    assert np.array_equal(experts[5, 64:], canonical["model.layers.2.mlp.experts.5.up_proj.weight"])
    for slot, array in stacked.items():
        assert np.array_equal(
            array, plain[slot] if slot in plain else np.stack([plain[of_layer(slot, layer)] for layer in range(4)])
        )
    assert len(plain) - len(stacked) == 3 * sum(slot not in plain for slot in stacked)
    # Layers that differ cannot be stacked; Megatron then writes a key for each, too.
    mixed = tiny("qwen3_moe", mlp_only_layers=[0])
    assert found.torch_dist_layout(mixed, "float32", stacked_layers=True) == found.torch_dist_layout(mixed, "float32")


def of_layer(slot: Slot, layer: int) -> Slot:
    return Slot(slot.name.replace("decoder.layers.", f"decoder.layers.{layer}."))


def test_equal_coordinates_give_the_same_object():
    found = FAMILIES["qwen3"]
    first, second = (
        found.megatron_layout(dict(tiny("qwen3")), MegatronParallel(tp=2), MegatronCoords(tp=1), "float32", "te")
        for _ in range(2)
    )
    assert first is second
    assert found.vllm_layout(tiny("qwen3"), VllmParallel(2), 1, "float32") is found.vllm_layout(
        tiny("qwen3"), VllmParallel(2), 1, "float32"
    )
    other = found.megatron_layout(
        tiny("qwen3", vocab_size=200), MegatronParallel(tp=2), MegatronCoords(tp=1), "float32", "te"
    )
    assert other != first


def test_megatron_arguments_follow_the_config():
    moe = family(QWEN3_30B).megatron_arguments(QWEN3_30B)
    assert {
        key: moe["transformer"][key]
        for key in ("qk_layernorm", "kv_channels", "num_query_groups", "moe_router_pre_softmax")
    } == {
        "qk_layernorm": True,
        "kv_channels": 128,
        "num_query_groups": 4,
        "moe_router_pre_softmax": False,
    }
    unnormalised = QWEN3_30B | dict(norm_topk_prob=False, mlp_only_layers=[3], num_hidden_layers=4)
    transformer = family(QWEN3_30B).megatron_arguments(unnormalised)["transformer"]
    assert (transformer["moe_router_pre_softmax"], transformer["moe_layer_freq"]) == (True, [1, 1, 1, 0])
    llama = family(LLAMA_31_8B).megatron_arguments(LLAMA_31_8B)
    assert (llama["model"]["rope_scaling"], llama["model"]["rope_scaling_factor"], llama["model"]["rotary_base"]) == (
        True,
        8.0,
        500000.0,
    )
    assert (llama["transformer"]["kv_channels"], llama["transformer"]["add_qkv_bias"]) == (128, False)
    assert family(QWEN25_7B).megatron_arguments(QWEN25_7B)["transformer"]["add_qkv_bias"] is True
    assert family(QWEN3_06B).megatron_arguments(QWEN3_06B)["model"]["share_embeddings_and_output_weights"] is True
    with pytest.raises(ValueError, match="num_experts_per_tok=1 with normalised weights is not supported"):
        family(QWEN3_30B).megatron_arguments(QWEN3_30B | dict(num_experts_per_tok=1))


def test_both_spellings_of_rotary_positions_are_read():
    new = {key: value for key, value in LLAMA_31_8B.items() if not key.startswith("rope_")}
    scaling = LLAMA_31_8B["rope_scaling"]
    assert isinstance(scaling, dict)
    new["rope_parameters"] = scaling | dict(rope_theta=500000.0)
    assert family(new).megatron_arguments(new) == family(LLAMA_31_8B).megatron_arguments(LLAMA_31_8B)


YARN = dict(rope_type="yarn", factor=4.0)
LONG = YARN | dict(rope_theta=1e6, original_max_position_embeddings=1024)


@pytest.mark.parametrize(
    "changes",
    [
        dict(rope_scaling=LONG),
        dict(rope_scaling=dict(type="yarn", factor=2.0, original_max_position_embeddings=512), rope_theta=5e5),
        dict(rope_scaling=LONG, original_max_position_embeddings=1024),
        dict(rope_scaling=YARN | dict(rope_theta=1e6), original_max_position_embeddings=512),
        dict(rope_scaling=YARN, rope_theta=3e4),
        dict(rope_parameters=None),
        dict(rope_scaling=dict(rope_type="default", rope_theta=3e4), rope_parameters=LONG),
        dict(rope_scaling=None, rope_parameters=LONG, rope_theta=3e4),
        dict(rope_scaling={}, rope_theta=3e4),
    ],
)
def test_rotary_positions_said_twice_are_those_of_transformers(changes: dict[str, object], tmp_path: Path):
    hf_config = {**tiny("qwen3", rope_parameters=dict(rope_type="default", rope_theta=1e6)), **changes}
    if "rope_theta" not in changes:
        del hf_config["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    config = Qwen3Config.from_pretrained(tmp_path)
    Qwen3RotaryEmbedding(config)  # which completes the mapping that it reads
    expected: dict[str, object] = {**(config.rope_parameters or {})}
    base, kind, given = rope_settings(Settings(hf_config, known_keys()["qwen3"]["defaults"]))
    numbers = ("factor", "original_max_position_embeddings")
    assert (base, kind, *map(given.get, numbers)) == (
        expected["rope_theta"],
        expected["rope_type"],
        *map(expected.get, numbers),
    )


def test_latent_attention_has_yarn_of_its_own():
    hf_config = tiny("deepseek_v3", rope_parameters=LONG | dict(mscale=1.0, mscale_all_dim=1.0))
    arguments = FAMILIES["deepseek_v3"].megatron_arguments(hf_config)["transformer"]
    given = ("rope_type", "rotary_scaling_factor", "beta_fast", "beta_slow")
    assert [arguments[name] for name in given] == ["yarn", 4.0, 32.0, 1.0]


def test_a_base_that_transformers_would_not_see_is_refused():
    """transformers takes its default of 10,000 here, without a word."""
    hf_config = {**tiny("qwen3", rope_parameters=dict(rope_type="default", rope_theta=1e6), rope_scaling=YARN)}
    del hf_config["rope_theta"]
    with pytest.raises(
        ValueError, match=r"rope_scaling replaces rope_parameters, and lacks rope_theta; give it 1000000.0 there"
    ):
        family(hf_config).canonical(hf_config)


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("llama", "attention_bias", True),
        ("llama", "mlp_bias", True),
        ("llama", "hidden_act", "gelu"),
        ("llama", "quantization_config", {"quant_method": "fp8"}),
        ("llama", "compression_config", {"quant_method": "compressed-tensors"}),
        ("llama", "head_dtype", "float32"),
        ("llama", "rms_norm_eps", None),
        ("llama", "tie_word_embeddings", "yes"),
        ("mixtral", "sliding_window", 1024),
        ("mixtral", "router_jitter_noise", 0.1),
        ("mixtral", "num_local_experts", 0),
        ("qwen2", "head_dim", 64),
        ("qwen2_moe", "head_dim", 64),
        ("qwen2_moe", "qkv_bias", False),
        ("qwen2", "layer_types", ["full_attention", "sliding_attention"]),
        ("qwen3", "attention_bias", True),
        ("qwen3", "partial_rotary_factor", 0.5),
        ("qwen3", "is_causal", False),
        ("qwen3", "dual_chunk_attention_config", {"chunk_size": 8192}),
        ("qwen3_moe", "mlp_only_layers", 3),
        ("qwen3_moe", "shared_expert_intermediate_size", 64),
        ("llama", "num_attention_heads", 3),
        ("glm4_moe", "num_attention_heads", 3),
        ("glm4_moe", "norm_topk_prob", False),
        ("glm4_moe", "partial_rotary_factor", 1.5),
        ("glm4_moe", "attention_bias", "some"),
        ("deepseek_v3", "norm_topk_prob", False),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "first_k_dense_replace", None),
        ("deepseek_v3", "quantization_config", {"quant_method": "fp8"}),
    ],
)
def test_what_we_do_not_do_is_refused_by_name(model_type: str, key: str, value: object):
    hf_config = tiny(model_type, **{key: value})
    with pytest.raises(ValueError, match=f"config.json: {key}="):
        family(hf_config).canonical(hf_config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(rope_parameters=LONG | dict(original_max_position_embeddings=None)),
            "original_max_position_embeddings=None must be a positive integer; write the model's own into the file",
        ),
        # The config of transformers shows the mapping's, and its model computes with the other.
        (
            dict(rope_parameters=LONG, original_max_position_embeddings=2048),
            "original_max_position_embeddings=2048 stands beside the rotary positions' 1024.*; leave out one",
        ),
        (
            dict(rope_parameters=dict(full_attention=LONG, sliding_attention=LONG)),
            r"for each kind of layer \(full_attention, sliding_attention\), which is not supported; give one mapping",
        ),
        (
            dict(rope_parameters=dict(rope_type="longrope", rope_theta=1e4)),
            "rope_type='longrope' is not supported; only default, llama3",
        ),
        (
            dict(rope_parameters=None, rope_scaling=dict(type="linear", factor=2.0)),
            "rope_type='linear' is not supported",
        ),
        (
            dict(rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.5)),
            "rope_parameters.partial_rotary_factor=0.5",
        ),
        (dict(rope_parameters=None, rope_theta=None), "rope_theta=None must be a positive number"),
        (
            dict(rope_parameters=dict(rope_type="llama3", rope_theta=1e4, factor=8.0, low_freq_factor=2.0)),
            "low_freq_factor=2.0 is not supported; Megatron's llama3 scaling only has 1.0",
        ),
        (dict(sliding_window=512, use_sliding_window=True), "sliding_window=512 is in use"),
    ],
)
def test_unknown_positions_and_windows_are_refused(changes: dict[str, object], message: str):
    hf_config = tiny("qwen3", **changes)
    with pytest.raises(ValueError, match=message):
        family(hf_config).canonical(hf_config)


def test_windows_that_are_switched_off_or_longer_than_the_model_are_no_windows():
    for hf_config in (
        QWEN25_7B | dict(sliding_window=131072, max_window_layers=28),
        tiny("qwen3", sliding_window=512, max_window_layers=2),
        tiny("mixtral", sliding_window=4096),
    ):
        assert family(hf_config).canonical(hf_config)


def test_latent_attention_is_cut_by_heads():
    hf_config = tiny("deepseek_v3")
    found = family(hf_config)
    canonical = index_arrays(found.canonical(hf_config))
    hf = "model.layers.1.self_attn."
    whole = {
        name: canonical[f"{hf}{name}.weight"]
        for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "q_a_layernorm")
    }
    for rank in range(2):
        coords, parallel = MegatronCoords(tp=rank), MegatronParallel(tp=2)
        local, te = (
            {
                slot.name.removeprefix("decoder.layers.1.self_attention."): array
                for slot, array in build_layout(
                    found.megatron_layout(hf_config, parallel, coords, "float32", flavour), canonical
                ).items()
            }
            for flavour in ("local", "te")
        )
        for built in (local, te):
            # Heads of plain and rotary query rows, and of key and value rows.
            assert np.array_equal(built["linear_q_up_proj.weight"], np.split(whole["q_b_proj"], 2)[rank])
            assert np.array_equal(built["linear_kv_up_proj.weight"], np.split(whole["kv_b_proj"], 2)[rank])
            assert np.array_equal(built["linear_q_down_proj.weight"], whole["q_a_proj"])
            assert np.array_equal(built["linear_kv_down_proj.weight"], whole["kv_a_proj_with_mqa"])
        assert np.array_equal(te["linear_q_up_proj.layer_norm_weight"], local["q_layernorm.weight"])
        assert np.array_equal(local["q_layernorm.weight"], whole["q_a_layernorm"])
