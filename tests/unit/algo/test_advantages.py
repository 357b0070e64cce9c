# SPDX-License-Identifier: Apache-2.0
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.algo.advantages import batch_advantages, group_advantages, normalize_over_tokens, train_sequences
from mrl.config.schema.algo import (
    AdvantageEstimatorConfig,
    Estimator,
    GrpoConfig,
    RewardScalingConfig,
    RewardShapingConfig,
)
from mrl.types import Flaw, RolloutGroup
from tests.unit.algo.groups import group

EPSILON = 1e-6  # NeMo RL's, beside every standard deviation
GROUP_MEAN = dict(normalize=True, use_leave_one_out_baseline=False)


@pytest.mark.parametrize(
    ("rewards", "settings", "expected"),
    [
        ([1.0, 0.0, 0.0, 1.0], dict(normalize=False), [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        ([1.0, 0.0, 0.0, 0.0], GROUP_MEAN | dict(normalize=False), [0.75, -0.25, -0.25, -0.25]),
        # The right one is compared with equal rewards, which have no deviation to divide by; the others with 1, 0 and
        # 0.
        (
            [1.0, 0.0, 0.0, 0.0],
            dict(normalize=True),
            [1.0] + [-(1 / 3) / (math.sqrt((4 / 9 + 1 / 9 + 1 / 9) / 2) + EPSILON)] * 3,
        ),
        # 1/15 in the mean, and a variance of (1 - 1/15) / 14 = 1/15.
        ([1.0] + [0.0] * 15, dict(normalize=True), [1.0] + [-(1 / 15) / (math.sqrt(1 / 15) + EPSILON)] * 15),
        # A pair is not divided.
        ([1.0, 0.25], dict(normalize=True), [0.75, -0.75]),
        # Deviations 3/4 and -1/4, unbiased variance (9 + 3) / 16 / 3 = 1/4.
        ([1.0, 0.0, 0.0, 0.0], dict(normalize=True, normalize_by_whole_group=True), [2.0, -2 / 3, -2 / 3, -2 / 3]),
        ([1.0, 0.0, 0.0, 0.0], GROUP_MEAN, [0.75 / (0.5 + EPSILON)] + [-0.25 / (0.5 + EPSILON)] * 3),
        # +-0.5e-8 from the mean, and a deviation of 1e-8 / sqrt(2), which the epsilon outweighs.
        ([0.0, 1e-8], GROUP_MEAN, [sign * 0.5e-8 / (1e-8 / math.sqrt(2) + EPSILON) for sign in (-1, 1)]),
    ],
)
def test_advantages_of_a_group_by_hand(rewards: list[float], settings: dict[str, bool], expected: list[float]):
    assert group_advantages(torch.tensor(rewards), None, **settings).tolist() == pytest.approx(
        expected, rel=1e-6, abs=1e-12
    )


def test_one_reward_against_equal_ones_that_are_no_binary_fractions():
    """Their variance as a float32 square difference is not 0, and gave an advantage of -2075 (NVIDIA-NeMo/RL#4158)."""
    rewards = torch.tensor([0.0] + [0.95] * 7)
    assert group_advantages(rewards, normalize=True)[0] == -float(rewards[1])


@pytest.mark.parametrize("reward", [0.0, 0.1, 0.3, 1 / 3, 1e6 + 0.1])
@pytest.mark.parametrize("size", [2, 3, 7, 16])
@pytest.mark.parametrize("normalize", [False, True])
def test_equal_rewards_give_exactly_zero(reward: float, size: int, normalize: bool):
    rewards = torch.full((size,), reward, dtype=torch.float64)
    for baseline in (False, True):
        advantages = group_advantages(rewards, normalize=normalize, use_leave_one_out_baseline=baseline)
        assert advantages.tolist() == [0.0] * size


def test_rewards_that_differ_by_rounding_are_equal():
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.1 * 3, 0.3], dtype=torch.float64)
    assert group_advantages(rewards, normalize=True).tolist() == [0.0] * 4


def test_rollouts_without_a_reward_take_no_part():
    rewards = torch.tensor([1.0, math.nan, 0.0, 0.0])
    has_reward = torch.tensor([True, False, True, True])
    advantages = group_advantages(rewards, has_reward, normalize=True)
    alone = group_advantages(rewards[has_reward], normalize=True)
    assert advantages[1] == 0.0
    assert torch.equal(advantages[has_reward], alone)


