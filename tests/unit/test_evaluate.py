# SPDX-License-Identifier: Apache-2.0
"""Meaning of the argument of `python -m mrl.evaluate`."""

from pathlib import Path

import pytest

from conversion.files.reading import sha256_file
from mrl.check import parse_evaluation
from mrl.config.load import load_run
from mrl.config.rules.checks import find_problems
from mrl.evaluate import find_target


def checkpoint(run: Path, step: int) -> Path:
    folder = run / f"step_{step}"
    folder.mkdir(parents=True)
    (run / "config.yaml").write_text("algorithm: grpo\n")
    (folder / "manifest.json").write_text("{}")
    (folder / "COMPLETE").write_text(sha256_file(folder / "manifest.json"))
    return folder


def test_a_config_is_evaluated_with_its_model():
    target = find_target("grpo_tiny.yaml", None)
    assert (target.config, target.name, target.model, target.checkpoint) == ("grpo_tiny.yaml", "grpo_tiny", None, None)


def test_a_config_may_be_named_as_nemo_rl_names_it():
    given = parse_evaluation(["--config", "eval.yaml", "generation.temperature=0", "--check"])
    assert (given.words, given.config) == (["eval.yaml", "generation.temperature=0"], None)
    given = parse_evaluation(["results/run", "--config", "eval.yaml", "--check"])
    assert (given.words, given.config) == (["results/run"], "eval.yaml")
    assert parse_evaluation(["--config", "eval.yaml", "--check"]).words == ["eval.yaml"]


def test_a_run_is_evaluated_at_its_newest_checkpoint_or_at_the_one_that_is_named(tmp_path: Path):
    first, last = checkpoint(tmp_path / "run", 9), checkpoint(tmp_path / "run", 10)
    newest = find_target(str(tmp_path / "run"), None)
    assert (newest.checkpoint, newest.config, newest.name) == (
        last,
        str(tmp_path / "run" / "config.yaml"),
        "run-step_10",
    )
    assert find_target(str(first), "other.yaml").checkpoint == first
    assert find_target(str(first), "other.yaml").config == "other.yaml"


def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path):
    first = checkpoint(tmp_path / "run", 9)
    with pytest.raises(ValueError, match=f"step_99: no such checkpoint; give one of its checkpoints: {first}"):
        find_target(str(tmp_path / "run" / "step_99"), None)


def test_no_trainer_has_to_fit_for_an_evaluation():
    overrides = [f"policy.megatron_cfg.{name}_model_parallel_size=3" for name in ("tensor", "pipeline", "expert")]
    assert len(find_problems(load_run("grpo_tiny.yaml", overrides)[0])) > len(
        find_problems(load_run("grpo_tiny.yaml")[0])
    )
    config, _ = load_run("grpo_tiny.yaml", overrides, to_evaluate=True)
    assert (
        find_problems(config) == find_problems(load_run("grpo_tiny.yaml", to_evaluate=True)[0])
        and not config.checkpointing.enabled
    )


def test_a_model_needs_a_config(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is a model; name with --config"):
        find_target(str(tmp_path), None)
    assert find_target(str(tmp_path), "grpo_tiny.yaml").model == tmp_path


def test_other_folders_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="is no run folder"):
        find_target(str(tmp_path), None)
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ValueError, match="has no complete checkpoint yet"):
        find_target(str(tmp_path), None)


def test_an_override_longer_than_a_file_name_is_an_override():
    options = parse_evaluation(["--config", "grpo_tiny.yaml", override := f"policy.model_name={'o' * 300}"])
    assert options.words == ["grpo_tiny.yaml", override] and options.config is None
