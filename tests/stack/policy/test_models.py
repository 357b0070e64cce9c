# SPDX-License-Identifier: Apache-2.0
"""Several models in a process: each computes what it computes alone, bit for bit, in a layout of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mrl.config.model import with_value
from mrl.config.schema.run import RunConfig
from mrl.phases import ModelName
from tests import models
from tests.stack.policy import model_ranks
from tests.stack.policy.model_ranks import Numbers
from tests.stack.policy.policy_ranks import run_config
from tests.stack.ranks import RankPool

WORLD = 4
NUM_STEPS = 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "hybrid": models.save_nemotron_h(tmp_path_factory.mktemp("hybrid")),
        "gpt": models.save_model(tmp_path_factory.mktemp("gpt"), "qwen3_moe"),
    }


def config_of(folders: dict[str, Path], family: str, layout: str, name: ModelName = "policy") -> RunConfig:
    config = run_config(folders[family], layout)
    return (
        config
        if name == "policy"
        else with_value(with_value(config, "teacher", config.policy), "algorithm", "distillation")
    )


def test_models_that_take_turns_compute_what_each_computes_alone(ranks: RankPool, folders: dict[str, Path]):
    # Both have random states, expert biases, two kinds of process groups; the teacher has other stages and no replicas.
    configs: list[tuple[ModelName, RunConfig]] = [
        ("policy", config_of(folders, "hybrid", "tp2 sp dp2 ep2")),
        ("teacher", config_of(folders, "gpt", "tp2 sp pp2", "teacher")),
        ("policy", config_of(folders, "gpt", "pp2 dp2")),
    ]
    together = ranks.run(model_ranks.numbers_together, configs, NUM_STEPS, world_size=WORLD)
    for index, (name, config) in enumerate(configs):
        alone = ranks.run(model_ranks.numbers_alone, name, config, NUM_STEPS, world_size=WORLD)
        for rank in range(WORLD):
            check_equal(together[rank][index], alone[rank])
        assert any(numbers.logprobs for numbers in alone)


def check_equal(one: Numbers, other: Numbers) -> None:
    assert one.metrics == other.metrics
    assert one.checksums == other.checksums
    assert len(one.logprobs) == len(other.logprobs)
    assert all(np.array_equal(*pair) for pair in zip(one.logprobs, other.logprobs, strict=True))


@pytest.mark.parametrize("family", ["hybrid", "gpt"])
def test_a_teacher_leaves_the_device_and_comes_back(ranks: RankPool, folders: dict[str, Path], family: str):
    (found,) = ranks.run(model_ranks.moved_weights, config_of(folders, family, "one", "teacher"), world_size=1)
    assert found == dict.fromkeys(("away", "back", "same", "untrained"), True)
