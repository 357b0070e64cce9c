# SPDX-License-Identifier: Apache-2.0
"""NeMo RL's evaluation files."""

from pathlib import Path

import pytest

from mrl.config.errors import ConfigError
from mrl.config.load import load_run

FILE = """
eval: {metric: cons@k, num_tests_per_prompt: 4, k_value: 2}
generation:
  backend: vllm
  max_new_tokens: ${generation.vllm_cfg.max_model_len}
  temperature: 0.0
  top_p: 0.9
  top_k: -1
  val_temperature: ${.temperature}
  val_top_p: ${.top_p}
  val_top_k: ${.top_k}
  num_prompts_per_step: -1
  model_name: some/model
  vllm_cfg: {async_engine: false, precision: bfloat16, tensor_parallel_size: 2, max_model_len: 2048}
tokenizer: {name: "${generation.model_name}", chat_template: default}
data:
  max_input_seq_length: ${generation.vllm_cfg.max_model_len}
  prompt_file: null
  dataset_name: AIME2024
  processor: math_hf_data_processor
  repeat: 3
env: {math: {num_workers: 8}}
cluster: {gpus_per_node: 2, num_nodes: 1}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "eval.yaml"
    path.write_text(FILE)
    return path


def test_every_key_finds_its_place(path: Path):
    config, migration = load_run(path, to_evaluate=True)
    generation, asked = config.policy.generation, config.data.validation
    assert (config.policy.model_name, config.policy.tokenizer.name) == ("some/model", "some/model")
    assert (generation.val_temperature, generation.val_top_p, generation.val_top_k) == (0.0, 0.9, None)
    # Those of training are not its business, and 0 would be out of their range.
    assert (generation.temperature, generation.top_p) == (1.0, 1.0)
    assert (
        generation.max_new_tokens
        == generation.vllm_cfg.max_model_len
        == config.policy.max_total_sequence_length
        == 2048
    )
    assert generation.vllm_cfg.tensor_parallel_size == 2 and config.data.max_input_seq_length == 2048
    assert asked is not None and (asked.dataset_name, asked.processor, asked.repeat) == (
        "AIME2024",
        "math_hf_data_processor",
        3,
    )
    assert config.eval.metric == "cons@k" and config.env.math.num_workers == 8
    assert "data.dataset_name=AIME2024 (eval.yaml:19) -> data.validation.dataset_name" in migration.renamed
    (reported,) = (
        line for line in migration.sections()["without effect"] if line.startswith("generation.num_prompts_per_step=-1")
    )
    assert "at once" in reported


def test_local_files_are_asked(path: Path):
    words = [
        "data.dataset_name=rows.jsonl",
        "+data.problem_key=Question",
        "+data.solution_key=Answer",
        "generation.temperature=0.6",
    ]
    config, _ = load_run(path, [*words, "generation.model_name=other"], to_evaluate=True)
    asked = config.data.validation
    assert asked is not None and (asked.data_path, asked.dataset_name) == ("rows.jsonl", None)
    assert (asked.input_key, asked.output_key) == ("Question", "Answer")
    assert (config.policy.generation.val_temperature, config.policy.tokenizer.name) == (0.6, "other")


def test_the_schema_s_own_names_win(path: Path):
    config, _ = load_run(
        path, ["policy.model_name=/exported", "policy.generation.val_temperature=0.3"], to_evaluate=True
    )
    assert (config.policy.model_name, config.policy.generation.val_temperature) == ("/exported", 0.3)


def test_nothing_is_trained_with_it(path: Path):
    with pytest.raises(ConfigError, match=r"is a file for evaluations.*python -m mrl\.evaluate"):
        load_run(path)


def test_a_wrong_key_is_still_wrong(path: Path):
    with pytest.raises(
        ConfigError, match=r"generation\.temprature=1 .*no such key; the nearest is policy\.generation\.temperature"
    ):
        load_run(path, ["generation.temprature=1"], to_evaluate=True)
