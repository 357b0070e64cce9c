import re
from pathlib import Path

import pytest

from mrl.config.checks import find_problems
from mrl.config.load import load_config

AHEAD = ["grpo.async_grpo.enabled=true", "policy.generation.colocated.enabled=false"]


def problems(*overrides: str) -> list[str]:
    return find_problems(load_config("grpo_tiny.yaml", overrides))


def test_lag_is_a_number(workplace: Path):
    assert problems(*AHEAD) == []
    assert problems("grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=0") == []
    assert problems("grpo.async_grpo.max_trajectory_age_steps=4") == []
    ahead = load_config("grpo_tiny.yaml", [*AHEAD, "grpo.async_grpo.max_trajectory_age_steps=4"]).grpo.async_grpo
    assert ahead.max_lag_steps == 4 and not ahead.keeps_kv_cache


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (AHEAD[:1], r"grpo\.async_grpo\.enabled=true: engines that share their units .* cannot sample while it trains"),
        (
            [*AHEAD, "loss_fn.use_importance_sampling_correction=false"],
            r"loss_fn\.use_importance_sampling_correction=false: rollouts up to .*=1 steps old .*; set it to true",
        ),
        ([*AHEAD, "grpo.async_grpo.max_trajectory_age_steps=-1"], r"max_trajectory_age_steps=-1: out of range"),
        ([*AHEAD, "grpo.async_grpo.max_generation_failures=-1"], r"max_generation_failures=-1: out of range"),
    ],
)
def test_lag_needs_engines_of_its_own_and_the_correction(workplace: Path, overrides: list[str], problem: str):
    (found,) = problems(*overrides)
    assert re.search(problem, found), found


def test_kv_caches_are_kept_only_in_flight(workplace: Path):
    flying = [*AHEAD, "grpo.async_grpo.in_flight_weight_updates=true"]
    assert load_config("grpo_tiny.yaml", flying).grpo.async_grpo.keeps_kv_cache
    again = [*flying, "grpo.async_grpo.recompute_kv_cache_after_weight_updates=true"]
    assert not load_config("grpo_tiny.yaml", again).grpo.async_grpo.keeps_kv_cache
