# SPDX-License-Identifier: Apache-2.0
"""Prompt files that NeMo RL's configs name from their checkout."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from mrl.config.files import packaged_configs
from mrl.config.load import load_run
from mrl.config.migration import Migration

REQUIRED = "policy: {model_name: m}\ndata: {train: {data_path: d}}\n"
COT = "examples/prompts/cot.txt"
KEYS = ("data.default.prompt_file", "data.default.system_prompt_file", "data.train.prompt_file")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config two folders below the top of a checkout, which is not the working directory."""
    folder = tmp_path / "checkout/examples/configs"
    folder.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (folder / "config.yaml").write_text(REQUIRED)
    return folder / "config.yaml"


def prompt_of(config: Path | str, *overrides: str) -> tuple[str | None, Migration]:
    run, migration = load_run(config, overrides)
    return run.data.default.prompt_file, migration


@pytest.mark.parametrize("key", KEYS)
def test_a_prompt_of_the_checkout_is_found_from_anywhere(config: Path, caplog: pytest.LogCaptureFixture, key: str):
    own = config.parents[2] / COT
    own.parent.mkdir()
    own.write_text("Mine. {}")
    with caplog.at_level(logging.INFO):
        run, migration = load_run(config, [f"{key}={COT}"])
    section = run.data.train if "train" in key else run.data.default
    name = key.rpartition(".")[2]
    assert {"prompt_file": section.prompt_file, "system_prompt_file": section.system_prompt_file}[name] == str(own)
    assert f"{key}={COT} (command line) is not here; taking {own}" in caplog.text
    assert not migration.sections() and not migration.different


def test_a_prompt_here_comes_before_that_of_the_checkout(config: Path):
    for folder in (config.parents[2], Path()):
        (folder / "examples/prompts").mkdir(parents=True)
        (folder / COT).write_text("{}")
    assert prompt_of(config, f"data.default.prompt_file={COT}")[0] == COT


def test_the_packaged_prompt_is_a_difference_from_nemo_rl(config: Path):
    found, migration = prompt_of(config, f"data.default.prompt_file={COT}")
    packaged = packaged_configs() / "prompts/cot.txt"
    assert found == str(packaged)
    assert packaged.read_text().format("1 + 1 = ?").endswith("1 + 1 = ?\n")
    setting = f"data.default.prompt_file={COT} (command line)"
    assert migration.translated == [f"{setting} -> {packaged}"]
    (line,) = migration.differences() or []
    assert line.startswith(f"{setting}: the file is neither here nor above the config, and mrl's prompt")
    assert prompt_of(config, "data.default.prompt_file=prompts/other.txt")[0] == "prompts/other.txt"


def test_a_config_of_mrl_s_has_its_own_prompt(config: Path):
    config.write_text("defaults: grpo_math_1B.yaml\npolicy: {model_name: m}\n")
    for name in (config, "grpo_math_1B.yaml"):
        found, migration = prompt_of(name)
        assert found == str(packaged_configs() / "prompts/cot.txt") and not migration.different
