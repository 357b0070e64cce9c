import pytest

from mrl.env import HF_TOKEN, VARIABLES, secret_values


def test_an_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "")
    assert HF_TOKEN.read() is None
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    assert HF_TOKEN.read() == "hf_canary"


def test_secrets_are_found_by_table_and_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    monkeypatch.setenv("MY_DATABASE_PASSWORD", "canary-two")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false-canary")
    assert {"hf_canary", "canary-two"} <= secret_values()
    assert "false-canary" not in secret_values()


def test_every_variable_has_a_manual_and_one_entry():
    assert all(variable.manual for variable in VARIABLES)
    assert len({variable.name for variable in VARIABLES}) == len(VARIABLES)
