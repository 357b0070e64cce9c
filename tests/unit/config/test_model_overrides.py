# SPDX-License-Identifier: Apache-2.0
"""`policy.hf_config_overrides`: one config.json for all who read it, and what may be in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conversion.cache import entry_key
from mrl.config.load import load_config, load_run
from mrl.config.model import find_override_problems, overridden_config, overridden_folder
from mrl.loop.preflight import check_start
from tests.tiny import TINY
from tests.unit.config.problems import texts_of
from tests.unit.conftest import write_weights

QWEN = {"model_type": "qwen3", **TINY["qwen3"], "max_position_embeddings": 2048}
OLDER = QWEN | dict(rope_theta=1e6, rope_scaling=None)
NEWER = QWEN | dict(rope_parameters=dict(rope_type="default", rope_theta=1e6))
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=2048)
KEY = "policy.hf_config_overrides"
DENSE = "policy.megatron_cfg.expert_model_parallel_size=1"
YARN_OVERRIDES = [DENSE, *(f"{KEY}.rope_scaling.{name}={value}" for name, value in YARN.items())]


@pytest.fixture
def model(workplace: Path) -> Path:
    """The model of grpo_tiny.yaml, made a qwen3."""
    folder = workplace / "prepared/tiny/model"
    (folder / "config.json").write_text(json.dumps(OLDER))
    write_weights(folder, OLDER)
    return folder


@pytest.mark.parametrize("hf_config", [OLDER, NEWER], ids=["older", "newer"])
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_yarn_keeps_the_base_and_lengthens_the_context(hf_config: dict[str, object], name: str):
    merged, scaling = overridden_config(hf_config, {name: YARN}), YARN | dict(rope_theta=1e6)
    # transformers 5 reads the first, transformers 4 the others.
    assert merged == QWEN | dict(
        rope_parameters=scaling, rope_theta=1e6, rope_scaling=scaling, max_position_embeddings=8192
    )
    assert overridden_config(merged, {name: YARN}) == merged
    rounded = overridden_config(hf_config, {name: YARN | dict(factor=2.3, original_max_position_embeddings=3000)})
    assert rounded["max_position_embeddings"] == 6900, "2.3 x 3000 is a little less in floats"
    assert (
        overridden_config(hf_config, {name: YARN, "max_position_embeddings": 4096})["max_position_embeddings"] == 4096
    )


@pytest.mark.parametrize("hf_config", [OLDER, NEWER], ids=["older", "newer"])
def test_another_base(hf_config: dict[str, object]):
    assert overridden_config(hf_config, {"rope_theta": 5e5})["rope_parameters"] == dict(
        rope_type="default", rope_theta=5e5
    )
    given = YARN | dict(rope_theta=2e6)
    assert overridden_config(hf_config, {"rope_scaling": given})["rope_parameters"] == given


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"hidden_size": 128}, "the tensors of the checkpoint are not the model's; override no sizes"),
        ({"tie_word_embeddings": False}, "the tensors of the checkpoint are not the model's"),
        ({"resid_pdrop": 0.1}, f"{KEY.removeprefix('policy.')}.resid_pdrop=0.1: nothing here reads it of this model"),
        ({"rope_scaling": YARN | dict(attention_factor=1.0)}, "attention_factor=1.0 is not supported"),
        (
            {"rope_scaling": dict(rope_type="yarn", original_max_position_embeddings=64)},
            "factor=None must be a positive number; write the model's own into the file",
        ),
    ],
)
def test_what_may_not_be_overridden(model: Path, overrides: dict[str, object], said: str):
    (problem,) = find_override_problems(model, overrides)
    key, value, rule = problem
    text = f"{key}{'' if value is None else '='}{value or ''}: {rule}"
    assert text.startswith("hf_config_overrides") and said in text


def test_what_a_model_does_not_read_is_refused(workplace: Path):
    problems = texts_of(load_config("grpo_tiny.yaml", YARN_OVERRIDES))  # nemotron_h has no rotary positions
    assert any(
        problem.startswith(f"{KEY}.rope_scaling=") and "nothing here reads it" in problem for problem in problems
    )


def test_the_context_is_that_of_the_overrides(model: Path):
    long = ["policy.max_total_sequence_length=8192", "policy.sequence_packing.enabled=false"]
    (problem,) = texts_of(load_config("grpo_tiny.yaml", [*long, DENSE]))
    assert "max_position_embeddings is 2048" in problem
    assert texts_of(load_config("grpo_tiny.yaml", [*long, *YARN_OVERRIDES])) == []


def test_a_run_starts_from_a_folder_that_differs_in_its_config(model: Path):
    config = check_start(load_config("grpo_tiny.yaml", YARN_OVERRIDES))
    folder = Path(config.policy.model_name)
    assert folder.parent == Path(config.checkpointing.checkpoint_dir).absolute()
    assert json.loads((folder / "config.json").read_text())["rope_parameters"] == YARN | dict(rope_theta=1e6)
    assert (folder / "model.safetensors").resolve() == (model / "model.safetensors").resolve()
    assert config.policy.tokenizer.name == "prepared/tiny/model"
    assert Path(check_start(config).policy.model_name) == folder, "what is overridden already stays"


def test_equal_overrides_make_one_folder_and_one_entry_of_the_cache(model: Path, tmp_path: Path):
    folders = [
        overridden_folder(model, {"rope_scaling": YARN | more}, beside=tmp_path / "run")
        for more in ({}, {}, {"factor": 2.0})
    ]
    assert folders[0] == folders[1] != folders[2]
    assert overridden_folder(model, {"max_position_embeddings": 2048}, beside=tmp_path / "run") == model
    keys = {entry_key(folder, tmp_path / "cache") for folder in (model, *folders)}
    assert len(keys) == 3


def test_null_and_an_auxiliary_loss_of_0_are_nothing(workplace: Path):
    for override in (f"{KEY}=null", f"{KEY}={{}}", f"{KEY}.router_aux_loss_coef=0.0"):
        assert load_run("grpo_tiny.yaml", [override])[0].policy.hf_config_overrides == {}


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_theta": 5e5},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "max_position_embeddings": 99},
        {"router_aux_loss_coef": 0.1},
    ],
)
@pytest.mark.parametrize(
    "written", [{"rope_theta": 1e6}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}]
)
def test_overrides_that_a_folder_has_already_change_nothing(overrides: dict[str, object], written: dict[str, object]):
    """A resumed run applies them to the folder in which its start has applied them."""
    once = overridden_config({"max_position_embeddings": 128, **written}, overrides)
    assert overridden_config(once, overrides) == once
