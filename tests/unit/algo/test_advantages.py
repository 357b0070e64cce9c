import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.algo.advantages import batch_advantages, group_advantages
from mrl.types import Prompt, RolloutGroup, RolloutInfo, Verdict


def test_leave_one_out_by_hand():
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), normalize=False)
    assert advantages.tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_mean_baseline_by_hand():
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), normalize=False, use_leave_one_out_baseline=False)
    assert advantages.tolist() == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_normalized_by_hand():
    # Deviations +-0.5, unbiased variance 4 * 0.25 / 3.
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), normalize=True)
    expected = (2 / 3) / math.sqrt(1 / 3)
    assert advantages.tolist() == pytest.approx([expected, -expected, -expected, expected])


@pytest.mark.parametrize("reward", [0.0, 0.1, 0.3, 1 / 3, 1e6 + 0.1])
@pytest.mark.parametrize("size", [2, 3, 7, 16])
@pytest.mark.parametrize("normalize", [False, True])
def test_equal_rewards_give_exactly_zero(reward: float, size: int, normalize: bool):
    rewards = torch.full((size,), reward, dtype=torch.float64)
    for baseline in (False, True):
        advantages = group_advantages(rewards, normalize=normalize, use_leave_one_out_baseline=baseline)
        assert torch.equal(advantages, torch.zeros(size))


def test_rewards_that_differ_by_rounding_are_equal():
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.1 * 3, 0.3], dtype=torch.float64)
    assert torch.equal(group_advantages(rewards, normalize=True), torch.zeros(4))


def test_invalid_rollouts_take_no_part():
    rewards = torch.tensor([1.0, math.nan, 0.0, 0.0])
    is_valid = torch.tensor([True, False, True, True])
    advantages = group_advantages(rewards, is_valid, normalize=True)
    alone = group_advantages(rewards[is_valid], normalize=True)
    assert advantages[1] == 0.0
    assert torch.equal(advantages[is_valid], alone)


def test_a_single_valid_rollout_has_no_baseline():
    advantages = group_advantages(torch.tensor([1.0, 0.0]), torch.tensor([True, False]), normalize=True)
    assert torch.equal(advantages, torch.zeros(2))


def test_a_group_of_one_is_refused():
    with pytest.raises(ValueError, match="num_generations_per_prompt"):
        group_advantages(torch.tensor([1.0]), normalize=True)


@settings(max_examples=200)
@given(st.lists(st.floats(-3, 3), min_size=2, max_size=16), st.floats(-1, 1))
def test_advantages_are_bounded_and_sum_to_zero(rewards: list[float], shift: float):
    rewards_G = torch.tensor(rewards, dtype=torch.float64)
    advantages = group_advantages(rewards_G, normalize=True)
    assert advantages.abs().max() <= math.sqrt(len(rewards)) + 1e-5
    assert advantages.sum().abs() < 1e-4
    if rewards_G.max() - rewards_G.min() > 1e-3:
        shifted = group_advantages(rewards_G + shift, normalize=True)
        assert torch.allclose(shifted, advantages, atol=1e-4)


def test_leave_one_out_is_the_mean_of_the_others():
    rewards = torch.tensor([0.3, 0.1, 0.9, 0.4, 0.0])
    slow = [rewards[i] - sum(rewards[j] for j in range(5) if j != i) / 4 for i in range(5)]
    assert group_advantages(rewards, normalize=False).tolist() == pytest.approx([float(value) for value in slow])


def test_a_batch_is_its_groups():
    prompt = Prompt("p", (1,), "", "", "math")
    info = RolloutInfo("r", "p", 0, 0, 1, 1, "stop", None)
    verdicts = [Verdict(reward, is_valid, "ok", "", "") for reward, is_valid in [(1.0, True), (0.0, True), (0.0, False)]]
    group = RolloutGroup(prompt, (info,) * 3, tuple(verdicts))
    assert batch_advantages([group, group], normalize=False, use_leave_one_out_baseline=True) == [[1.0, -1.0, 0.0]] * 2
