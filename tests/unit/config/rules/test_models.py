# SPDX-License-Identifier: Apache-2.0
"""Models this machine lacks, whole or in part: to be provided, whichever section names them, without a traceback."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mrl import check
from mrl.config.errors import ConfigError
from mrl.config.load import load_config
from mrl.loop.preflight import check_start
from mrl.ops.doctor.run_inputs import check_inputs

# The model of these tests has seven layers.
STAGES = "megatron_cfg.num_layers_in_first_pipeline_stage=4"
RUNS = {
    "policy": ["grpo_tiny.yaml"],
    "value": ["ppo_tiny.yaml", f"value.{STAGES}"],
    "teacher": ["distillation_tiny.yaml", f"teacher.{STAGES}"],
}


def words(section: str, model: str, workplace: Path) -> list[str]:
    """The command line of a run with a model of its own in a section, and the one of these tests in all others."""
    shutil.copytree(workplace / "prepared/tiny/model", workplace / "prepared/tiny/teacher", dirs_exist_ok=True)
    shutil.copytree(workplace / "prepared/tiny/model", workplace / "half", dirs_exist_ok=True)
    (workplace / "half/model.safetensors").unlink()
    shutil.copy(workplace / "prepared/tiny/data/train.jsonl", workplace / "prepared/tiny/data/warm_start.jsonl")
    tokenizer = ["policy.tokenizer.name=prepared/tiny/model"] if section == "policy" else []
    return [*RUNS[section], *tokenizer, f"{section}.model_name={model}"]


@pytest.mark.parametrize("section", RUNS)
@pytest.mark.parametrize(
    ("model", "reason"),
    [("gone", "no readable config.json"), ("half", "the weights are not all here (no readable model.saf")],
)
def test_a_model_that_is_not_here_is_to_be_provided(workplace: Path, section: str, model: str, reason: str):
    name, *overrides = words(section, model, workplace)
    checked = check.examine(name, overrides)
    assert checked.refused == []
    (missing,) = map(str, (*checked.provided, *checked.unchecked))
    assert missing.startswith(f"{section}.model_name={model}: {reason}")
    assert [check.main([name, *overrides, check.OPTION, *strict]) for strict in ([], [check.STRICT])] == [0, 2]
    with pytest.raises(ConfigError, match=rf"{section}\.model_name={model}: "):
        check_start(load_config(name, overrides))


@pytest.mark.parametrize("section", RUNS)
def test_a_machine_that_has_all_models_passes_the_strict_check(workplace: Path, section: str):
    assert check.main([*words(section, "prepared/tiny/model", workplace), check.OPTION, check.STRICT]) == 0


@pytest.mark.parametrize("section", RUNS)
def test_the_doctor_looks_at_all_models(workplace: Path, section: str):
    for model in ("gone", "half"):
        name, *overrides = words(section, model, workplace)
        found = [finding.found for finding in check_inputs(load_config(name, overrides)) if finding.status == "problem"]
        assert any(model in text for text in found), found
