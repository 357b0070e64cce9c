# SPDX-License-Identifier: Apache-2.0
"""Algorithm of a config, and keys that it may not have then."""

from pathlib import Path

import pytest

from mrl.config.errors import ConfigError
from mrl.config.load import load_config
from tests.unit.config.problems import texts_of

SFT = "sft:\n  max_num_steps: 3\npolicy:\n  model_name: m\ndata:\n  train:\n    data_path: t\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_a_file_with_a_section_of_its_own_means_that_algorithm(tmp_path: Path):
    assert load_config(written(tmp_path, SFT)).algorithm == "sft"
    assert load_config(written(tmp_path, SFT + "grpo:\n  seed: 1\n")).algorithm == "grpo"
    assert load_config(written(tmp_path, SFT + "algorithm: grpo\n")).algorithm == "grpo"
    assert load_config("grpo_tiny.yaml", ["sft.seed=3"]).algorithm == "grpo"
    assert load_config("grpo_tiny.yaml", ["algorithm=sft"]).algorithm == "sft"


def test_an_unknown_algorithm_is_refused():
    with pytest.raises(ConfigError, match="algorithm"):
        load_config("grpo_tiny.yaml", ["algorithm=ppa"])


def test_a_run_without_engines_has_no_rules_for_them(workplace: Path):
    assert texts_of(load_config("sft_tiny.yaml")) == []
    assert texts_of(load_config("sft_tiny.yaml", ["policy.generation.vllm_cfg.enforce_eager=false"])) == []
    config = load_config(
        "sft_tiny.yaml", ["policy.generation.colocated={enabled: false}", "policy.train_global_batch_size=7"]
    )
    assert texts_of(config) == []
    assert (config.num_engines, config.num_policy_ranks, config.num_slots) == (0, 4, 4)


def test_two_algorithms_without_a_choice_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="algorithm is not set, and there are sections of sft and dpo"):
        load_config(written(tmp_path, SFT + "dpo:\n  seed: 1\n"))


def test_average_log_probs_follow_each_other(tmp_path: Path):
    config = load_config("dpo_tiny.yaml", ["dpo.preference_average_log_probs=true"])
    assert config.dpo.sft_average_log_probs
