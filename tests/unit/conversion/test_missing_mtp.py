# SPDX-License-Identifier: Apache-2.0
"""Models and checkpoints whose config names MTP layers that they lack: what the message proposes is a way out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from conversion.convert import convert_hf_to_mcore, convert_mcore_to_hf
from conversion.files.hf_weights import check_hf
from tests.unit.conversion.hf_folders import tiny_config, write_folder

WAY_OUT = (
    r"set num_nextn_predict_layers to 0 in config\.json of the model's folder \(of a checkpoint that is "
    r"converted, in its hf_config\.json\)"
)


def set_steps(config_file: Path, num_steps: int) -> None:
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"num_nextn_predict_layers": num_steps}))


def test_a_folder_without_the_layers_of_its_config(tmp_path: Path):
    """transformers writes such a folder: it ignores the layers when it reads a model."""
    hf = write_folder(tmp_path / "hf", tiny_config("nemotron_h"))
    set_steps(hf / "config.json", 1)
    with pytest.raises(
        ValueError,
        match=rf"missing: mtp\.layers\.0\.\S+, .* and \d+ more; unknown to this model_type: none; .*{WAY_OUT}",
    ):
        convert_hf_to_mcore(hf, tmp_path / "mcore")
    set_steps(hf / "config.json", 0)
    convert_hf_to_mcore(hf, tmp_path / "mcore")


def test_a_checkpoint_without_the_layers_of_its_config(tmp_path: Path):
    hf = write_folder(tmp_path / "hf", tiny_config("nemotron_h"))
    convert_hf_to_mcore(hf, tmp_path / "mcore")
    # As one of Megatron-LM, which comes without.
    (tmp_path / "mcore" / "manifest.json").unlink()
    (config_file,) = (tmp_path / "mcore").rglob("hf_config.json")
    set_steps(config_file, 1)
    with pytest.raises(ValueError, match=rf"the checkpoint has no tensor mtp\.layers\.0\.\S+; .*{WAY_OUT}"):
        convert_mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    set_steps(config_file, 0)
    convert_mcore_to_hf(tmp_path / "mcore", tmp_path / "back")


def test_other_missing_tensors_have_no_such_way_out(tmp_path: Path):
    hf = write_folder(tmp_path / "hf", tiny_config("nemotron_h", num_nextn_predict_layers=1))
    tensors = load_file(hf / "model.safetensors")
    for missing in ("mtp.layers.0.enorm.weight", "lm_head.weight"):
        del tensors[missing]
    save_file(tensors, hf / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"missing: lm_head\.weight, mtp\.layers\.0\.enorm\.weight; unknown to this model_type: none$"
    ):
        check_hf(hf)


def test_layers_behind_the_last_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Transformers and vLLM omit them too. Nothing else is: no layer that no step counts, nor one further behind."""
    hf = write_folder(tmp_path / "hf", tiny_config("glm4_moe"))
    config, tensors = hf / "config.json", load_file(hf / "model.safetensors")
    last = json.loads(config.read_text())["num_hidden_layers"]
    extra = {
        f"model.layers.{last}.{name}": tensors["model.norm.weight"].clone()
        for name in ("enorm.weight", "shared_head.norm.weight")
    }
    save_file(tensors | extra, hf / "model.safetensors")
    with pytest.raises(ValueError, match=rf"unknown to this model_type: model\.layers\.{last}\.enorm\.weight"):
        check_hf(hf)
    set_steps(config, 1)
    convert_hf_to_mcore(hf, tmp_path / "mcore")
    assert "multi-token prediction is neither trained nor exported (tensors: 2)" in caplog.text
    convert_mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert load_file(tmp_path / "back/model.safetensors").keys() == tensors.keys()
    save_file(
        tensors | {f"model.layers.{last + 1}.enorm.weight": tensors["model.norm.weight"].clone()},
        hf / "model.safetensors",
    )
    with pytest.raises(ValueError, match=rf"unknown to this model_type: model\.layers\.{last + 1}\.enorm\.weight"):
        check_hf(hf)
