# SPDX-License-Identifier: Apache-2.0
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mrl.algo.advantages import batch_advantages, group_advantages, train_sequences
from mrl.algo.rewards import (
    has_signal,
    is_lone,
    num_out_of_range,
    scale_reward,
    scaled,
    shape_effort,
    shaped,
    shaped_rewards,
    without_lone,
)
from mrl.config.schema.algo import AdvantageEstimatorConfig, GrpoConfig, RewardScalingConfig, RewardShapingConfig
from mrl.config.schema.env import EffortConfig
from mrl.envs.inspection import Remarks, amend
from mrl.loop.signal_watch import SignalWatch
from mrl.store.summary import rollout_metrics
from mrl.types import RolloutGroup, Verdict
from tests.unit.algo.groups import group

SCALING = RewardScalingConfig(enabled=True, source_min=-1.0, source_max=3.0, target_min=0.0, target_max=10.0)
OVERLONG = RewardShapingConfig(
    enabled=True, overlong_buffer_length=4, overlong_buffer_penalty=2.0, max_response_length=10
)
CONFIG = GrpoConfig()


def test_scaling_by_hand():
    assert [scale_reward(reward, SCALING) for reward in (-1.0, 1.0, 3.0)] == [0.0, 5.0, 10.0]
    assert [scale_reward(reward, SCALING) for reward in (-7.0, 4.0)] == [0.0, 10.0]
    assert scale_reward(0.3, RewardScalingConfig(source_min=5.0, source_max=6.0)) == 0.3


@given(st.floats(-5, 5), st.floats(-5, 5))
def test_scaling_keeps_the_order_and_the_range(a: float, b: float):
    low, high = scale_reward(min(a, b), SCALING), scale_reward(max(a, b), SCALING)
    assert SCALING.target_min <= low <= high <= SCALING.target_max


# Nothing up to 10 - 4 tokens, 0.5 for each one more; a limit is not the end of it.
@pytest.mark.parametrize(("length", "reward"), [(1, 1.0), (6, 1.0), (7, 0.5), (8, 0.0), (10, -1.0), (12, -2.0)])
def test_overlong_penalty_by_hand(length: int, reward: float):
    assert shaped_rewards(group([1.0], lengths=[length]), GrpoConfig(reward_shaping=OVERLONG)) == [reward]


def test_effort_by_hand():
    # As nemo_rl/experience/rollouts.py at 7ea279a, _apply_effort_shaping: of answers of 5, 10, 20 and 100 tokens
    # against 10.
    effort = EffortConfig(low_weight=0.5, low_penalty=0.2, low_ub=10, low_string="{short}")
    lengths = [5, 10, 20, 100, 20, 20]
    asked = group([1.0, 1.0, 1.0, 0.0, 1.0, 0.0], lengths=lengths, invalid=[4])
    verdicts = (*asked.verdicts[:5], replace(asked.verdicts[5], flags=("empty_final_answer",)))
    asked = replace(asked, prompt=replace(asked.prompt, text="2+2? {short}"), verdicts=verdicts)
    assert shape_effort(asked, effort).rewards == pytest.approx([1.25, 1.0, 0.9, -0.9, 1.0, 0.0])
    # The last of several answers counts.
    two = replace(
        asked, rollouts=tuple(replace(rollout, last_turn_start=rollout.length - 5) for rollout in asked.rollouts)
    )
    assert shape_effort(two, effort).rewards[:4] == [1.25, 1.25, 1.25, 0.0]
    for off in (replace(effort, low_weight=0.0), replace(effort, low_string=""), replace(effort, low_string="{long}")):
        assert shape_effort(asked, off) is asked


def test_what_was_cut_off_keeps_a_share_of_its_reward():
    shaping = RewardShapingConfig(
        enabled=True, stop_properly_penalty_coef=0.25, overlong_buffer_length=1, overlong_buffer_penalty=9.0
    )
    config = GrpoConfig(reward_shaping=shaping)
    assert shaped_rewards(group([1.0, 1.0, -2.0], lengths=[4, 4, 99], cut_off=[1, 2]), config) == [1.0, 0.25, -0.5]


def test_rewards_are_scaled_before_they_are_shaped():
    config = GrpoConfig(reward_scaling=SCALING, reward_shaping=OVERLONG)
    judged = group([1.0, 9.0, 1.0], lengths=[8, 2, 2], invalid=[2])
    assert [verdict.reward for verdict in scaled(judged, config)] == [5.0, 10.0, 5.0]
    assert shaped_rewards(judged, config) == [4.0, 10.0, 5.0]
    assert num_out_of_range(judged, SCALING) == 1
    assert num_out_of_range(judged, RewardScalingConfig()) == 0


def test_nothing_is_changed_by_default():
    judged = group([0.3, -7.0], lengths=[1, 9999], cut_off=[1])
    assert shaped_rewards(judged, GrpoConfig()) == judged.rewards


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
    shaping = RewardShapingConfig(
        enabled=True, overlong_buffer_length=2, overlong_buffer_penalty=1.0, max_response_length=4
    )
    assert not has_signal(group([1.0, 1.0], lengths=[1, 9]), GrpoConfig(reward_shaping=shaping))


