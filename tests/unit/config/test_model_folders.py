# SPDX-License-Identifier: Apache-2.0
"""A model may be named by its id on the Hub; a run of it goes on with the local snapshot."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from mrl.config.errors import ConfigError
from mrl.config.load import load_config
from mrl.config.model import is_hub_id, read_model, with_local_folders
from mrl.data.prompts import load_prompts
from mrl.loop.preflight import check_start
from mrl.recipes.tokenizer import byte_tokenizer
from tests.unit.config.problems import texts_of
from tests.unit.conversion.hf_folders import tiny_config, write_folder

REVISION = "0" * 40


@pytest.fixture
def snapshot(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny model as the hub library keeps it; nothing answers at the Hub's address."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(workplace / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    repository = workplace / "hub" / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    folder = Path(shutil.copytree("prepared/tiny/model", repository / "snapshots" / REVISION))
    byte_tokenizer(4096).save_pretrained(folder)
    (folder / "model.safetensors").touch()
    return folder


def test_a_path_is_no_id():
    """The Hub allows no name that begins or ends with a dot or a dash (huggingface_hub.utils.validate_repo_id)."""
    names = [
        "./model",
        "../model",
        ".cache/model",
        "/a/model",
        "a/b/model",
        "model",
        "a/.model",
        "a/model.",
        "-a/model",
        "~/model",
        "a/",
    ]
    assert [name for name in names if is_hub_id(name)] == []
    assert all(is_hub_id(name) for name in ("Qwen/Qwen2.5-1.5B", "a/b_c", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"))


def test_a_run_of_an_id_starts_from_its_snapshot(snapshot: Path):
    config = load_config("grpo_tiny.yaml", ["policy.model_name=some/model"])
    started = check_start(config)
    assert started.policy.model_name == started.policy.tokenizer.name == str(snapshot)
    assert config.policy.model_name == config.policy.tokenizer.name == "some/model", (
        "a check leaves the config as it is"
    )
    assert load_prompts(started).train


def test_an_id_without_weights_ends_before_anything_starts(snapshot: Path):
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="some/model is neither a folder nor complete in the local Hugging Face cache"):
        check_start(load_config("grpo_tiny.yaml", ["policy.model_name=some/model"]))


def test_a_folder_without_a_tokenizer_is_named_with_its_key(workplace: Path):
    for path in (workplace / "prepared/tiny/model").glob("tokenizer*"):
        path.unlink()
    with pytest.raises(
        ValueError, match="policy.tokenizer.name=prepared/tiny/model: transformers finds no tokenizer there"
    ):
        load_prompts(check_start(load_config("grpo_tiny.yaml")))


def test_an_unknown_id_is_named_with_its_key(snapshot: Path):
    with pytest.raises(ValueError, match="policy.tokenizer.name=no/tokenizer is neither a folder"):
        with_local_folders(load_config("grpo_tiny.yaml", ["policy.tokenizer.name=no/tokenizer"]))


def test_a_config_is_refused_before_the_hub_is_asked(snapshot: Path):
    config = load_config("grpo_tiny.yaml", ["policy.model_name=no/model", "policy.generation.max_new_tokens=9999"])
    with pytest.raises(ConfigError) as caught:
        check_start(config)
    told = str(caught.value)
    assert "policy.generation.max_new_tokens=9999: must be at most" in told
    assert "policy.model_name=no/model: not in the local Hugging Face cache" in told


@pytest.mark.parametrize("is_critic", [False, True], ids=["policy", "critic"])
@pytest.mark.parametrize(
    ("model_type", "unknown"),
    [("nemotron_h", "mtp.layers.0.enorm.weight"), ("qwen3", "model.layers.0.self_attn.q_proj.bias")],
)
def test_without_a_cache_a_tensor_without_a_rule_is_found_before_anything_starts(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, unknown: str, is_critic: bool
):
    monkeypatch.setenv("MRL_CACHE", "off")
    folder, other = (write_folder(workplace / name, tiny_config(model_type)) for name in ("model", "other"))
    for name in (folder, other):
        byte_tokenizer(4096).save_pretrained(name)
    models = (
        [f"policy.model_name={folder}", f"value.model_name={other}"] if is_critic else [f"policy.model_name={other}"]
    )
    config = load_config(
        "ppo_tiny.yaml" if is_critic else "grpo_tiny.yaml",
        [*models, "policy.megatron_cfg.expert_model_parallel_size=1"],
    )
    tensors = load_file(other / "model.safetensors")
    if is_critic:
        # It may start from a reward model.
        save_file(tensors | {"score.weight": torch.ones(1, 64)}, other / "model.safetensors")
    check_start(config)
    save_file(tensors | {unknown: torch.ones(64)}, other / "model.safetensors")
    with pytest.raises(
        ValueError,
        match=f"other: the weights do not fit config.json; missing: none; unknown to this model_type: {unknown}",
    ):
        check_start(config)


def test_only_what_is_prepared_is_promised_to_be():
    for name, way_out in (
        ("model", "`python -m mrl.prepare tiny` makes it"),
        ("teacher", "example 6 of docs/examples.md makes it"),
        ("models", "give the folder of a Hugging Face model"),
    ):
        with pytest.raises(ValueError, match=f"no readable config.json .*; {way_out}"):
            read_model(Path("nowhere/prepared/tiny") / name)


def test_what_an_engine_would_not_find_is_said_before_the_start(workplace: Path):
    folder = workplace / "prepared/tiny/model"
    tiny = json.loads((folder / "config.json").read_text())
    for architectures in (["NemotronHForCausalLM"], [], None):
        (folder / "config.json").write_text(json.dumps(tiny | {"architectures": architectures}))
        assert texts_of(load_config("grpo_tiny.yaml", [])) == []
    for other in ("NemotronHModel", "Qwen3ForCausalLM"):
        (folder / "config.json").write_text(json.dumps(tiny | {"architectures": [other, "NemotronHForCausalLM"]}))
        (problem,) = texts_of(load_config("grpo_tiny.yaml", []))
        assert f"architectures=['{other}', 'NemotronHForCausalLM'] begins with no language model of its" in problem
        assert problem.endswith("; name NemotronHForCausalLM")
    (folder / "config.json").write_text(json.dumps(tiny))
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    (problem,) = texts_of(load_config("grpo_tiny.yaml", []))
    assert "it holds hf_quant_config.json, by which vLLM takes its weights for quantised; remove that" in problem
    (folder / "hf_quant_config.json").unlink()
    key = "+policy.generation.vllm_kwargs.hf_config_path"
    (problem,) = texts_of(load_config("grpo_tiny.yaml", [f"{key}=elsewhere"]))
    assert "hf_config_path=elsewhere: refits write the weights as the checkpoint has them" in problem


def test_a_tied_embedding_stored_as_the_output_layer_alone_is_refused_with_engines(workplace: Path):
    folder = write_folder(workplace / "tied", tiny_config("qwen3", tie_word_embeddings=True))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, folder / "model.safetensors")
    settings = [
        f"policy.model_name={folder}",
        "policy.tokenizer.name=prepared/tiny/model",
        "policy.megatron_cfg.expert_model_parallel_size=1",
    ]
    with_engines, without = (texts_of(load_config(name, settings)) for name in ("grpo_tiny.yaml", "sft_tiny.yaml"))
    (problem,) = [text for text in with_engines if "tied embedding" in text]
    assert "stored as lm_head.weight alone, which vLLM does not read; convert it there and back with" in problem
    assert not [text for text in without if "tied embedding" in text]


def test_experts_in_one_tensor_are_refused_with_engines_that_do_not_read_them(workplace: Path):
    folder = write_folder(workplace / "stacked", tiny_config("deepseek_v3"))
    weights = load_file(folder / "model.safetensors")
    block = re.compile(r"(.+\.experts\.)\d+\.(gate|up|down)_proj\.weight")
    for prefix in {found[1] for name in weights if (found := block.match(name))}:
        parts = {
            part: [weights.pop(f"{prefix}{expert}.{part}_proj.weight") for expert in range(8)]
            for part in ("gate", "up", "down")
        }
        weights[f"{prefix}gate_up_proj"] = torch.cat([torch.stack(parts["gate"]), torch.stack(parts["up"])], 1)
        weights[f"{prefix}down_proj"] = torch.stack(parts["down"])
    save_file(weights, folder / "model.safetensors")
    settings = [f"policy.model_name={folder}", "policy.tokenizer.name=prepared/tiny/model"]
    with_engines, without = (texts_of(load_config(name, settings)) for name in ("grpo_tiny.yaml", "sft_tiny.yaml"))
    (problem,) = [text for text in with_engines if "one tensor" in text]
    assert "(save_original_format=False), which vLLM does not read; convert it there and back" in problem
    assert not [text for text in without if "one tensor" in text or "do not fit" in text]
