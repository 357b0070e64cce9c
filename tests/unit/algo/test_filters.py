import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from mrl.algo.advantages import group_advantages
from mrl.algo.filters import has_signal
from mrl.config.schema.algo import GrpoConfig, RewardScalingConfig, RewardShapingConfig
from tests.unit.algo.groups import group

CONFIG = GrpoConfig()


def test_groups_with_and_without_signal():
    groups = [
        group([1.0, 0.0, 0.0], name="mixed"),
        group([0.0, 0.0, 0.0], name="all wrong"),
        group([0.1 + 0.2, 0.3, 0.1 * 3], name="equal but for rounding"),
        group([1.0, 0.0, 1.0], name="one that differs failed", invalid=[1]),
        group([0.5, 0.5, 0.25], name="mixed too"),
        group([0.0, 0.0, 1e-8], name="a hundred millionth apart"),
        group([1.0, 1.0, 0.0], name="one that differs is flagged", flagged=[2]),
        group([1.0, 0.0], name="all failed", invalid=[0, 1]),
    ]
    assert [judged.prompt.prompt_id for judged in groups if has_signal(judged, CONFIG)] == [
        "mixed",
        "mixed too",
        "a hundred millionth apart",
        "one that differs is flagged",
    ]


def test_rewards_that_differ_by_length_alone_are_no_signal():
    shaping = RewardShapingConfig(enabled=True, overlong_buffer_length=2, overlong_buffer_penalty=1.0, max_response_length=4)
    assert not has_signal(group([1.0, 1.0], lengths=[1, 9]), GrpoConfig(reward_shaping=shaping))


def test_rewards_that_scaling_makes_equal_are_no_signal():
    assert not has_signal(group([1.0, 2.0]), GrpoConfig(reward_scaling=RewardScalingConfig(enabled=True)))


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.3, 1.0, math.pi]), st.booleans()), min_size=2, max_size=8))
def test_a_group_has_a_signal_if_it_has_an_advantage(rollouts: list[tuple[float, bool]]):
    rewards, is_valid = zip(*rollouts, strict=True)
    judged = group(rewards, invalid=[i for i, valid in enumerate(is_valid) if not valid])
    advantages = group_advantages(torch.tensor(rewards).double(), torch.tensor(is_valid), normalize=True)
    assert has_signal(judged, CONFIG) == bool(advantages.any())
