# SPDX-License-Identifier: Apache-2.0
"""A model may be named by its id on the Hub; a run of it goes on with the local snapshot."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from mrl.config.errors import ConfigError
from mrl.config.load import load_config
from mrl.config.model import with_local_folders
from mrl.data.prompts import load_prompts
from mrl.loop.preflight import check_start
from mrl.recipes.tokenizer import byte_tokenizer

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


def test_a_run_of_an_id_starts_from_its_snapshot(snapshot: Path):
    config = load_config("grpo_tiny.yaml", ["policy.model_name=some/model"])
    started = check_start(config)
    assert started.policy.model_name == started.policy.tokenizer.name == str(snapshot)
    assert config.policy.model_name == config.policy.tokenizer.name == "some/model", "a check leaves the config as it is"
    assert load_prompts(started).train


def test_an_id_without_weights_ends_before_anything_starts(snapshot: Path):
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="some/model is neither a folder nor complete in the local Hugging Face cache"):
        check_start(load_config("grpo_tiny.yaml", ["policy.model_name=some/model"]))


def test_a_folder_without_a_tokenizer_is_named_with_its_key(workplace: Path):
    with pytest.raises(ValueError, match="policy.tokenizer.name=prepared/tiny/model: transformers finds no tokenizer there"):
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
