# SPDX-License-Identifier: Apache-2.0
"""SAPO (arXiv:2511.20347): a sigmoid fades a token's weight, in place of PPO's clip."""

import torch
from torch import Tensor

from mrl.algo.losses import Tokens
from mrl.config.schema.algo import LossConfig

TAU_GOOD, TAU_BAD = 1.0, 1.05


def soft_gate(tokens: Tokens, ratio_T: Tensor, clipped_ratio_T: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    tau_T = torch.where(tokens.advantages_T > 0, TAU_GOOD, TAU_BAD)
    gate_T = torch.sigmoid(tau_T * (ratio_T - 1)) * 4 / tau_T
    return -tokens.advantages_T * gate_T, torch.zeros_like(ratio_T, dtype=torch.bool)
