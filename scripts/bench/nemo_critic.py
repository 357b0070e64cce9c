# SPDX-License-Identifier: Apache-2.0
"""PPO's advantages, returns and loss of values, ours and NeMo RL's, on random batches. For `scripts.bench.nemo_parity`.

B sequences, S tokens of the longest one.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import torch
from torch import Tensor

from mrl.algo.critic import ValuedRow, finish_value_metrics, gae_of_rows, value_loss
from mrl.algo.token_advantages import kl_penalty
from mrl.config.schema.algo import LossConfig
from mrl.config.schema.ppo import GaeConfig, ValueLossConfig
from scripts.bench.nemo_code import NemoRl
from scripts.bench.nemo_losses import Inputs, random_inputs

Pairs = list[tuple[str, Tensor, Tensor]]

ESTIMATORS: dict[str, GaeConfig] = {
    "GAE": GaeConfig(gae_gamma=0.97),
    "GAE, not normalised": GaeConfig(gae_lambda=0.8, gae_gamma=0.9, normalize_advantages=False),
    "GAE, lambda 1": GaeConfig(gae_lambda=1.0),
    "GAE, lambdas of their own": GaeConfig(gae_lambda_value=1.0, gae_lambda_policy=0.9),
    "GAE, lambda by length": GaeConfig(gae_lambda_value=1.0, length_adaptive_alpha=0.4),
}
VALUE_LOSSES: dict[str, ValueLossConfig] = {
    "value loss": ValueLossConfig(),
    "value loss, clipped": ValueLossConfig(scale=0.4, cliprange=0.2),
}


def values_of(inputs: Inputs, seed: int) -> Tensor:
    """A critic's values, [3, B, S]: old ones, new ones, and returns."""
    return torch.randn(3, *inputs.mask_BS.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def compare_gae(nemo: NemoRl, seed: int, config: GaeConfig, *, with_kl: bool = False) -> Pairs:
    """Advantages and returns at the tokens that count."""
    inputs = random_inputs(seed)
    values_BS, mask_BS = values_of(inputs, seed)[0], inputs.mask_BS.double()
    loss = LossConfig(use_kl_in_reward=with_kl, reference_policy_kl_penalty=0.1)
    old_BS, reference_BS, rewards_B = inputs.old_BS.double(), inputs.reference_BS.double(), inputs.rewards_B.double()
    kl_T = None
    if with_kl:
        kl_T = kl_penalty(inputs.packed(old_BS), inputs.packed(reference_BS), inputs.packed(mask_BS), loss)
    row = ValuedRow(inputs.packed(values_BS), rewards_B, inputs.packed(mask_BS), inputs.cu_seqlens, kl_T)
    (ours,), (our_returns,) = gae_of_rows([row], config, lambda total: total)
    names = ("use_kl_in_reward", "reference_policy_kl_penalty", "reference_policy_kl_type")
    theirs = nemo.advantages.GeneralizedAdvantageEstimator(
        dataclasses.asdict(config), SimpleNamespace(**{name: getattr(loss, name) for name in names})
    )
    found = theirs.compute_advantage(None, rewards_B, mask_BS, values_BS, reference_logprobs=reference_BS, logprobs=old_BS)
    counts_T = inputs.packed(mask_BS) > 0
    advantages_T, returns_T = (inputs.packed(part) for part in found)
    return [("advantages", ours[counts_T], advantages_T[counts_T]), ("returns", our_returns[counts_T], returns_T[counts_T])]


def compare_value_loss(nemo: NemoRl, seed: int, config: ValueLossConfig) -> Pairs:
    """Loss of a batch, its gradient by the values, and its metrics."""
    inputs = random_inputs(seed)
    old_BS, start_BS, returns_BS = values_of(inputs, seed)
    num_tokens = inputs.mask_BS.double().sum()
    ours_BS, theirs_BS = start_BS.clone().requires_grad_(), start_BS.clone().requires_grad_()
    old_T, returns_T, mask_T = (inputs.packed(part) for part in (old_BS, returns_BS, inputs.mask_BS))
    loss, sums = value_loss(inputs.packed(ours_BS), old_T, returns_T, mask_T, config, num_tokens=float(num_tokens))
    data = {"returns": returns_BS, "values": old_BS, "token_mask": inputs.token_mask_BS, "sample_mask": inputs.sample_mask_B}
    their_function = nemo.losses.MseValueLossFn(nemo.losses.MseValueLossConfig(scale=config.scale, cliprange=config.cliprange))
    their_loss, their_metrics = their_function(theirs_BS, nemo.batches.BatchedDataDict(data), inputs.sample_mask_B.sum(), num_tokens)
    (gradient,), (their_gradient,) = torch.autograd.grad(loss, ours_BS), torch.autograd.grad(their_loss, theirs_BS)
    metrics = finish_value_metrics({name: float(value) for name, value in sums.items()})
    names = [name for name in their_metrics if name in metrics and name != "loss"]
    pairs = [(f"metric {name}", torch.tensor(metrics[name]), torch.tensor(float(their_metrics[name]))) for name in names]
    return [("loss", loss.detach(), their_loss.detach()), ("gradient", gradient, their_gradient), *pairs]
