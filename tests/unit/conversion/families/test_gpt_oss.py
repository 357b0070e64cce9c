# SPDX-License-Identifier: Apache-2.0
"""gpt_oss: stacked experts and MXFP4 as transformers reads and writes them, published sizes, arguments, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils.quantization_config import Mxfp4Config

from conversion.convert import convert_hf_to_mcore, convert_mcore_to_hf, differences, faults_against_manifest
from conversion.families.common import VllmParallel
from conversion.families.registry import family
from conversion.files.hf_weights import check_hf
from conversion.files.safetensors import SafetensorsFolder
from conversion.tensors import read_whole
from tests import models
from tests.reading import read_layout
from tests.sources import ROOT

HUB = json.loads((ROOT / "scripts" / "bench" / "models" / "hub.json").read_text())
OF_20B, OF_120B = (group["config"] for group in HUB if str(group["ids"][0]).startswith("openai/gpt-oss"))
EXPERTS = "model.layers.1.mlp.experts."
MXFP4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def in_mxfp4(hf: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The model of `hf` in bfloat16, with random blocks and scales for experts; its tensors."""
    folder.mkdir()
    draw, tensors = torch.Generator().manual_seed(0), {}
    for name, tensor in load_file(hf / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            shape = (experts, outputs, inputs // 32, 16)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 124, shape[:3], generator=draw, dtype=torch.uint8)
        else:
            tensors[name] = tensor.bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((hf / "config.json").read_text()) | {"dtype": "bfloat16"} | MXFP4
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_model(tmp_path_factory.mktemp("hf"), "gpt_oss")


@pytest.fixture(scope="module")
def packed(hf: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("mxfp4") / "hf"
    return folder, in_mxfp4(hf, folder)


@pytest.mark.parametrize(("config", "parameters"), [(OF_20B, 20_914_757_184), (OF_120B, 116_829_156_672)])
def test_published_models_have_their_published_sizes(config: dict[str, object], parameters: int):
    assert sum(map(math.prod, family(config).canonical(config).values())) == parameters


def test_a_layers_experts_in_one_tensor_are_read_and_written_as_transformers_has_them(hf: Path, tmp_path: Path):
    model = AutoModelForCausalLM.from_pretrained(hf)
    with SafetensorsFolder(hf) as source:
        for index in (0, 5):
            layer = model.model.layers[1].mlp.experts
            assert bits(read_whole(source, f"{EXPERTS}{index}.gate_up_proj.weight")) == bits(
                layer.gate_up_proj[index].T
            )
            assert bits(read_whole(source, f"{EXPERTS}{index}.down_proj.weight")) == bits(layer.down_proj[index].T)
            assert bits(read_whole(source, f"{EXPERTS}{index}.down_proj.bias")) == bits(layer.down_proj_bias[index])
        rows, columns = (3, 17), (5, 40)
        part = torch.empty(14, 35)
        source.read_into(f"{EXPERTS}2.gate_up_proj.weight", (rows, columns), part)
        assert bits(part) == bits(layer.gate_up_proj[2].T[3:17, 5:40])
    convert_hf_to_mcore(hf, tmp_path / "mcore")
    convert_mcore_to_hf(tmp_path / "mcore", tmp_path / "back", max_shard_bytes=100_000)
    assert list(faults_against_manifest(tmp_path / "mcore")) == list(faults_against_manifest(tmp_path / "back")) == []
    assert list(differences(hf, tmp_path / "back")) == []
    before = load_file(hf / "model.safetensors")
    after = {
        name: tensor for path in (tmp_path / "back").glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    assert {name: (tensor.shape, bits(tensor)) for name, tensor in before.items()} == {
        name: (tensor.shape, bits(tensor)) for name, tensor in after.items()
    }


def test_every_number_and_scale_of_mxfp4_has_the_bits_of_transformers(hf: Path, tmp_path: Path):
    tensors = in_mxfp4(hf, tmp_path / "hf")
    blocks, scales = (tensors[f"{EXPERTS}gate_up_proj_{kind}"] for kind in ("blocks", "scales"))
    blocks.copy_(torch.arange(256, dtype=torch.uint8).repeat(blocks.numel() // 256).view(blocks.shape))
    # 255 is no number in the format.
    scales.view(-1).copy_(torch.arange(scales.numel()) % 255)
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    # [experts, inputs, outputs]
    theirs = convert_moe_packed_tensors(blocks, scales)
    with SafetensorsFolder(tmp_path / "hf") as source:
        for index in range(8):
            name = f"{EXPERTS}{index}.gate_up_proj.weight"
            assert bits(read_whole(source, name)) == bits(theirs[index].T)
            part = torch.empty(9, 20, dtype=torch.bfloat16)
            source.read_into(name, ((3, 12), (30, 50)), part)
            assert bits(part) == bits(theirs[index].T[3:12, 30:50])


def test_a_model_in_mxfp4_becomes_the_model_that_transformers_dequantises(
    packed: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
):
    folder, _ = packed
    convert_hf_to_mcore(folder, tmp_path / "mcore")
    convert_mcore_to_hf(tmp_path / "mcore", tmp_path / "plain")
    assert list(faults_against_manifest(tmp_path / "plain")) == list(differences(folder, tmp_path / "plain")) == []
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    ).state_dict()
    assert {name: bits(tensor) for name, tensor in ours.items()} == {
        name: bits(tensor) for name, tensor in theirs.items()
    }


def test_blocks_without_scales_are_refused(packed: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path):
    folder, tensors = packed
    kept = {name: tensor for name, tensor in tensors.items() if name != f"{EXPERTS}down_proj_scales"}
    save_file(kept, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=r"0\.down_proj\.weight is stored in MXFP4 without its scales"):
        check_hf(tmp_path)


def test_scales_without_blocks_of_mxfp4_are_refused_in_other_families(tmp_path: Path):
    qwen3 = models.save_model(tmp_path, "qwen3")
    name = "model.layers.0.mlp.down_proj.scales"
    save_file(load_file(qwen3 / "model.safetensors") | {name: torch.ones(4)}, qwen3 / "model.safetensors")
    with pytest.raises(ValueError, match=f"unknown to this model_type: {name}"):
        check_hf(qwen3)


@pytest.mark.parametrize("worker", [0, 1])
def test_pairs_of_gate_and_up_stay_together_and_one_worker_has_the_bias_of_the_sum(hf: Path, worker: int):
    config = json.loads((hf / "config.json").read_text())
    live = {slot.name: value for slot, value in read_layout(hf, layout_of(config, worker)).items()}
    stored = load_file(hf / "model.safetensors")
    routed, rows = f"{EXPERTS}routed_experts.", slice(64 * worker, 64 * worker + 64)
    assert torch.equal(live[f"{routed}w13_weight"], stored[f"{EXPERTS}gate_up_proj"].transpose(1, 2)[:, rows])
    assert torch.equal(live[f"{routed}w13_bias"], stored[f"{EXPERTS}gate_up_proj_bias"][:, rows])
    bias = stored[f"{EXPERTS}down_proj_bias"]
    assert torch.equal(live[f"{routed}w2_bias"], torch.zeros_like(bias) if worker else bias)
    heads = slice(2 * worker, 2 * worker + 2)
    assert torch.equal(live["model.layers.1.attn.sinks"], stored["model.layers.1.self_attn.sinks"][heads])


def layout_of(config: dict[str, object], worker: int):
    return family(config).vllm_layout(config, VllmParallel(tp=2), worker, "float32")


def test_an_odd_part_of_pairs_is_refused():
    config = OF_20B | dict(intermediate_size=45, num_attention_heads=6, num_key_value_heads=2)
    with pytest.raises(ValueError, match=r"does not divide the 45 groups of 2 rows of .*gate_up_proj.weight"):
        layout_of(config, 0)


def test_arguments_are_those_of_the_file():
    arguments = family(OF_20B).megatron_arguments(OF_20B)
    expected = dict(
        activation_func="quick_gelu",
        activation_func_clamp_value=7.0,
        add_bias_linear=True,
        glu_linear_offset=1.0,
        moe_router_pre_softmax=False,
        moe_router_topk=4,
        softmax_type="learnable",
        window_attn_skip_freq=2,
        window_size=(127, 0),
    )
    assert {key: arguments["transformer"][key] for key in expected} == expected
    assert arguments["model"]["position_embedding_type"] == "yarn"
    assert arguments["attributes"]["yarn_correction_range_round_to_int"] is False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(layer_types=["full_attention"] * 24), "vLLM has windows in the first of every two layers"),
        (dict(sliding_window=None), "sliding_window=None must be a positive integer"),
        (dict(rms_norm_eps=1e-6), "rms_norm_eps=1e-06 is not supported"),
        (dict(swiglu_limit=5.0), "swiglu_limit=5.0 is not supported"),
        (dict(swiglu_alpha=1.0), "swiglu_alpha=1.0 is not supported"),
        (dict(tie_word_embeddings=True), "tie_word_embeddings=True is not supported"),
        (dict(attention_bias=False), "attention_bias=False is not supported"),
        (dict(rope_scaling=None), "rope_type='default' is not supported for gpt_oss; only yarn is"),
        (dict(quantization_config={"quant_method": "fp8"}), "quantization_config="),
    ],
)
def test_settings_that_the_tables_do_not_know_are_refused(change: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        config = OF_20B | change
        family(config).megatron_arguments(config)
