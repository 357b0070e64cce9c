# SPDX-License-Identifier: Apache-2.0
"""Published model folders, there and back: what transformers computes of a folder, it computes of the export."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from conversion.convert import convert_hf_to_mcore, convert_mcore_to_hf, differences
from conversion.files.hf_folder import INDEX_FILE, SINGLE_FILE, files_to_hide, weight_files, write_json
from conversion.files.hf_weights import check_hf, describe_dtypes, read_model_config
from mrl.config.model import overridden_folder
from mrl.recipes.tokenizer import byte_tokenizer
from tests import models

EMBEDDING, OUTPUT, QUERY = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.weight"
SMALL = dict(num_hidden_layers=1)


def rewrite(folder: Path, **changes: Tensor) -> None:
    save_file(load_file(folder / SINGLE_FILE) | changes, folder / SINGLE_FILE, {"format": "pt"})


def configure(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def there_and_back(folder: Path) -> Path:
    convert_hf_to_mcore(folder, folder.parent / "mcore")
    convert_mcore_to_hf(folder.parent / "mcore", folder.parent / "back")
    return folder.parent / "back"


def logits(folder: Path) -> Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(torch.arange(40)[None]).logits


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    """A qwen3 with tied embeddings."""
    return models.save_model(tmp_path / "hf", "qwen3", **SMALL)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_numbers_that_stand_for_others_are_refused(hf: Path, dtype: torch.dtype):
    rewrite(hf, **{QUERY: load_file(hf / SINGLE_FILE)[QUERY].to(dtype)})
    with pytest.raises(
        ValueError, match=f"{QUERY} has dtype [FI]8\\w*, which only quantised weights have; take those in"
    ):
        check_hf(hf)


def test_a_stored_copy_of_tied_embeddings_is_passed_over(hf: Path):
    """Uses the form in which Qwen3-0.6B is published."""
    rewrite(hf, **{OUTPUT: load_file(hf / SINGLE_FILE)[EMBEDDING].clone()})
    assert OUTPUT not in check_hf(hf)
    back = there_and_back(hf)
    assert OUTPUT not in load_file(back / SINGLE_FILE) and read_model_config(back)["tie_word_embeddings"] is True
    assert torch.equal(logits(back), logits(hf)) and list(differences(hf, back)) == []
    assert overridden_folder(hf, {}, beside=hf.parent / "run") == hf, "vLLM passes over it, too"


def test_another_output_layer_is_not_tied_whatever_the_config_says(hf: Path):
    rewrite(hf, **{OUTPUT: load_file(hf / SINGLE_FILE)[EMBEDDING] * 2})
    expected = logits(hf)
    back = there_and_back(hf)
    assert torch.equal(load_file(back / SINGLE_FILE)[OUTPUT], load_file(hf / SINGLE_FILE)[OUTPUT])
    assert read_model_config(back)["tie_word_embeddings"] is False and torch.equal(logits(back), expected)
    # vLLM believes config.json.
    seen = overridden_folder(hf, {}, beside=hf.parent / "run")
    assert json.loads((seen / "config.json").read_text())["tie_word_embeddings"] is False and torch.equal(
        logits(seen), expected
    )


def test_a_single_file_wins_over_an_index_that_was_left_behind(hf: Path):
    left, new = "model-00001-of-00001.safetensors", load_file(hf / SINGLE_FILE)
    save_file({name: tensor * 0.5 for name, tensor in new.items()}, hf / left, {"format": "pt"})
    (hf / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(new, left)}))
    assert torch.equal(load_file(there_and_back(hf) / SINGLE_FILE)["model.norm.weight"], new["model.norm.weight"])
    assert torch.equal(logits(hf.parent / "back"), logits(hf))
    # vLLM reads the files of an index.
    seen = overridden_folder(hf, {}, beside=hf.parent / "run")
    assert files_to_hide(hf) == [left, INDEX_FILE] and not {left, INDEX_FILE} & {path.name for path in seen.iterdir()}
    (hf / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(new, SINGLE_FILE)}))
    assert files_to_hide(hf) == [left]
    (hf / left).unlink()
    assert files_to_hide(hf) == []


def test_weights_in_another_form_beside_those_of_an_index_are_left_to_their_readers(hf: Path):
    shard = "model-00001-of-00001.safetensors"
    (hf / SINGLE_FILE).rename(hf / shard)
    (hf / INDEX_FILE).write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(load_file(hf / shard), shard)})
    )
    assert files_to_hide(hf) == [] and overridden_folder(hf, {}, beside=hf.parent / "run") == hf
    # vLLM prefers Mistral's own form, whatever the index says.
    save_file({"tok_embeddings.weight": torch.zeros(4, 4)}, hf / "consolidated.safetensors")
    seen = overridden_folder(hf, {}, beside=hf.parent / "run")
    assert {path.name for path in seen.glob("*.safetensors*")} == {shard, INDEX_FILE} and torch.equal(
        logits(seen), logits(hf)
    )


def test_tensors_that_megatron_has_in_one_may_have_several_dtypes(hf: Path):
    before = {
        name: tensor if "q_proj" in name else tensor.bfloat16() for name, tensor in load_file(hf / SINGLE_FILE).items()
    }
    rewrite(hf, **before)
    after = load_file(there_and_back(hf) / SINGLE_FILE)
    assert all(torch.equal(after[name], tensor.to(after[name].dtype)) for name, tensor in before.items()), (
        "no digit is lost"
    )
    assert after[QUERY].dtype == torch.float32 and after["model.norm.weight"].dtype == torch.bfloat16
    assert describe_dtypes(hf, "float32") == "12 bfloat16, 1 float32"
    assert describe_dtypes(hf, "bfloat16") == f"12 bfloat16, 1 float32; 1 are rounded to bfloat16, the first is {QUERY}"


def test_both_keys_say_the_dtype_of_the_weights(hf: Path):
    configure(hf, dtype="bfloat16", torch_dtype="bfloat16")
    back = json.loads((there_and_back(hf) / "config.json").read_text())
    assert (back["dtype"], back["torch_dtype"]) == ("float32", "float32")


@pytest.mark.parametrize(("layers", "ends"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_the_dtype_is_that_of_the_layers_whatever_embedding_and_norms_have(
    hf: Path, layers: torch.dtype, ends: torch.dtype
):
    before = load_file(hf / SINGLE_FILE)
    rewrite(hf, **{name: tensor.to(layers if "proj" in name else ends) for name, tensor in before.items()})
    configure(hf, dtype=str(layers).removeprefix("torch."))
    back = there_and_back(hf)
    assert read_model_config(back)["dtype"] == str(layers).removeprefix("torch.")
    states = [AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict() for folder in (hf, back)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_tied_model_may_be_stored_under_the_name_of_its_output_alone(hf: Path):
    model = AutoModelForCausalLM.from_pretrained(hf)
    (hf / SINGLE_FILE).unlink()
    save_model(model, str(hf / SINGLE_FILE), {"format": "pt"})
    assert OUTPUT in load_file(hf / SINGLE_FILE) and EMBEDDING not in load_file(hf / SINGLE_FILE)
    back = there_and_back(hf)
    assert torch.equal(load_file(back / SINGLE_FILE)[EMBEDDING], model.lm_head.weight)
    assert list(differences(hf, back)) == []


def test_of_an_index_only_the_tensors_that_the_model_needs_must_be_there(hf: Path):
    before = load_file(hf / SINGLE_FILE)
    (hf / SINGLE_FILE).rename(hf / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(before, "model-00001-of-00001.safetensors")
    # Frequencies that older versions of transformers stored, and a layer that somebody has dropped.
    more = ("model.layers.0.self_attn.rotary_emb.inv_freq", "vision_tower.patch_embed.weight")
    write_json(
        hf / INDEX_FILE,
        {"metadata": {}, "weight_map": weight_map | dict.fromkeys(more, "model-00001-of-00001.safetensors")},
    )
    AutoModelForCausalLM.from_pretrained(hf)
    assert list(differences(hf, there_and_back(hf))) == []
    rewrite_file = {name: tensor for name, tensor in before.items() if name != QUERY}
    save_file(rewrite_file, hf / "model-00001-of-00001.safetensors")
    with pytest.raises(
        ValueError, match=f"the weights do not fit config.json; missing: {QUERY}; unknown to this model_type: none"
    ):
        check_hf(hf)


@pytest.mark.parametrize(
    "model_type", ["deepseek_v3", "glm4_moe", "nemotron_h", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"]
)
def test_experts_in_one_tensor_are_read_as_transformers_reads_them(model_type: str, tmp_path: Path):
    hf, stacked = models.save_model(tmp_path / "moe", model_type), tmp_path / "stacked"
    AutoModelForCausalLM.from_pretrained(hf).save_pretrained(stacked, save_original_format=False, max_shard_size="80KB")
    names = {name for path in weight_files(stacked) for name in load_file(path)}
    assert any(name.endswith(".experts.down_proj") for name in names) and len(weight_files(stacked)) > 2
    assert list(differences(hf, stacked)) == [] and list(differences(hf, there_and_back(stacked))) == []


@pytest.mark.parametrize("num_files", [1, 2])
@pytest.mark.parametrize(
    ("model_type", "twice"),
    [("qwen3_moe", "model.layers.0.mlp.experts.0.up_proj.weight"), ("nemotron_h", "backbone.norm_f.weight")],
)
def test_a_tensor_under_two_names_is_refused(model_type: str, twice: str, num_files: int, tmp_path: Path):
    hf, folder = models.save_model(tmp_path / "hf", model_type), tmp_path / "folder"
    AutoModelForCausalLM.from_pretrained(hf).save_pretrained(folder, save_original_format=False)
    kept, more = load_file(folder / SINGLE_FILE), {twice: load_file(hf / SINGLE_FILE)[twice] * 0.5}
    if num_files == 1:
        save_file(kept | more, folder / SINGLE_FILE, {"format": "pt"})
    else:
        (folder / SINGLE_FILE).rename(folder / "a.safetensors")
        save_file(more, folder / "b.safetensors", {"format": "pt"})
        placed = dict.fromkeys(kept, "a.safetensors") | {twice: "b.safetensors"}
        write_json(folder / INDEX_FILE, {"metadata": {}, "weight_map": placed})
    with pytest.raises(ValueError, match=rf"safetensors holds {re.escape(twice)}, which .* under another name, too"):
        check_hf(folder)


def test_the_text_half_of_a_model_with_images_is_read_as_the_message_says(tmp_path: Path):
    whole, text = tmp_path / "whole", tmp_path / "text"
    vision = dict(depth=1, hidden_size=32, intermediate_size=64, num_heads=4, out_hidden_size=64)
    config = AutoConfig.for_model("qwen3_5_moe", text_config=models.TINY["qwen3_5_moe_text"], vision_config=vision)
    AutoModelForImageTextToText.from_config(config).save_pretrained(whole)
    with pytest.raises(ValueError, match=r"with a vision tower, .*; save the text model alone: AutoModelForCausalLM"):
        check_hf(whole)
    model = AutoModelForCausalLM.from_pretrained(whole, dtype="auto")
    model.save_pretrained(text, save_original_format=False)
    assert torch.equal(logits(text), logits(whole))
    assert list(differences(text, there_and_back(text))) == []


def test_experts_in_one_tensor_that_vllm_does_not_read_are_refused_with_a_way_out(tmp_path: Path):
    hf, stacked = models.save_model(tmp_path / "moe", "mixtral"), tmp_path / "stacked"
    AutoModelForCausalLM.from_pretrained(hf).save_pretrained(stacked, save_original_format=False)
    with pytest.raises(ValueError, match=r"which vLLM does not read of this model_type; load the model with transform"):
        check_hf(stacked)


def test_shards_in_sub_folders_are_read_and_linked_for_vllm(tmp_path: Path):
    hf, below = models.save_model(tmp_path / "hf", "qwen3"), tmp_path / "below"
    AutoModelForCausalLM.from_pretrained(hf).save_pretrained(below, max_shard_size="80KB")
    index = json.loads((below / INDEX_FILE).read_text())
    files = sorted(set(index["weight_map"].values()))
    for number, file in enumerate(files[1:]):
        # Equal names in two folders: a name alone is no file.
        (below / f"part{number}").mkdir()
        (below / file).rename(below / f"part{number}" / "model.safetensors")
    moved = {file: f"part{number}/model.safetensors" for number, file in enumerate(files[1:])}
    # The name that the link to another file would have.
    moved[files[0]] = "part0--model.safetensors"
    (below / files[0]).rename(below / moved[files[0]])
    index["weight_map"] = {name: moved.get(file, file) for name, file in index["weight_map"].items()}
    write_json(below / INDEX_FILE, index)
    assert len(moved) > 2 and torch.equal(logits(below), logits(hf)), "transformers reads it"
    assert list(differences(hf, there_and_back(below))) == []
    linked = overridden_folder(below, {}, beside=tmp_path / "run")
    assert len(list(linked.glob("*.safetensors"))) == len(files) == len(weight_files(linked))
    assert torch.equal(logits(linked), logits(hf)) and overridden_folder(below, {}, beside=tmp_path / "run") == linked
    assert list(differences(hf, linked)) == []


def test_layers_that_an_export_leaves_out_are_not_in_its_config(tmp_path: Path):
    hf = models.save_model(tmp_path / "glm", "glm4_moe", num_nextn_predict_layers=1)
    assert read_model_config(hf)["num_nextn_predict_layers"] == 1
    assert read_model_config(there_and_back(hf))["num_nextn_predict_layers"] == 0


def test_files_of_every_tokenizer_and_the_licence_go_there_and_back(hf: Path):
    names = ("qwen.tiktoken", "spiece.spm", "LICENSE", "NOTICE.txt", "codes.bpe", "LICENSE.md")
    for name in names:
        (hf / name).write_text(name)
    back = there_and_back(hf)
    assert [(back / name).read_text() for name in names] == list(names)


@pytest.mark.parametrize("has_code", [True, False])
def test_auto_map_goes_with_its_code(hf: Path, has_code: bool):
    configure(hf, auto_map={"AutoConfig": "configuration_x.Qwen3Config", "AutoModel": "some/one--modeling_x.Model"})
    if has_code:
        (hf / "configuration_x.py").write_text("from transformers import Qwen3Config")
    back = there_and_back(hf)
    assert ("auto_map" in read_model_config(back), (back / "configuration_x.py").exists()) == (has_code, has_code)


def test_all_templates_of_a_tokenizer_are_kept(hf: Path):
    tokenizer = byte_tokenizer(4096)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "TOOLS {{ messages }}"}
    tokenizer.save_pretrained(hf)
    assert AutoTokenizer.from_pretrained(there_and_back(hf)).chat_template == tokenizer.chat_template


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (
            ["adapter_config.json", "adapter_model.safetensors"],
            "it holds adapters of the library PEFT alone: merge them into their base",
        ),
        (
            ["pytorch_model.bin", "pytorch_model.bin.index.json"],
            r"its weights are pickled \(.bin\): load them with transformers",
        ),
        (["consolidated.00.pth"], "its weights are pickled"),
        (["x-Q4_K_M.gguf"], "quantised for llama.cpp"),
        (["model-00001-of-00002.safetensors"], "neither model.safetensors nor named by model.safetensors.index.json"),
    ],
)
def test_weights_of_other_kinds_are_refused_with_the_way_out(tmp_path: Path, files: list[str], reason: str):
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=reason):
        weight_files(tmp_path)
