# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from mrl.config.schema.algo import GrpoConfig
from mrl.store.summary import is_good_enough

TARGET = GrpoConfig(stop_at_validation_metric="accuracy", stop_at_validation_threshold=0.5)


@pytest.mark.parametrize(
    ("grpo", "metrics", "expected"),
    [
        (GrpoConfig(), {"val/accuracy": 1.0}, False),
        (TARGET, {"val/accuracy": 0.49}, False),
        (TARGET, {"val/accuracy": 0.5, "train/reward": 0.0}, True),
        # Validations in which no rollout was judged, of all and of an environment.
        (TARGET, {"val/num_judged": 0.0}, False),
        (
            replace(TARGET, stop_at_validation_metric="math/reward"),
            {"val/accuracy": 1.0, "val/math/num_judged": 0.0},
            False,
        ),
        # Others were not judged: 0 would make 0.375 of all.
        (TARGET, {"val/accuracy": 0.75, "val/num_judged": 2.0, "val/num_samples": 4.0}, False),
        (TARGET, {"val/accuracy": 0.75, "val/num_judged": 3.0, "val/num_samples": 4.0}, True),
        (
            replace(TARGET, stop_at_validation_metric="math/reward"),
            {"val/math/reward": 1.0, "val/math/num_judged": 1.0, "val/math/num_rollouts": 4.0},
            False,
        ),
        # Rewards below 0 get no better by it.
        (
            replace(TARGET, stop_at_validation_threshold=-0.4),
            {"val/accuracy": -0.6, "val/num_judged": 2.0, "val/num_samples": 4.0},
            False,
        ),
        # A step without validation.
        (TARGET, {"train/accuracy": 1.0}, False),
    ],
)
def test_a_validation_ends_the_run(grpo: GrpoConfig, metrics: dict[str, float], expected: bool):
    assert is_good_enough(grpo, metrics) == expected


@pytest.mark.parametrize("grpo", [TARGET, replace(TARGET, stop_at_validation_metric="math/reward")])
def test_a_validation_without_the_metric_lets_the_run_go_on(grpo: GrpoConfig, caplog: pytest.LogCaptureFixture):
    assert not is_good_enough(grpo, {"val/mean_length": 1.0})
    assert f"{grpo.stop_at_validation_metric}: this validation has no such metric" in caplog.text
    assert caplog.text.rstrip().endswith("it has mean_length")


def test_the_mean_reward_is_the_accuracy_where_rewards_are_0_or_1():
    assert is_good_enough(replace(TARGET, stop_at_validation_metric="reward"), {"val/accuracy": 0.5})
