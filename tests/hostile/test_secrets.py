# SPDX-License-Identifier: Apache-2.0
"""However a config spells an environment variable, its value is printed nowhere and saved nowhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from mrl import check
from mrl.config.load import load_config, resolved_yaml
from mrl.config.secrets import redact_text, start_logging

pytestmark = pytest.mark.attack("a secret is written down")

CANARY = "canary-hostile-4711"
VARIABLE = "COMPANY_PASS"
SPELLINGS = {
    "plain": "${oc.env:COMPANY_PASS}",
    "quoted": '${oc.env:"COMPANY_PASS"}',
    "single quotes": "${oc.env:'COMPANY_PASS'}",
    "blank before": "${ oc.env:COMPANY_PASS}",
    "blank behind": "${oc.env: COMPANY_PASS }",
    "tab": "${oc.env:\tCOMPANY_PASS}",
    "with a default": "${oc.env:COMPANY_PASS,other}",
    "as a default": "${oc.env:ABSENT,${oc.env:COMPANY_PASS}}",
    "assembled": "${oc.env:COMPANY_${oc.decode:PASS}}",
    "assembled resolver": "${oc.${oc.decode:env}:COMPANY_PASS}",
    "decoded": "${oc.decode:${oc.env:COMPANY_PASS}}",
    "decoded without quotes": "${oc.decode:${oc.env:QUOTED}}",
    "selected": "${oc.select:nothing,${oc.env:COMPANY_PASS}}",
    "within text": "a-${oc.env:COMPANY_PASS}-b",
    "name of another variable": "${oc.env:${oc.env:POINTER}}",
}


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment with a secret under a name that does not tell."""
    monkeypatch.setenv(VARIABLE, CANARY)
    monkeypatch.setenv("QUOTED", f"'{CANARY}'")
    monkeypatch.setenv("POINTER", VARIABLE)


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_a_spelling_of_a_variable_hides_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], spelling: str):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"defaults": "grpo_tiny.yaml", "policy": {"model_name": spelling}}))
    config = load_config(path)
    start_logging()
    check.main([str(path)])
    printed = capsys.readouterr()
    assert CANARY in config.policy.model_name and "<redacted>" in printed.out
    for text in (resolved_yaml(config), redact_text(str(config), config.facts.secrets), printed.out, printed.err):
        assert CANARY not in text


@pytest.mark.parametrize("name", ["HF_TOKEN", "MY_API_KEY", "DB_PASSWORD"])
def test_the_default_of_a_secret_is_one(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(name, raising=False)
    config = load_config("grpo_tiny.yaml", [f"policy.model_name=${{oc.env:{name},{CANARY}}}"])
    assert CANARY in str(config) and CANARY not in resolved_yaml(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [("RUN_NAME", "first-run"), ("SCRATCH", "/scratch/somebody"), ("SLURM_JOB_ID", "1234567")],
    ids=lambda value: value,
)
def test_places_and_names_stay_readable(name: str, value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, value)
    assert value in resolved_yaml(load_config("grpo_tiny.yaml", [f"policy.model_name=x-${{ oc.env:{name}}}"]))


KEY = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0\nBAQEFAASCBKcwggSjAgEAAoI\r\n-----END PRIVATE KEY-----\n"


@pytest.mark.parametrize(
    "quote", [str, repr, lambda key: key.splitlines()[1], lambda key: " ".join(key.split("\n"))], ids=range(4)
)
def test_no_line_of_a_long_secret_is_printed(monkeypatch: pytest.MonkeyPatch, quote: Callable[[str], str]):
    """Secrets of the environment and of a config; whole, and as messages quote a part of it."""
    said = f"cannot read {quote(KEY)}"
    of_config = redact_text(said, {KEY})
    monkeypatch.setenv("DEPLOY_PRIVATE_KEY", KEY)
    for text in (of_config, redact_text(said)):
        assert text.startswith("cannot read ") and not any(part in text for part in ("MIIEv", "BAQEF"))
