# SPDX-License-Identifier: Apache-2.0
"""GAE and the loss of values, against a loop over tokens and cases worked by hand."""

from __future__ import annotations

import random

import pytest
import torch

from mrl.algo.critic import (
    ValuedRow,
    discounted_sums,
    explained_variance,
    gae_of_rows,
    token_advantages_and_returns,
    value_loss,
)
from mrl.config.schema.ppo import GaeConfig, ValueLossConfig


def slow_gae(row: ValuedRow, gamma: float, lam: float | None, alpha: float = 0.0) -> tuple[list[float], list[float]]:
    """Advantages and returns of a row by the definition: sums of discounted errors, token by token."""
    length, bounds = len(row.values_T), row.cu_seqlens.tolist()
    advantages, returns = [0.0] * length, [0.0] * length
    for index, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        steps = [t for t in range(start, stop) if row.loss_mask_T[t] > 0]
        values = [float(row.values_T[t]) for t in steps]
        rewards = [-float(row.kl_T[t]) if row.kl_T is not None else 0.0 for t in steps]
        if steps:
            rewards[-1] += float(row.rewards_S[index])
        decay = gamma * (1 - 1 / max(1.0, alpha * len(steps)) if lam is None else lam)
        errors = [
            rewards[i] + gamma * (values[i + 1] if i + 1 < len(steps) else 0.0) - values[i] for i in range(len(steps))
        ]
        for i, t in enumerate(steps):
            advantages[t] = sum(decay**later * error for later, error in enumerate(errors[i:]))
            returns[t] = advantages[t] + values[i]
    return advantages, returns


def random_row(seed: int, *, with_kl: bool = False) -> ValuedRow:
    """Up to five sequences, some of them masked in part or as a whole, and padding."""
    draw, torch_draw = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = [draw.randint(1, 12) for _ in range(draw.randint(1, 5))]
    length = sum(lengths)
    mask_T = torch.tensor([float(draw.random() < 0.7) for _ in range(length)])
    if draw.random() < 0.3:
        mask_T[: lengths[0]] = 0.0
    return ValuedRow(
        values_T=torch.randn(length, generator=torch_draw),
        rewards_S=torch.randn(len(lengths), generator=torch_draw),
        loss_mask_T=mask_T,
        cu_seqlens=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        kl_T=torch.rand(length, generator=torch_draw) if with_kl else None,
    )


@pytest.mark.parametrize("seed", range(20))
def test_gae_is_the_sum_of_discounted_errors(seed: int):
    row = random_row(seed, with_kl=seed % 2 == 0)
    config = GaeConfig(gae_lambda=0.9, gae_gamma=0.97)
    advantages_T, returns_T = token_advantages_and_returns(row, config)
    slow_advantages, slow_returns = slow_gae(row, 0.97, 0.9)
    assert advantages_T.tolist() == pytest.approx(slow_advantages, abs=1e-5)
    assert returns_T.tolist() == pytest.approx(slow_returns, abs=1e-5)


def test_values_and_advantages_have_lambdas_of_their_own():
    row = random_row(3)
    _, returns_T = token_advantages_and_returns(row, GaeConfig(gae_lambda=0.5, gae_lambda_value=1.0))
    assert returns_T.tolist() == pytest.approx(slow_gae(row, 1.0, 1.0)[1], abs=1e-5)
    advantages_T, returns_T = token_advantages_and_returns(row, GaeConfig(gae_lambda=0.5, gae_lambda_policy=0.8))
    assert advantages_T.tolist() == pytest.approx(slow_gae(row, 1.0, 0.8)[0], abs=1e-5)
    assert returns_T.tolist() == pytest.approx(slow_gae(row, 1.0, 0.5)[1], abs=1e-5)
    adaptive_T, _ = token_advantages_and_returns(row, GaeConfig(gae_lambda_policy=0.1, length_adaptive_alpha=0.4))
    assert adaptive_T.tolist() == pytest.approx(slow_gae(row, 1.0, None, alpha=0.4)[0], abs=1e-5)


def test_lambda_one_without_discount_returns_the_reward():
    row = random_row(8)
    _, returns_T = token_advantages_and_returns(row, GaeConfig(gae_lambda=1.0))
    rewards_T = row.rewards_S.repeat_interleave(row.cu_seqlens.diff())
    torch.testing.assert_close(returns_T.float(), rewards_T * row.loss_mask_T)


