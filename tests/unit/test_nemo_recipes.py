# SPDX-License-Identifier: Apache-2.0
"""The bench over NeMo RL's files counts them by what they are and by what is refused of them."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from mrl.config.errors import Problem
from mrl.config.files import read_settings
from mrl.nemo.dialect.tables import NEEDS_GPU
from scripts.bench import nemo_recipes
from scripts.bench.nemo_recipes import Outcome, check_file, check_files, count_row, group_rows, reason_of, reason_rows
from tests.sources import ROOT

NEMO_RL = ROOT / "tests/data/nemo_rl"
ENGINE, FP8 = "policy.generation.vllm_cfg", "policy.megatron_cfg.fp8_cfg.enabled"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with files of every kind."""
    checkout = tmp_path_factory.mktemp("checkout")
    configs = checkout / "examples/configs"
    configs.mkdir(parents=True)
    for name in ("grpo_math_1B", "dpo"):
        shutil.copy(NEMO_RL / f"{name}.yaml", configs)
    for name, text in {
        "typo": "grpo: {sed: 1}\npolicy: {megatron_cfg: {enabled: true}, dtensor_cfg: {enabled: false}}\n",
        "ppo": "ppo: {max_num_steps: 1}\n",
        "mopd": "on_policy_distillation: {teachers: [a]}\n",
        "vlm": "policy: {model_name: Qwen/Qwen2.5-VL-3B-Instruct}\n",
        "cluster": "policy: {model_name: Qwen/Qwen3-30B-A3B}\ncluster: {num_nodes: 0}\n",
    }.items():
        (configs / f"{name}.yaml").write_text(f"defaults: grpo_math_1B.yaml\n{text}")
    (configs / "eval.yaml").write_text(
        "generation: {model_name: a/b}\ndata: {dataset_name: AIME2024}\neval: {k_value: 2}\ncluster: "
        "{gpus_per_node: 1}\n"
    )
    (configs / "quantiser.yaml").write_text("quantize: {algorithm: max}\n")
    return checkout


@pytest.fixture(scope="module")
def outcomes(checkout: Path) -> list[Outcome]:
    return check_files(checkout)


def test_files_are_counted_by_what_they_are(outcomes: list[Outcome]):
    rows = {(row["algorithm"], row["trained by"]): row for row in group_rows(outcomes)}
    accepted = {
        group: (int(row["accepted, model known"] or 0), int(row["accepted, model unknown"] or 0))
        for group, row in rows.items()
    }
    assert all(row["files"] == sum(accepted[group]) + int(row["refused"] or 0) for group, row in rows.items())
    counts = {group: (row["files"], sum(accepted[group]), row["refused for one reason"]) for group, row in rows.items()}
    assert counts == {
        ("grpo", "megatron"): (1, 0, 1),
        ("grpo", "automodel"): (2, 1, 1),
        ("dpo", "dtensor"): (1, 1, 0),
        ("ppo", "automodel"): (1, 1, 0),
        ("distillation", "automodel"): (1, 0, 1),
        ("images or sound", "automodel"): (1, 1, 0),
        ("evaluation", "-"): (1, 0, 1),
        ("all language models", "megatron"): (1, 0, 1),
        ("all", "all"): (8, 4, 4),
    }
    assert rows["grpo", "megatron"]["most often refused"] == "grpo.sed (1)"


def test_files_that_need_a_gpu_are_counted_once():
    gpu = ["policy.quant_cfg: training with quantised weights is not built", "policy.fp8: training in FP8 " + NEEDS_GPU]
    found = [
        Outcome("a", "grpo", "megatron", "m", refused)
        for refused in (gpu, [*gpu, "a.b: is required"], ["a.b: is required"], [])
    ]
    assert count_row("grpo", "megatron", found)["refused, needing a GPU"] == 2