def test_flagged_rollouts_count_for_the_others():
    # Against 0 and 0, against 1 and 0; what is flagged has an advantage too, which the loss leaves out.
    assert batch_advantages([group([1.0, 0.0, 0.0], flagged=[2])], estimator("grpo")) == [[1.0, -0.5, -0.5]]
    assert batch_advantages([group([2.0, 1.0], flagged=[1])], estimator("reinforce_plus_plus")) == [[0.5, -0.5]]
    parts = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 0.5}, {"a": 0.0, "b": 0.0}]
    assert batch_advantages([with_components(parts, flagged=(2,))], estimator("gdpo")) == batch_advantages(
        [with_components(parts)], estimator("gdpo")
    )


def test_a_single_rollout_with_a_reward_has_no_baseline():
    advantages = group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([True, False]), normalize=True)
    assert advantages.tolist() == [0.0, 0.0]


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="num_generations_per_prompt"):
        group_advantages(torch.tensor([1.0]), normalize=True)


@settings(max_examples=200)
@given(st.lists(st.floats(-3, 3), min_size=2, max_size=16), st.floats(-1, 1))
def test_advantages_are_bounded_and_sum_to_zero(rewards: list[float], shift: float):
    rewards_G = torch.tensor(rewards, dtype=torch.float64)
    advantages = group_advantages(rewards_G, normalize=True, normalize_by_whole_group=True)
    assert advantages.abs().max() <= math.sqrt(len(rewards)) + 1e-5
    assert advantages.sum().abs() < 1e-4
    if rewards_G.max() - rewards_G.min() > 1e-2:
        shifted = group_advantages(rewards_G + shift, normalize=True, normalize_by_whole_group=True)
        assert torch.allclose(shifted, advantages, atol=1e-3)


def estimator(name: Estimator, **rest) -> GrpoConfig:
    return GrpoConfig(
        adv_estimator=AdvantageEstimatorConfig(name, normalize_rewards=False, use_leave_one_out_baseline=True, **rest)
    )


def test_a_batch_is_its_groups():
    judged = group([1.0, 0.0, 0.0], invalid=[2])
    assert batch_advantages([judged, judged], estimator("grpo")) == [[1.0, -1.0, 0.0]] * 2
    whole = AdvantageEstimatorConfig("grpo", normalize_rewards=True, use_leave_one_out_baseline=False)
    half = pytest.approx([math.sqrt(0.5), -math.sqrt(0.5), 0.0], rel=1e-5)
    assert batch_advantages([judged], GrpoConfig(adv_estimator=whole)) == [half]
    bounded = AdvantageEstimatorConfig(
        normalize_rewards=True, use_leave_one_out_baseline=True, normalize_by_whole_group=True
    )
    assert batch_advantages([group([1.0, 0.0])], GrpoConfig(adv_estimator=bounded)) == [
        pytest.approx([math.sqrt(2), -math.sqrt(2)])
    ]


def test_advantages_are_made_of_shaped_rewards():
    shaping = RewardShapingConfig(enabled=True, stop_properly_penalty_coef=0.5)
    config = replace(
        estimator("grpo"), reward_shaping=shaping, reward_scaling=RewardScalingConfig(enabled=True, target_max=4.0)
    )
    assert batch_advantages([group([1.0, 1.0], cut_off=[1])], config) == [[2.0, -2.0]]


def with_components(
    components: list[dict[str, float]], *, invalid: tuple[int, ...] = (), flagged: tuple[int, ...] = ()
) -> RolloutGroup:
    plain = group([0.0] * len(components), invalid=invalid, flagged=flagged)
    return replace(
        plain, verdicts=tuple(replace(v, components=c) for v, c in zip(plain.verdicts, components, strict=True))
    )


def test_gdpo_by_hand():
    # Correctness against the mean of the other: +-1; format: +1, -1. Weighted 2 to 1 in the order of the names: 3, -3
    # and 1, -1.
    first = with_components([{"correct": 1.0, "format": 1.0}, {"correct": 0.0, "format": 0.0}])
    second = with_components([{"correct": 1.0, "format": 0.0}, {"correct": 0.0, "format": 1.0}])
    std = math.sqrt((9 + 9 + 1 + 1) / 3)
    found = batch_advantages([first, second], estimator("gdpo", reward_weights=[2.0, 1.0]))
    assert found == [pytest.approx([3 / std, -3 / std]), pytest.approx([1 / std, -1 / std])]


