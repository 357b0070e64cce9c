# SPDX-License-Identifier: Apache-2.0
"""Problems as data: ids, keys and places, and the text that users read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl import check
from mrl.config.errors import NotKnown, Problem, Problems
from mrl.config.load import load_config, read_run
from mrl.config.rules.training import check_optimizer
from mrl.config.schema.policy import PolicyConfig
from tests.unit.config.problems import found_with

MEGATRON = "policy.megatron_cfg"
CASES = {
    "policy.foo=1": ("unknown-key", "policy.foo"),
    "policy.generation.temperature=x": ("value", "policy.generation.temperature"),
    "grpo.seed=${grpo.none}": ("expression", "grpo.seed"),
    "algorithm: x": ("override", ""),
    f"{MEGATRON}.pipeline_model_parallel_size=3": (
        f"parallel-layout/{MEGATRON}.pipeline_model_parallel_size",
        f"{MEGATRON}.pipeline_model_parallel_size",
    ),
    "policy.generation.vllm_kwargs.no_such=1": (
        "arguments-of-libraries/policy.generation.vllm_kwargs",
        "policy.generation.vllm_kwargs.no_such",
    ),
    "policy.model_name=nowhere": ("model/policy.model_name", "policy.model_name"),
}
"""Override of grpo_tiny.yaml -> id and key of its first problem."""


@pytest.mark.parametrize("override", CASES)
def test_ids_are_stable(workplace: Path, override: str):
    first, *_ = found_with(f"++{override}")
    assert (first.id, first.key) == CASES[override]


def test_a_text_has_key_value_place_rule_and_way_out():
    other = Problem("b/a.b", "a.b", "1", "so is that", "end it")
    plain = Problem("a/a.b", "a.b", "1", "it is wrong", "mend it", origin="x.yaml:3", also=(other,))
    assert str(plain) == "a.b=1: it is wrong; mend it. Also: so is that; end it"
    assert (plain.as_json()["file"], plain.as_json()["line"]) == ("x.yaml", 3)
    placed = Problem("value", "a.b", None, "it is wrong", origin="command line", says_origin=True)
    assert str(placed) == "a.b (command line): it is wrong" and placed.as_json()["file"] is None


def test_problems_of_a_model_have_keys_and_values_of_its_section(workplace: Path):
    config = load_config("ppo_tiny.yaml", ["value.precision=bfloat16", "value.megatron_cfg.optimizer.bf16=false"])
    problems = Problems(config, config.facts.origins, "critic")
    problems.group = "optimizer"
    check_optimizer(config, problems)
    (problem,) = problems.merged
    key = "megatron_cfg.optimizer.bf16"
    assert (problem.id, problem.key, problem.value) == (f"optimizer/policy.{key}", f"value.{key}", "false")
    assert problem.rule == "must agree with value.precision=bfloat16"


def test_a_value_that_is_not_known_names_its_cause(workplace: Path):
    words = ["grpo.seed=x", "policy.generation.top_k=${grpo.seed}", "policy.megatron_cfg=3"]
    seen, _, problems = read_run("grpo_tiny.yaml", words)
    assert seen is not None and [p.key for p in problems] == ["policy.megatron_cfg", "grpo.seed"]
    with pytest.raises(NotKnown, match="grpo.seed is not known"):
        _ = seen.policy.generation.top_k
    with pytest.raises(NotKnown, match="policy.megatron_cfg is not known"):
        _ = seen.policy.megatron_cfg
    assert seen.policy.generation.top_p == 1.0 and isinstance(seen.policy, PolicyConfig)


def test_a_check_prints_problems_as_json(workplace: Path, capsys: pytest.CaptureFixture[str]):
    Path("mine.yaml").write_text(
        "defaults: grpo_tiny.yaml\npolicy:\n  precison: float32\n  megatron_cfg:\n    context_parallel_size: 3\n"
    )
    assert check.main(["mine.yaml", "--check", "--json"]) == 2
    output = capsys.readouterr()
    unknown, layout = json.loads(output.out)["problems"]
    assert (unknown["id"], unknown["key"], unknown["file"], unknown["line"]) == (
        "unknown-key",
        "policy.precison",
        "mine.yaml",
        3,
    )
    key = f"{MEGATRON}.context_parallel_size"
    assert (layout["id"], layout["value"], layout["file"], layout["line"]) == (
        f"parallel-layout/{key}",
        "3",
        "mine.yaml",
        5,
    )
    assert [other["id"] for other in layout["also"]] == [f"layout-of-the-model/{key}"]
    assert all(problem["text"] in output.err for problem in (unknown, layout)) and unknown["kind"] == "refused"
    assert check.main(["grpo_tiny.yaml", "grpo.seed=7", "--check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["grpo"]["seed"] == 7