def test_rewards_that_scaling_makes_equal_are_no_signal():
    assert not has_signal(group([1.0, 2.0]), GrpoConfig(reward_scaling=RewardScalingConfig(enabled=True)))


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.3, 1.0, math.pi]), st.booleans()), min_size=2, max_size=8))
def test_a_group_has_a_signal_if_it_has_an_advantage(rollouts: list[tuple[float, bool]]):
    rewards, is_valid = zip(*rollouts, strict=True)
    judged = group(rewards, invalid=[i for i, valid in enumerate(is_valid) if not valid])
    advantages = group_advantages(torch.tensor(rewards).double(), torch.tensor(is_valid), normalize=True)
    assert has_signal(judged, CONFIG) == bool(advantages.any())


def test_groups_of_agents_without_two_rewards_are_masked_and_counted():
    one, two = group([1.0, 0.0, 0.0], name="a", invalid=[1, 2]), group([1.0, 0.0, 0.5], name="b", invalid=[1])
    masked, whole = without_lone([one, two], {"math"})
    assert [is_lone(one), is_lone(two)] == [True, False] and whole is two
    assert not any(verdict.is_valid or verdict.has_reward for verdict in masked.verdicts)
    assert without_lone([one, two], ()) == [one, two]


PARTS = [{"right": 1.0, "form": 0.5}, {"right": 0.5, "form": 1.0}]
GDPO = GrpoConfig(adv_estimator=AdvantageEstimatorConfig(name="gdpo"))


def in_parts(length: int = 4, parts: list[dict[str, float]] = PARTS) -> RolloutGroup:
    plain = group([sum(part.values()) for part in parts], lengths=[4, length], cut_off=[1])
    return replace(
        plain, verdicts=tuple(replace(v, components=own) for v, own in zip(plain.verdicts, parts, strict=True))
    )


@pytest.mark.parametrize(
    ("changed", "total", "parts"),
    [
        # 12 tokens are 6 beyond 10 - 4: a penalty of 6 / 4 * 2 = 3, of which each component bears half.
        (lambda: shaped(in_parts(12), GrpoConfig(reward_shaping=OVERLONG)), -1.5, {"right": -1.0, "form": -0.5}),
        (lambda: shaped(in_parts(), GrpoConfig(reward_shaping=STOPS)), 0.375, {"right": 0.125, "form": 0.25}),
        # 100 tokens against 10: l = 0.5 * (1 - 10) = -4.5, and the penalty 0.2 * 4.5.
        (lambda: shape_effort(asked(in_parts(100)), EFFORT).verdicts, 0.6, {"right": 0.05, "form": 0.55}),
        (lambda: shape_effort(asked(in_parts(5)), EFFORT).verdicts, 1.875, {"right": 0.625, "form": 1.25}),
        (
            lambda: [amend(v, Remarks(("unwanted_token",))) for v in in_parts().verdicts],
            0.0,
            {"right": 0.0, "form": 0.0},
        ),
        (lambda: scaled(in_parts(), GrpoConfig(reward_scaling=SCALING)), 6.25, {"right": 3.75, "form": 5.0}),
    ],
)
def test_what_changes_a_reward_changes_its_components(
    changed: Callable[[], Sequence[Verdict]], total: float, parts: dict[str, float]
):
    verdict = changed()[1]
    assert verdict.reward == pytest.approx(total) and verdict.components == pytest.approx(parts)


STOPS = RewardShapingConfig(enabled=True, stop_properly_penalty_coef=0.25)
EFFORT = EffortConfig(low_weight=0.5, low_penalty=0.2, low_ub=10, low_string="{short}")


def asked(judged: RolloutGroup) -> RolloutGroup:
    return replace(judged, prompt=replace(judged.prompt, text="2+2? {short}"))


def test_shaped_gdpo_is_gdpo_of_shaped_components():
    config = replace(GDPO, reward_shaping=STOPS)
    by_hand = in_parts(parts=[PARTS[0], {"right": 0.125, "form": 0.25}])
    assert (
        batch_advantages([in_parts()], config)
        == batch_advantages([by_hand], GDPO)
        != batch_advantages([in_parts()], GDPO)
    )


def test_equal_totals_of_different_components_are_a_signal_for_gdpo_alone():
    def weighted(*weights: float) -> GrpoConfig:
        return replace(GDPO, adv_estimator=replace(GDPO.adv_estimator, reward_weights=list(weights)))

    judged, equal = in_parts(), in_parts(parts=[PARTS[0]] * 2)
    assert [has_signal(one, GDPO) for one in (judged, equal)] == [True, False]
    assert not has_signal(judged, CONFIG)
    # Weights go by name: form first.
    only_form_differs = in_parts(parts=[PARTS[0], {"right": 1.0, "form": 0.0}])
    assert [has_signal(only_form_differs, weighted(*weights)) for weights in ((1.0, 0.0), (0.0, 1.0))] == [True, False]
    # One is as much better in one component as it is worse in the other, unless one counts more.
    sequences, _ = train_sequences([judged], weighted(2.0, 1.0))
    assert SignalWatch(1).note(1, [judged], sequences) is None
    assert (
        rollout_metrics([judged, equal], GDPO, seconds=1.0, num_engine_restarts=0)["rollout/groups_without_signal"]
        == 1.0
    )