def test_gdpo_normalises_each_component_in_its_group_before_it_adds_them():
    # A component of hundreds counts no more than one of fractions.
    groups = [
        with_components([{"a": 0.1 * i, "b": -300.0 * i} for i in range(4)]),
        with_components([{"a": 0.0, "b": 1.0 * i} for i in range(4)]),
    ]
    config = GrpoConfig(
        adv_estimator=AdvantageEstimatorConfig("gdpo", normalize_rewards=True, use_leave_one_out_baseline=False)
    )
    first, second = batch_advantages(groups, config)
    # But for the epsilon beside each deviation.
    assert first == pytest.approx([0.0] * 4, abs=2e-5)
    z = [-1.5, -0.5, 0.5, 1.5]
    std = math.sqrt(sum(x * x for x in z) / 7)
    assert second == pytest.approx([x / std for x in z], rel=1e-5)


def test_gdpo_without_a_difference_gives_exactly_zero():
    groups = [with_components([{"a": 0.1, "b": 0.3}] * 3), with_components([{"a": 0.7, "b": 0.1}] * 3)]
    assert batch_advantages(groups, estimator("gdpo")) == [[0.0] * 3] * 2


def test_gdpo_leaves_invalid_rollouts_out():
    parts = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 0.5}, {}, {"a": 0.0, "b": 0.0}]
    found = batch_advantages([with_components(parts, invalid=(2,))], estimator("gdpo"))[0]
    (alone,) = batch_advantages([with_components([parts[0], parts[1], parts[3]])], estimator("gdpo"))
    assert found == [alone[0], alone[1], 0.0, alone[2]]


def test_gdpo_needs_components():
    with pytest.raises(ValueError, match="use grpo for rewards without components"):
        batch_advantages([with_components([{"a": 1.0}] * 2)], estimator("gdpo"))
    with pytest.raises(ValueError, match="all need the same two or more"):
        batch_advantages([with_components([{"a": 1.0, "b": 1.0}, {"a": 1.0, "c": 1.0}])], estimator("gdpo"))
    with pytest.raises(ValueError, match=r"reward_weights=\[1.0\] has 1 numbers"):
        batch_advantages([with_components([{"a": 1.0, "b": 1.0}] * 2)], estimator("gdpo", reward_weights=[1.0]))


def test_reinforce_plus_plus_by_hand():
    groups = [group([1.0, 0.0, 0.5, 9.0], invalid=[3]), group([2.0, 2.0])]
    assert batch_advantages(groups, estimator("reinforce_plus_plus")) == [[0.5, -0.5, 0.0, 0.0], [0.0, 0.0]]
    assert batch_advantages(groups, estimator("reinforce_plus_plus", minus_baseline=False)) == [
        [1.0, 0.0, 0.5, 0.0],
        [2.0, 2.0],
    ]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.floats(-3, 3), st.booleans()), min_size=1, max_size=30), st.integers(1, 4))
def test_normalised_over_tokens_however_they_are_spread(tokens: list[tuple[float, bool]], num_rows: int):
    values, masks = (torch.tensor([float(token[i]) for token in tokens]) for i in (0, 1))
    cut = [list(part) for part in zip(values.tensor_split(num_rows), masks.tensor_split(num_rows), strict=True)]
    found = torch.cat(normalize_over_tokens([row[0] for row in cut], [row[1] for row in cut], lambda total: total))
    valid = [float(v) for v, mask in zip(values, masks, strict=True) if mask]
    mean = sum(valid) / max(1, len(valid))
    std = math.sqrt(sum((v - mean) ** 2 for v in valid) / max(1, len(valid)))
    slow = [(float(v) - mean) / max(std, 1e-4) if mask else 0.0 for v, mask in zip(values, masks, strict=True)]
    assert found.tolist() == pytest.approx(slow, abs=1e-4)


def test_tokens_that_hardly_differ_are_not_blown_up():
    # Their variance is 1e-10, below the floor of 1e-8.
    (found,) = normalize_over_tokens([torch.tensor([1e-5, -1e-5])], [torch.ones(2)], lambda total: total)
    assert found.tolist() == pytest.approx([0.1, -0.1])


