# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from mrl.config.errors import ConfigError
from mrl.config.load import load_config
from mrl.config.rules.checks import find_problems
from tests.unit.config.problems import texts_of


def load(*overrides: str):
    return load_config("grpo_tiny.yaml", list(overrides))


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_conversations_of_nemo_gym_take_no_prompt_file(workplace: Path):
    (workplace / "cot.txt").write_text("{}")
    for setting in ("prompt_file=cot.txt", "system_prompt=s", "system_key=s"):
        (problem,) = texts_of(load("data.default.processor=nemo_gym_data_processor", f"data.default.{setting}"))
        assert problem.startswith(
            f"data.default.{setting}: processor=nemo_gym_data_processor leaves conversations as the rows give"
        )


def test_a_data_set_has_one_system_message(workplace: Path):
    (workplace / "system.txt").write_text("Be brief.")
    (problem,) = texts_of(load("data.default.system_prompt=s", "data.default.system_prompt_file=system.txt"))
    assert problem.startswith("data.default.system_prompt=s: system_prompt_file is set, too")


def test_named_data_sets_need_no_path_and_bring_their_validation(workplace: Path):
    config = load("data.train.data_path=null", "data.train.dataset_name=OpenMathInstruct-2", "data.validation=null")
    assert texts_of(config) == []
    assert (config.data.train.source, config.data.train.held_out, config.data.has_validation) == (
        "nvidia/OpenMathInstruct-2",
        0.05,
        True,
    )
    config = load(
        "data.train.split_validation_size=0", "data.train.dataset_name=OpenMathInstruct-2", "data.validation=null"
    )
    assert (config.data.train.source, config.data.has_validation) == ("prepared/tiny/data/train.jsonl", False)
    assert [
        problem
        for problem in texts_of(config)
        if problem.startswith("checkpointing.metric_name=val:accuracy: there is no validation")
    ]


def test_a_path_that_a_file_leaves_to_its_launcher_is_to_be_provided(tmp_path: Path):
    def kinds(data: str, *overrides: str) -> dict[str, str]:
        path = write(tmp_path, f"policy: {{model_name: m}}\ndata: {{train: {{{data}}}, validation: null}}\n")
        problems = find_problems(load_config(path, overrides))
        return {problem.key: problem.kind for problem in problems if problem.key.endswith("data_path")}

    assert kinds("data_path: null") == {"data.train.data_path": "to be provided"}
    assert kinds("env_name: math") == {"data.train.data_path": "refused"}
    assert kinds("env_name: math", "data.train.data_path=null") == {"data.train.data_path": "refused"}
    assert kinds("data_path: null, dataset_name: OpenMathInstruct-2") == {}


def test_data_sets_follow_the_default_unless_they_say_otherwise(tmp_path: Path):
    path = write(
        tmp_path,
        "policy: {model_name: m}\ngrpo: {seed: 7}\ndata:\n"
        "  default: {prompt_file: cot.txt, input_key: q, split: dev}\n"
        "  train:\n"
        "    - {data_path: a, prompt_file: null}\n"
        "    - {dataset_name: DeepScaler, split_validation_size: 0.05, seed: '${grpo.seed}', input_key: p}\n"
        "  validation: {data_path: b, split: test}\n",
    )
    data = load_config(path).data
    first, second = data.train_sets.values()
    assert (first.data_path, first.prompt_file, first.input_key, first.split) == ("a", None, "q", "dev")
    assert (second.source, second.prompt_file, second.input_key, second.seed) == (
        "agentica-org/DeepScaleR-Preview-Dataset",
        "cot.txt",
        "p",
        7,
    )
    (validation,) = data.validation_sets.values()
    assert (validation.split, validation.prompt_file) == ("test", "cot.txt")
    # One set in place of the list, by an override.
    assert [
        dataset.data_path for dataset in load_config(path, ["data.train={data_path: c}"]).data.train_sets.values()
    ] == ["c"]


def test_keys_of_listed_data_sets_are_checked(tmp_path: Path):
    path = write(tmp_path, "policy: {model_name: m}\ndata:\n  train:\n    - {data_pth: a}\n")
    with pytest.raises(
        ConfigError,
        match=r"datasets\[0\].data_pth=a \(config.yaml:3\): no such key; the nearest is .*\[0\].data_path",
    ):
        load_config(path)
