# SPDX-License-Identifier: Apache-2.0
"""One fault is one problem, which names the setting; whatever a number is set to, the answer is no traceback."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import pytest

from mrl import check
from mrl.config.errors import value_at
from mrl.config.fields import Range
from mrl.config.files import packaged_configs
from mrl.config.load import load_config
from mrl.config.schema.keys import KEYS
from scripts.config_page import markers
from tests.sources import ROOT
from tests.unit.config.problems import problems_of

LONG = pytest.mark.long("config")
CONFIGS = sorted(path.name for path in packaged_configs().glob("*.yaml"))
MODELS = {"grpo_nanov3.yaml": "nemotron3_nano_30b_a3b", "grpo_qwen3_30ba3b.yaml": "qwen3_30b_a3b"}
MARKERS = markers()
SIZES = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
BREAKS = [f"policy.megatron_cfg.{name}_parallel_size={size}" for name in SIZES for size in (3, 7)]
BREAKS += ["policy.generation.vllm_cfg.tensor_parallel_size=3", "policy.generation.vllm_cfg.expert_parallel_size=1000"]
BREAKS += [
    "cluster.num_nodes=7",
    "grpo.num_generations_per_prompt=1",
    "policy.megatron_cfg.num_layers_in_first_pipeline_stage=1000",
]
BREAKS += ["loss_fn.use_kl_in_reward=true", "policy.generation.stop_strings=['']", "policy.train_global_batch_size=7"]
BREAKS += [
    "policy.dynamic_batching.enabled=true",
    "policy.megatron_cfg.freeze_config.modules=[nothing]",
    "checkpointing.metric_name=x",
]
BREAKS += ["policy.megatron_cfg.optimizer.clip_grad=-1"]
# Each config has an eighth of them here, and each of them several configs; part "config" tries every pair.
PAIRS = [
    (name, override, (position + index) % 8 > 0)
    for position, name in enumerate(CONFIGS)
    for index, override in enumerate(BREAKS)
]


def model_of(name: str, workplace: Path) -> list[str]:
    """An override that gives a packaged config of a large model the sizes of one."""
    if name not in MODELS:
        return []
    (workplace / "model").mkdir()
    (workplace / "model/config.json").write_text(
        (ROOT / f"scripts/bench/models/{MODELS[name]}.config.json").read_text()
    )
    return ["policy.model_name=model"]


def refused(name: str, *overrides: str) -> list[str]:
    return list(map(str, check.examine(name, overrides).refused))


@pytest.mark.parametrize(
    ("name", "is_long"), [*product(CONFIGS, [False]), *(pytest.param(name, True, marks=LONG) for name in CONFIGS)]
)
def test_one_broken_key_is_one_problem_that_names_it(workplace: Path, name: str, is_long: bool):
    base = model_of(name, workplace)
    assert refused(name, *base) == []
    overrides = [override for config, override, more in PAIRS if (config, more) == (name, is_long)]
    found = {override: refused(name, *base, override) for override in overrides}
    assert {override: problems for override, problems in found.items() if len(problems) > 1} == {}
    assert {
        override: problems
        for override, problems in found.items()
        if problems and override.partition("=")[0] not in problems[0]
    } == {}
    assert sum(map(len, found.values())) >= len(overrides) / 3


NUMBERS = sorted(key for key in KEYS if isinstance(MARKERS.get(key), Range))


@pytest.mark.parametrize("name", ["grpo_tiny.yaml", "grpo_nanov3.yaml"])
def test_numbers_that_nobody_means_give_at_most_one_problem(workplace: Path, name: str):
    """A sample of all numbers, each 0, -1, 10^12 and a text."""
    base = model_of(name, workplace)
    config = load_config(name, base)
    keys = [key for key in NUMBERS if type(value_at(config, key)) in (int, float)]
    cases = random.Random(18).sample(list(product(keys, ("0", "-1", "1e12", "x"))), 8)
    for key, value in cases:
        problems = refused(name, *base, f"{key}={value}")
        assert len(problems) <= 1 and all(key in problem for problem in problems), (key, value, problems)
        assert problems or value != "x", key
        assert "e+09" not in str(problems)


@pytest.mark.parametrize("key", [key for key in NUMBERS if getattr(MARKERS[key], "high", 0) == 2**31])
def test_what_is_too_large_is_told_the_largest(key: str):
    problems = problems_of("reward_penalties.token_ids={unwanted: []}", f"{key}=3000000000")
    assert any(
        problem.startswith(f"{key}=3000000000: out of range; use a number that is at most 2147483648")
        for problem in problems
    )


def test_the_key_that_was_set_last_is_blamed(workplace: Path):
    size, slots = "policy.megatron_cfg.context_parallel_size=3", "cluster.cpu_units_per_node=9"
    assert refused("grpo_tiny.yaml", size)[0].startswith("policy.megatron_cfg.context_parallel_size=3: the 4 slots")
    assert refused("grpo_tiny.yaml", slots)[0].startswith("cluster.cpu_units_per_node=9: the 9 slots")
    (workplace / "mine.yaml").write_text("defaults: grpo_tiny.yaml\ncluster: {cpu_units_per_node: 9}\n")
    assert refused("mine.yaml")[0].startswith("cluster.cpu_units_per_node=9: the 9 slots")
    assert refused("mine.yaml", size)[0].startswith("policy.megatron_cfg.context_parallel_size=3: the 9 slots")


def test_two_faults_are_two_problems(workplace: Path):
    problems = refused("grpo_tiny.yaml", "policy.train_global_batch_size=7", "policy.generation.stop_strings=['']")
    assert [problem.partition("=")[0] for problem in problems] == [
        "policy.train_global_batch_size",
        "policy.generation.stop_strings",
    ]