def test_tokens_are_normalised_over_ranks():
    ranks = [(torch.tensor([1.0, 5.0]), torch.tensor([1.0, 0.0])), (torch.tensor([3.0, 5.0]), torch.tensor([1.0, 1.0]))]
    totals = [
        [torch.tensor(3.0)],
        [torch.tensor(9.0)],
        [torch.tensor(8.0)],
    ]  # tokens, sum, squared deviations of 1, 3 and 5

    def answers():
        return iter([total.double() for (total,) in totals])

    for values, mask in ranks:
        given = answers()
        (found,) = normalize_over_tokens([values], [mask], lambda part, given=given: next(given))
        expected = [
            (v - 3.0) / math.sqrt(8 / 3) if m else 0.0 for v, m in zip(values.tolist(), mask.tolist(), strict=True)
        ]
        assert found.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 7.7])
def test_equal_tokens_give_exactly_zero(value: float):
    assert not normalize_over_tokens([torch.full((7,), value)], [torch.ones(7)], lambda total: total)[0].any()


@given(st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.7, 1.0 / 3]), min_size=2, max_size=32), st.booleans())
def test_non_dyadic_rewards_never_explode(rewards: list[float], leave_one_out: bool):
    rewards_G = torch.tensor(rewards, dtype=torch.float32)
    advantages = group_advantages(
        rewards_G, normalize=True, use_leave_one_out_baseline=leave_one_out, normalize_by_whole_group=leave_one_out
    )
    assert advantages.abs().max() <= math.sqrt(len(rewards)) + 1e-5


def by_length(rewards, groups):
    return [
        [2 * reward + rollout.length for reward, rollout in zip(row, group.rollouts, strict=True)]
        for row, group in zip(rewards, groups, strict=True)
    ]


def one_short(rewards, groups):
    return [row[1:] for row in rewards]


def not_finite(rewards, groups):
    return [[math.inf for _ in row] for row in rewards]


def nothing(rewards, groups):
    return None


def test_an_own_estimator_gets_shaped_rewards_and_the_groups():
    judged, scaling = group([1.0, 0.0]), RewardScalingConfig(enabled=True, target_max=4.0)
    config = GrpoConfig(adv_estimator=AdvantageEstimatorConfig(f"{__name__}:by_length"), reward_scaling=scaling)
    lengths = [rollout.length for rollout in judged.rollouts]
    assert batch_advantages([judged], config) == [[8.0 + lengths[0], lengths[1]]]


@pytest.mark.parametrize("name", ["one_short", "not_finite", "nothing"])
def test_what_an_own_estimator_returns_is_checked(name: str):
    config = GrpoConfig(adv_estimator=AdvantageEstimatorConfig(f"{__name__}:{name}"))
    with pytest.raises(
        ValueError, match=rf"{name} returned .*; return a list for each of the 1 groups, with a finite number for each"
    ):
        batch_advantages([group([1.0, 0.0])], config)


def test_all_sequences_of_a_rollout_share_its_advantage():
    """The baseline is one over rollouts: a rollout with three sequences counts once."""
    one = group([1.0, 0.0, 0.0, 0.0], invalid=[3])
    further = (replace(one.rollouts[0], place=1), replace(one.rollouts[0], place=2))
    branched = replace(one, rollouts=(replace(one.rollouts[0], further=further), *one.rollouts[1:]))
    plain, _ = train_sequences([one], GrpoConfig())
    sequences, _ = train_sequences([branched], GrpoConfig())
    assert [sequence.advantage for sequence in sequences] == [plain[0].advantage] * 3 + [
        one.advantage for one in plain[1:]
    ]
    assert [sequence.is_valid for sequence in sequences] == [True] * 5 + [False]
    assert [sequence.rollout.is_further for sequence in sequences] == [False, True, True, False, False, False]
    flaws = tuple(Flaw("invalid_tool_call", start, start + 1, place) for place, start in ((0, 3), (2, 3), (2, 5)))
    flawed = replace(branched, verdicts=(replace(branched.verdicts[0], flaws=flaws), *branched.verdicts[1:]))
    sequences, metrics = train_sequences([flawed], GrpoConfig(invalid_tool_call_advantage=-5.0))
    spans = [[(span.start, span.advantage) for span in sequence.fixed_advantages] for sequence in sequences]
    assert (
        spans == [[(3, -5.0)], [], [(3, -5.0), (5, -5.0)], [], [], []] and metrics["train/num_invalid_tool_calls"] == 3
    )
