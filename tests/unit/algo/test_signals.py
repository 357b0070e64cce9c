# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

from mrl.algo.advantages import train_sequences
from mrl.config.schema.algo import AdvantageEstimatorConfig, GrpoConfig, RewardScalingConfig, RewardShapingConfig
from mrl.types import FixedAdvantage, Flaw, RolloutGroup
from tests.unit.algo.groups import group

PLAIN = GrpoConfig(
    adv_estimator=AdvantageEstimatorConfig("grpo", normalize_rewards=False, use_leave_one_out_baseline=True)
)


def with_flaws(judged: RolloutGroup, *flaws: tuple[Flaw, ...]) -> RolloutGroup:
    return replace(judged, verdicts=tuple(replace(v, flaws=f) for v, f in zip(judged.verdicts, flaws, strict=True)))


def test_sequences_in_the_order_of_the_groups():
    groups = [group([1.0, 0.0], name="a"), group([0.0, 0.5, 9.0], name="b", invalid=[2])]
    sequences, metrics = train_sequences(groups, PLAIN)
    assert [sequence.rollout.request_id for sequence in sequences] == ["0/a/0", "0/a/1", "0/b/0", "0/b/1", "0/b/2"]
    assert [sequence.advantage for sequence in sequences] == [1.0, -1.0, -0.5, 0.5, 0.0]
    assert [sequence.reward for sequence in sequences] == [1.0, 0.0, 0.0, 0.5, 9.0]
    assert [sequence.is_valid for sequence in sequences] == [True] * 4 + [False]
    assert metrics == {}


def test_overlong_rollouts_count_in_the_baseline_but_not_in_the_loss():
    sequences, metrics = train_sequences(
        [group([1.0, 0.0, 0.0], cut_off=[1, 2], invalid=[2])], replace(PLAIN, overlong_filtering=True)
    )
    assert [(sequence.advantage, sequence.is_valid) for sequence in sequences] == [
        (1.0, True),
        (0.0, False),
        (0.0, False),
    ]
    assert metrics == {"train/num_overlong_filtered": 1.0}


def test_what_rewards_become_is_measured():
    scaling = RewardScalingConfig(enabled=True, target_max=2.0)
    shaping = RewardShapingConfig(enabled=True, stop_properly_penalty_coef=0.0)
    config = replace(PLAIN, reward_scaling=scaling, reward_shaping=shaping)
    sequences, metrics = train_sequences([group([1.0, 7.0, 1.0, 7.0], cut_off=[2], invalid=[3])], config)
    assert [sequence.reward for sequence in sequences] == [2.0, 2.0, 0.0, 2.0]
    assert metrics == {"train/num_rewards_out_of_range": 1.0}


def test_the_reward_of_what_dynamic_sampling_chose():
    shaping = RewardShapingConfig(enabled=True, stop_properly_penalty_coef=0.0)
    config = replace(PLAIN, use_dynamic_sampling=True, reward_shaping=shaping)
    _, metrics = train_sequences([group([1.0, 0.0, 1.0, 9.0], cut_off=[2], invalid=[3])], config)
    assert metrics == {"train/filtered_reward": 1 / 3}


def test_flawed_turns_have_advantages_of_their_own():
    call, thought = Flaw("invalid_tool_call", 0, 3), Flaw("malformed_thinking", 0, 3)
    other = Flaw("malformed_thinking", 3, 4)
    judged = with_flaws(group([1.0, 0.0, 0.0], invalid=[2]), (call, thought), (thought, other), (call,))
    judged = replace(judged, rollouts=tuple(replace(rollout, num_turns=2) for rollout in judged.rollouts))
    both = replace(PLAIN, invalid_tool_call_advantage=-5.0, malformed_thinking_advantage=-2.0)
    sequences, metrics = train_sequences([judged], both)
    # The later one counts where they overlap: the invalid tool call.
    assert sequences[0].fixed_advantages == (FixedAdvantage(0, 3, -2.0), FixedAdvantage(0, 3, -5.0))
    assert sequences[1].fixed_advantages == (FixedAdvantage(0, 3, -2.0), FixedAdvantage(3, 4, -2.0))
    assert sequences[2].fixed_advantages == ()
    assert metrics == {
        "train/num_invalid_tool_calls": 2.0,
        "train/invalid_tool_call_rate": 2 / 6,
        "train/num_malformed_thinking": 2.0,
        "train/malformed_thinking_rate": 2 / 6,
        "train/num_assistant_messages": 6.0,
    }
    sequences, metrics = train_sequences([judged], PLAIN)
    assert all(sequence.fixed_advantages == () for sequence in sequences) and metrics == {}
