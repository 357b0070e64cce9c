# SPDX-License-Identifier: Apache-2.0
import re
from pathlib import Path

import pytest

from mrl.config.errors import Unchecked
from mrl.config.load import load_config
from mrl.data.prompts import validation_sampling
from mrl.loop.rollouts import queue_plan
from mrl.types import SamplingParams
from tests.unit.config.problems import problems_of as problems

AHEAD = ["grpo.async_grpo.enabled=true", "policy.generation.colocated.enabled=false"]


def test_lag_is_a_number(workplace: Path):
    assert problems(*AHEAD) == []
    assert problems("grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=0") == []
    assert problems("grpo.async_grpo.max_trajectory_age_steps=4") == []
    ahead = load_config("grpo_tiny.yaml", [*AHEAD, "grpo.async_grpo.max_trajectory_age_steps=4"]).grpo.async_grpo
    assert ahead.max_lag_steps == 4 and not ahead.keeps_kv_cache


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (AHEAD[:1], r"grpo\.async_grpo\.enabled=true: engines that share .* cannot sample while it trains"),
        (
            [*AHEAD, "grpo.async_grpo.max_trajectory_age_steps=2", "loss_fn.use_importance_sampling_correction=false"],
            r"loss_fn\.use_importance_sampling_correction=false: rollouts up to .*=2 steps old .*; set it to true",
        ),
        ([*AHEAD, "grpo.async_grpo.max_trajectory_age_steps=-1"], r"max_trajectory_age_steps=-1: out of range"),
        ([*AHEAD, "grpo.async_grpo.max_generation_failures=-1"], r"max_generation_failures=-1: out of range"),
        (["grpo.batch_multiplier=2"], r"grpo\.batch_multiplier=2\.0: without grpo\.use_dynamic_sampling=true"),
        (["grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=0.5"], r"batch_multiplier=0\.5: out of range"),
        (["grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=0"], r"max_gen_batches=0: out of range"),
        (["policy.generation.val_temperature=-1"], r"val_temperature=-1: out of range"),
        (
            ["grpo.stop_at_validation_metric=pass_k", "grpo.stop_at_validation_threshold=0.9"],
            r"stop_at_validation_metric=pass_k: grpo\.val_num_generations_per_prompt=1 .* raise the latter",
        ),
    ],
)
def test_what_cannot_be_supplied_is_refused(workplace: Path, overrides: list[str], problem: str):
    found, *others = problems(*overrides)
    assert re.search(problem, found), found
    assert all(isinstance(other, Unchecked) for other in others)


def test_kv_caches_are_kept_only_in_flight(workplace: Path):
    flying = [*AHEAD, "grpo.async_grpo.in_flight_weight_updates=true"]
    assert load_config("grpo_tiny.yaml", flying).grpo.async_grpo.keeps_kv_cache
    again = [*flying, "grpo.async_grpo.recompute_kv_cache_after_weight_updates=true"]
    assert not load_config("grpo_tiny.yaml", again).grpo.async_grpo.keeps_kv_cache


def test_validation_is_sampled_as_training_unless_it_says_otherwise(workplace: Path):
    def sampled(*overrides: str) -> tuple[float, float, int | None]:
        generation = load_config("grpo_tiny.yaml", overrides).policy.generation
        params = validation_sampling(SamplingParams(generation.temperature, generation.top_p, generation.top_k, 8, ()), generation)
        return params.temperature, params.top_p, params.top_k

    train = ["policy.generation.temperature=0.8", "policy.generation.top_p=0.9", "policy.generation.top_k=50"]
    assert sampled(*train) == (0.8, 0.9, 50)
    assert sampled(*train, "policy.generation.val_temperature=0", "policy.generation.val_top_k=null") == (0.0, 0.9, None)
    assert problems(*train, "policy.generation.val_temperature=0") == []


def test_prompts_of_a_batch(workplace: Path):
    plan = queue_plan(load_config("grpo_tiny.yaml", ["grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=1.5"]))
    assert (plan.num_prompts, plan.batch, plan.max_batches, plan.lag) == (32, 48, 10, 0)
    assert queue_plan(load_config("grpo_tiny.yaml")).max_batches is None