@pytest.mark.parametrize("length", [0, 1, 2, 7, 64, 1000])
def test_discounted_sums_follow_their_recursion(length: int):
    draw = torch.Generator().manual_seed(length)
    values, decay = torch.randn(2, length, generator=draw, dtype=torch.float64)
    decay = decay.sigmoid() * (torch.rand(length, generator=draw) > 0.1)
    wanted, last = [], 0.0
    for value, factor in zip(reversed(values.tolist()), reversed(decay.tolist()), strict=True):
        last = value + factor * last
        wanted.append(last)
    assert discounted_sums(values, decay).tolist() == pytest.approx(wanted[::-1], abs=1e-12)


def test_advantages_are_normalised_over_all_rows():
    rows = [random_row(seed) for seed in (1, 2, 4)]
    advantages, returns = gae_of_rows(rows, GaeConfig(), lambda total: total)
    valid = torch.cat([advantages_T[row.loss_mask_T > 0] for advantages_T, row in zip(advantages, rows, strict=True)])
    assert float(valid.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(valid.var()) == pytest.approx(1.0, abs=1e-5)
    plain, same_returns = gae_of_rows(rows, GaeConfig(normalize_advantages=False), lambda total: total)
    assert plain[0].tolist() == pytest.approx(slow_gae(rows[0], 1.0, 0.95)[0], abs=1e-5)
    assert all(torch.equal(left, right) for left, right in zip(returns, same_returns, strict=True))


def test_rows_without_valid_tokens_have_no_advantages():
    row = random_row(5)
    empty = ValuedRow(row.values_T, row.rewards_S, torch.zeros_like(row.loss_mask_T), row.cu_seqlens)
    advantages, returns = gae_of_rows([empty], GaeConfig(), lambda total: total)
    assert not advantages[0].any() and not returns[0].any()


def test_value_loss_is_the_larger_of_two_squares():
    values_T = torch.tensor([1.0, 0.0, 5.0], requires_grad=True)
    old_T, returns_T, mask_T = (
        torch.tensor([0.0, 0.0, 0.0]),
        torch.tensor([2.0, 1.0, 9.0]),
        torch.tensor([1.0, 1.0, 0.0]),
    )
    loss, metrics = value_loss(
        values_T, old_T, returns_T, mask_T, ValueLossConfig(scale=0.5, cliprange=0.2), num_tokens=2
    )
    # The first value has gone beyond 0.2, so that its loss is held at (0.2 - 2)^2 and has no gradient.
    assert float(loss.detach()) == pytest.approx(0.5 * 0.5 * (1.8**2 + 1.0) / 2)
    loss.backward()
    assert values_T.grad is not None
    assert values_T.grad.tolist() == pytest.approx([0.0, -0.25, 0.0])
    assert float(metrics["vf_clipfrac"]) == 0.5
    assert (float(metrics["values_min"]), float(metrics["values_max"])) == (0.0, 1.0)


def test_rows_of_values_add_up_to_the_mean_over_their_tokens():
    draw = torch.Generator().manual_seed(0)
    values, returns = torch.randn(2, 12, generator=draw)
    mask = (torch.rand(12, generator=draw) > 0.3).float()
    count = float(mask.sum())
    parts = [
        value_loss(values[s], values[s], returns[s], mask[s], ValueLossConfig(), num_tokens=count)[0]
        for s in (slice(5), slice(5, 12))
    ]
    assert sum(float(part) for part in parts) == pytest.approx(
        0.5 * float(((values - returns).square() * mask).sum()) / count
    )


def test_explained_variance_is_one_minus_that_of_the_residuals():
    draw = torch.Generator().manual_seed(1)
    returns_T = torch.randn(50, generator=draw) + 3
    returns_T[:10] += 4
    values_T = returns_T + 0.5 * torch.randn(50, generator=draw)
    updates = []
    # Of several updates together, whatever their sizes and however easy each is alone.
    for part in (slice(10), slice(10, 50)):
        values, returns = values_T[part], returns_T[part]
        _, sums = value_loss(
            values, values, returns, torch.ones_like(values), ValueLossConfig(), num_tokens=len(values)
        )
        updates.append({name: float(value) for name, value in sums.items()} | {"num_valid_tokens": float(len(values))})
    wanted = 1 - float((returns_T - values_T).var(correction=0) / returns_T.var(correction=0))
    assert explained_variance(updates) == pytest.approx(wanted, abs=1e-4)
    assert explained_variance([dict.fromkeys(updates[0], 0.0)]) == 0.0
