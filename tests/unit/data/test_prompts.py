import json
from dataclasses import replace
from pathlib import Path

import pytest

from mrl.config.schema import RunConfig
from mrl.config.schema_algo import GrpoConfig
from mrl.config.schema_data import DataConfig, DataDefaultConfig, TrainDataConfig, ValidationDataConfig
from mrl.config.schema_generation import GenerationConfig, VllmConfig
from mrl.config.schema_policy import PolicyConfig, TokenizerConfig
from mrl.data.prompts import PromptLimits, load_prompts
from mrl.prepare_tokenizer import byte_tokenizer

EOS = 258


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A run on two training rows and three validation rows; prompts are 3 bytes and 2 markers, contexts 32 tokens."""
    model = tmp_path / "model"
    byte_tokenizer(4096).save_pretrained(model)
    write(tmp_path / "train.jsonl", [{"question": "1+1", "answer": "2"}, {"question": "2+2", "answer": "4", "id": "own"}])
    write(tmp_path / "validation.jsonl", [{"question": f"{i}+1", "answer": str(i + 1)} for i in range(3)])
    generation = GenerationConfig(max_new_tokens=16, vllm_cfg=VllmConfig(max_model_len=32))
    return RunConfig(
        grpo=GrpoConfig(max_val_samples=2),
        policy=PolicyConfig(model_name=str(model), tokenizer=TokenizerConfig(name=str(model)), generation=generation),
        data=DataConfig(
            train=TrainDataConfig(data_path=str(tmp_path / "train.jsonl")),
            validation=ValidationDataConfig(data_path=str(tmp_path / "validation.jsonl")),
        ),
    )


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_what_a_run_asks(config: RunConfig):
    data = load_prompts(config)
    assert [(prompt.prompt_id, prompt.text, prompt.expected_answer, prompt.env_name) for prompt in data.train] == [
        ("train:1", "1+1", "2", "math"),
        ("own", "2+2", "4", "math"),
    ]
    assert data.train[0].token_ids[1:-1] == tuple(b"1+1")
    assert [prompt.prompt_id for prompt in data.validation] == ["validation:1", "validation:2"]
    assert data.pad_token_id == 256
    sampling = data.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens) == (1.0, 1.0, None, 16)
    assert sampling.stop_token_ids == (EOS,)


def test_without_validation_there_are_no_validation_prompts(config: RunConfig):
    config.data.validation = None
    assert load_prompts(config).validation == []


def test_stop_tokens_of_tokenizer_and_generation_config(config: RunConfig):
    file = Path(config.policy.model_name) / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [11, EOS]}))
    assert load_prompts(config).sampling.stop_token_ids == (11, EOS)
    file.write_text(json.dumps({"eos_token_id": 2}))
    assert load_prompts(config).sampling.stop_token_ids == (2, EOS)
    config.policy.generation.stop_token_ids = [7]
    assert load_prompts(config).sampling.stop_token_ids == (7,)


def test_rows_that_are_too_long_are_all_named(config: RunConfig):
    path = Path(config.data.train.data_path)
    write(path, [{"question": "1" * length, "answer": "2"} for length in (14, 15, 3, 99)])
    with pytest.raises(ValueError) as caught:
        load_prompts(config)
    message = str(caught.value)
    assert message.startswith(f"data.train.data_path={path} has 2 bad rows")
    assert f"{path}:2: the prompt has 17 tokens; policy.generation.vllm_cfg.max_model_len=32 less 16 " in message
    assert f"{path}:4: the prompt has 101 tokens" in message
    config.data.max_input_seq_length = 15
    with pytest.raises(ValueError, match="data.max_input_seq_length allows 15") as caught:
        load_prompts(config)
    assert "has 3 bad rows" in str(caught.value)


def test_rows_beyond_max_val_samples_are_checked_too(config: RunConfig):
    assert config.data.validation is not None
    path = Path(config.data.validation.data_path)
    path.write_text(path.read_text() + "bad\n")
    with pytest.raises(ValueError, match=r"data.validation.data_path=.*\n.*validation.jsonl:4: invalid JSON"):
        load_prompts(config)


def test_unknown_environment_of_a_row(config: RunConfig):
    write(Path(config.data.train.data_path), [{"question": "1+1", "answer": "2", "env_name": "maths"}])
    with pytest.raises(ValueError, match="train.jsonl:1: env_name .*'maths' is not known; use one of math"):
        load_prompts(config)


def test_unknown_processor(config: RunConfig):
    config.data.default = DataDefaultConfig(processor="math_processor")
    with pytest.raises(ValueError, match="data.default.processor=math_processor is not known; use one of math_data_processor"):
        load_prompts(config)


def test_a_rollout_as_long_as_the_context_takes_what_the_prompt_leaves():
    limits = PromptLimits(max_input_length=None, context_length=32, max_new_tokens=32)
    assert limits.reason_against(31) is None
    assert "less 1 for the rollout" in str(limits.reason_against(32))
    assert replace(limits, max_new_tokens=31).reason_against(1) is None
    assert replace(limits, max_new_tokens=31).reason_against(2) is not None