def test_a_model_that_is_here_is_checked_to_the_end(outcomes: list[Outcome]):
    found = {Path(outcome.file).stem: outcome for outcome in outcomes}
    assert found["cluster"].unchecked == [
        "cluster.num_nodes: without its value not checked: sockets, parallel layout, profiler, batches"
    ]
    assert found["grpo_math_1B"].unchecked == [] and found["grpo_math_1B"].is_accepted
    (unchecked,) = found["vlm"].unchecked
    assert unchecked.startswith("policy.model_name: not in the local Hugging Face cache")


def test_all_but_two_of_the_recipes_in_fp8_are_accepted(tmp_path: Path):
    """Files whose engines or Megatron are in FP8; fourteen more are in NVFP4, which is not built."""
    base = {".".join(key): setting.value for key, setting in read_settings(NEMO_RL / "grpo_math_1B.yaml").items()}
    recipes = json.loads((NEMO_RL / "fp8_recipes.json").read_text())
    for recipe in recipes:
        settings = {key: value for key, value in base.items() if key not in recipe["without"]} | recipe["settings"]
        assert "fp8" in (settings.get(f"{ENGINE}.precision"), settings.get(f"{ENGINE}.kv_cache_dtype")) or settings[FP8]
        path = tmp_path / recipe["file"]
        path.parent.mkdir(parents=True, exist_ok=True)
        # A dot in a name at the top stands for a level.
        path.write_text(yaml.safe_dump(settings))
    found = check_files(tmp_path)
    assert len(found) == len(recipes) == 18 and all(outcome.is_megatron for outcome in found)
    refused = {Path(outcome.file).stem: outcome.refused for outcome in found if not outcome.is_accepted}
    assert refused == {
        "grpo-qwen3-8b-base-1n8g-fp8-kvcache-megatron": [
            "policy.generation.vllm_cfg.kv_cache_dtype: a KV cache in FP8 is not built"
        ],
        "grpo-qwen3.5-35ba3b-2n8g-megatron-ep16tp2-fp8": [
            "policy.model_name: config.json: model_type=… is a text model with a vision tower, which mrl does not train"
        ],
    }
    unknown = {outcome.model for outcome in found if outcome.unchecked}
    assert {model.partition(" ")[0] for model in unknown} == {"Qwen/Qwen3.5-9B-Base", "Follow"}


REASONS = {
    "grpo.sed: no such key": Problem("unknown-key", "grpo.sed", "1", "no such key", "the nearest is grpo.seed"),
    "teacher: no such section, with N keys": Problem(
        "unknown-section", "teacher", None, "no such section, with 41 keys"
    ),
    "a.b: does not divide the N slots of c.d=… nodes": Problem(
        "x", "a.b", "8", "does not divide the 4 slots of c.d=2 nodes"
    ),
    "a.b: is required and has no default": Problem(
        "required", "a.b", None, "a.b is required and has no default", "set it"
    ),
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_reason_is_a_problem_without_its_values(reason: str):
    assert reason_of(REASONS[reason]) == reason


def test_a_traceback_is_a_failure(checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(nemo_recipes, "examine", fail)
    outcome = check_file(checkout, checkout / "examples/configs/dpo.yaml")
    assert outcome is not None and "ZeroDivisionError" in outcome.failure and not outcome.is_accepted
    monkeypatch.setattr(nemo_recipes, "check_files", lambda _: [outcome])
    monkeypatch.setattr(
        sys, "argv", ["nemo_recipes", str(checkout), "--no-record", "--json", str(checkout / "found.json")]
    )
    assert nemo_recipes.main() == 1 and "ZeroDivisionError" in capsys.readouterr().out
    assert json.loads((checkout / "found.json").read_text())[0]["file"] == "examples/configs/dpo.yaml"


def test_reasons_are_counted_by_files(outcomes: list[Outcome]):
    rows = reason_rows([outcome for outcome in outcomes if outcome.algorithm in ("grpo", "ppo")])
    assert {row["reason"]: (row["files"], row["refused for it alone"]) for row in rows} == {
        "grpo.sed: no such key": (1, 1),
        "cluster.num_nodes: out of range": (1, 1),
    }
