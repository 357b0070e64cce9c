# SPDX-License-Identifier: Apache-2.0
"""Algorithm of a config, and keys that it may not have then."""

from pathlib import Path

import pytest

from mrl.config.errors import ConfigError
from mrl.config.load import load_config
from mrl.config.rules.checks import find_problems

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
    assert find_problems(load_config("sft_tiny.yaml")) == []
    assert find_problems(load_config("sft_tiny.yaml", ["policy.generation.vllm_cfg.enforce_eager=false"])) == []
    config = load_config("sft_tiny.yaml", ["policy.generation.colocated={enabled: false}", "policy.train_global_batch_size=7"])
    assert find_problems(config) == []
    assert (config.num_engines, config.num_policy_ranks, config.num_slots) == (0, 4, 4)


def test_two_algorithms_without_a_choice_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="algorithm is not set, and there are sections of sft and dpo"):
        load_config(written(tmp_path, SFT + "dpo:\n  seed: 1\n"))


def test_average_log_probs_follow_each_other(tmp_path: Path):
    config = load_config("dpo_tiny.yaml", ["dpo.preference_average_log_probs=true"])
    assert config.dpo.sft_average_log_probs


def test_a_loss_of_nothing_is_refused(workplace: Path):
    (problem,) = find_problems(load_config("dpo_tiny.yaml", ["dpo.preference_loss_weight=0"]))
    assert problem.startswith("dpo.preference_loss_weight=0.0: with dpo.sft_loss_weight=0")


@pytest.mark.parametrize("name", ["sft_tiny.yaml", "dpo_tiny.yaml", "rm_tiny.yaml"])
def test_the_packaged_configs_have_no_problem(workplace: Path, name: str):
    assert find_problems(load_config(name)) == []


def test_a_reward_head_belongs_to_the_algorithm_that_trains_it(workplace: Path):
    assert find_problems(load_config("rm_tiny.yaml", ["policy.reward_model_cfg.enabled=true"])) == []
    (problem,) = find_problems(load_config("sft_tiny.yaml", ["policy.reward_model_cfg.enabled=true"]))
    assert problem.startswith("policy.reward_model_cfg.enabled=true: it follows from algorithm=sft")
    (problem,) = find_problems(load_config("rm_tiny.yaml", ["policy.reward_model_cfg.enabled=false"]))
    assert problem.startswith("policy.reward_model_cfg.enabled=false: it follows from algorithm=rm")
    (problem,) = find_problems(load_config("rm_tiny.yaml", ["policy.megatron_cfg.peft.enabled=true"]))
    assert problem.startswith("policy.megatron_cfg.peft.enabled=true: adapters freeze")


def test_other_rows_cannot_take_the_places_of_examples(workplace: Path):
    (problem,) = find_problems(load_config("sft_tiny.yaml", ["checkpointing.allow_changes=[model,data]"]))
    assert problem.startswith("checkpointing.allow_changes=['model', 'data']: algorithm=sft takes rows by their place in the data")
    assert find_problems(load_config("sft_tiny.yaml", ["checkpointing.allow_changes=[model]"])) == []
    assert find_problems(load_config("grpo_tiny.yaml", ["checkpointing.allow_changes=[data]"])) == []


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("checkpointing.metric_name=val:accuracy", "checkpointing.metric_name=val:accuracy: algorithm=sft has no such metric"),
        ("sft.max_num_steps=0", "sft.max_num_steps=0: the run would train nothing"),
        ("policy.router_replay.enabled=true", "policy.router_replay.enabled=true: algorithm=sft has no engines"),
    ],
)
def test_what_an_algorithm_without_engines_cannot_do(workplace: Path, override: str, problem: str):
    found = find_problems(load_config("sft_tiny.yaml", [override]))
    assert len(found) == 1 and found[0].startswith(problem)


def test_checkpoints_of_null_metric_or_none_at_all(workplace: Path):
    assert find_problems(load_config("sft_tiny.yaml", ["checkpointing.metric_name=null"])) == []
    assert find_problems(load_config("sft_tiny.yaml", ["checkpointing.metric_name=val:accuracy", "checkpointing.enabled=false"])) == []
