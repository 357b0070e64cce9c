# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.data.prompts import validation_sampling
from mrl.loop.queue import queue_plan
from mrl.types import SamplingParams
from tests.unit.config.problems import problems_of as problems

SERVER = "policy.generation.vllm_cfg.expose_http_server=true"
WHOLE_NODES = [
    "cluster.num_nodes=6",
    "cluster.gpus_per_node=4",
    "policy.generation.colocated={enabled: false, resources: {num_nodes: 4}}",
    "policy.generation.vllm_cfg.tensor_parallel_size=8",
]
AHEAD = ["grpo.async_grpo.enabled=true", "policy.generation.colocated.enabled=false"]


def test_lag_is_a_number(workplace: Path):
    assert problems(*AHEAD) == []
    assert problems("grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=0") == []
    assert problems("grpo.async_grpo.max_trajectory_age_steps=4") == []
    ahead = load_config("grpo_tiny.yaml", [*AHEAD, "grpo.async_grpo.max_trajectory_age_steps=4"]).grpo.async_grpo
    assert ahead.max_lag_steps == 4 and not ahead.keeps_kv_cache


def test_a_step_that_takes_the_first_groups_has_more_under_way(workplace: Path):
    config = load_config("grpo_tiny.yaml", ["grpo.oversample=1.5"])
    plan = queue_plan(config)
    assert (plan.batch, plan.under_way, plan.lag, plan.takes_first) == (32, 48, 1, True)
    assert not plan.samples_ahead and not plan.waits_for_refit
    assert config.num_rollouts_at_once == 48 * config.grpo.num_generations_per_prompt
    ahead = load_config("grpo_tiny.yaml", [*AHEAD, "grpo.async_grpo.max_trajectory_age_steps=2"])
    assert queue_plan(ahead).under_way == 3 * 32 and not queue_plan(ahead).takes_first


def test_kv_caches_are_kept_only_in_flight(workplace: Path):
    flying = [*AHEAD, "grpo.async_grpo.in_flight_weight_updates=true"]
    assert load_config("grpo_tiny.yaml", flying).grpo.async_grpo.keeps_kv_cache
    again = [*flying, "grpo.async_grpo.recompute_kv_cache_after_weight_updates=true"]
    assert not load_config("grpo_tiny.yaml", again).grpo.async_grpo.keeps_kv_cache


def test_validation_is_sampled_as_training_unless_it_says_otherwise(workplace: Path):
    def sampled(*overrides: str) -> tuple[float, float, int | None]:
        generation = load_config("grpo_tiny.yaml", overrides).policy.generation
        params = validation_sampling(
            SamplingParams(generation.temperature, generation.top_p, generation.top_k, 8, ()), generation
        )
        return params.temperature, params.top_p, params.top_k

    train = ["policy.generation.temperature=0.8", "policy.generation.top_p=0.9", "policy.generation.top_k=50"]
    assert sampled(*train) == (0.8, 0.9, 50)
    assert sampled(*train, "policy.generation.val_temperature=0", "policy.generation.val_top_k=null") == (
        0.0,
        0.9,
        None,
    )
    assert problems(*train, "policy.generation.val_temperature=0") == []


def test_prompts_of_a_batch(workplace: Path):
    plan = queue_plan(load_config("grpo_tiny.yaml", ["grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=1.5"]))
    assert (plan.num_prompts, plan.batch, plan.max_batches, plan.lag) == (32, 48, 10, 0)
    assert queue_plan(load_config("grpo_tiny.yaml")).max_batches is None


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], ["share slots with the policy", "or policy.generation.colocated.enabled=false"]),
        (["policy.generation.colocated.enabled=false", "policy.generation.num_cpu_engines=3"], []),
        (["policy.generation.colocated.enabled=false"], ["the run has 1 engines", "use 1 to 1"]),
        (
            ["policy.generation.colocated.enabled=false", "policy.generation.num_cpu_engines=2", SERVER],
            ["name the engines", "set it to null"],
        ),
        (WHOLE_NODES, ["an engine has 2 nodes", "let an engine fit a node"]),
    ],
)
def test_engines_that_may_go_are_dedicated_and_asked_by_the_driver_alone(
    workplace: Path, overrides: list[str], words: list[str]
):
    key = "policy.generation.min_num_engines"
    told = [text for text in problems(*overrides, f"{key}=2") if key in text]
    assert len(told) == bool(words) and all(word in told[0] for word in words)
