from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.config.redact import redact, redact_text, resolved_yaml


def test_the_saved_config_loads_and_is_the_same(tmp_path: Path):
    config = load_config("grpo_tiny.yaml", ["+policy.generation.vllm_kwargs.a=[1, {b: null}]", "data.max_input_seq_length=3"])
    path = tmp_path / "config.yaml"
    path.write_text(resolved_yaml(config))
    assert load_config(path) == config


def test_no_secret_is_saved(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary-one")
    monkeypatch.setenv("SOME_SERVICE_PASSWORD", "canary-two")
    overrides = ["policy.model_name=/models/${oc.env:SOME_SERVICE_PASSWORD}", "+policy.generation.vllm_kwargs.hf_token=canary-three"]
    overrides += ["data.train.data_path=https://me:canary-four@host/train.jsonl", "checkpointing.checkpoint_dir=a-canary-one-b"]
    text = resolved_yaml(load_config("grpo_tiny.yaml", overrides))
    assert "canary" not in text
    assert "https://me:<redacted>@host/train.jsonl" in text and "a-<redacted>-b" in text


@pytest.mark.parametrize(
    "key", ["token", "hf_token", "API_KEY", "apikey", "db-password", "client_secret", "aws_access_key_id", "credentials"]
)
def test_keys_of_secrets(key: str):
    assert redact({key: "abc", "list": [{key: "abc"}]}) == {key: "<redacted>", "list": [{key: "<redacted>"}]}


@pytest.mark.parametrize("key", ["stop_token_ids", "max_new_tokens", "tokenizer", "metric_name", "token_level_loss", "secretary"])
def test_keys_that_are_no_secrets(key: str):
    assert redact({key: "abc"}) == {key: "abc"}


def test_short_values_of_the_environment_stay(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "true")
    assert redact_text("true") == "true"
