# SPDX-License-Identifier: Apache-2.0
"""Linear layers and experts of engines on CPU hosts, in plain torch: they read weights as a refit writes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

# The matrix kernels give rows other bits when there are few of them; from 4 rows on, multiples of 4 agree. 16 keeps a
# margin.
ROW_MULTIPLE = 16
Read = Callable[[Tensor], Tensor]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` whose rows do not depend on how many there are."""
    rows = x.reshape(-1, x.shape[-1])
    # vLLM's parameters would go through a function in Python.
    with torch._C.DisableTorchFunctionSubclass():
        out = F.linear(_pad_rows(rows), weight, bias)[: rows.shape[0]]
    return out.view(*x.shape[:-1], -1)


def _pad_rows(x: Tensor) -> Tensor:
    missing = -x.shape[0] % ROW_MULTIPLE
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _activate(activation: MoEActivation, x: Tensor) -> Tensor:
    if activation == MoEActivation.RELU2_NO_MUL:
        return F.relu(x).square_()
    if activation == MoEActivation.SWIGLUOAI:
        # Their columns alternate; vLLM has these numbers in its code, too.
        gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
        return (gate * torch.sigmoid(gate * 1.702)).mul_(up + 1)
    assert activation == MoEActivation.SILU, "vLLM asks `_supports_activation` before"
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class PlainExperts(CPUUnquantizedExperts):
    """Experts in plain torch on weights as loaded: a padded row group per expert."""

    isa = "torch"
    output_alignment = 1
    reduction_alignment = 1
    ACTIVATIONS = (MoEActivation.SILU, MoEActivation.RELU2_NO_MUL, MoEActivation.SWIGLUOAI)

    @staticmethod
    def is_supported_config(cls: type, *configuration: object) -> tuple[bool, str | None]:  # type: ignore[override]  # passed through
        """True when these experts fit. Sizes do not matter, unlike for vLLM's packed kernel."""
        return modular_kernel.FusedMoEExperts.is_supported_config(cls, *configuration)  # type: ignore[arg-type]  # the same

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation in PlainExperts.ACTIVATIONS

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs nothing: parameters stay as a refit writes them."""

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        a1q_scale: Tensor | None,
        a2_scale: Tensor | None,
        workspace13: Tensor,
        workspace2: Tensor,
        expert_tokens_meta: object,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Writes the weighted sum of each token's experts into `output`; experts of other ranks count as zero."""
        first, second, read = self._as_read(w1, w2, hidden_states.dtype)
        output.copy_(
            mixture(
                hidden_states, first, second, topk_weights, topk_ids, activation, expert_map,
                weighs_inputs=apply_router_weight_on_input, read=read, biases=(self.w1_bias, self.w2_bias),
            )
        )  # fmt: skip

    def _as_read(self, w1: Tensor, w2: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Read]:
        """Both weights as the products read them, and how they read their inputs."""
        return w1, w2, lambda x: x


def mixture(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: MoEActivation,
    expert_map: Tensor | None,
    *,
    weighs_inputs: bool,
    read: Read,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Weighted sum of each token's experts, float32; `read` is how the products read their inputs."""
    first_biases, second_biases = ([None] * len(w1) if bias is None else bias for bias in biases)
    expert_ids = (topk_ids if expert_map is None else expert_map[topk_ids.long()]).reshape(-1)
    # Experts that live on other ranks have id -1, so their choices are sorted to the front.
    num_elsewhere, *counts = torch.bincount(expert_ids + 1, minlength=len(w1) + 1).tolist()
    choices = expert_ids.argsort(stable=True)[num_elsewhere:]
    tokens = choices // topk_ids.shape[1]
    weights = torch.ones(len(choices), 1) if weighs_inputs else topk_weights.reshape(-1, 1)[choices].float()
    # Filled up with token 0 for each expert; what becomes of it is dropped.
    padded = [F.pad(chosen, (0, -len(chosen) % ROW_MULTIPLE)) for chosen in tokens.split(counts)]
    sizes = [len(chosen) for chosen in padded]
    # Experts at once where there is no matrix product: each call costs as much as the few rows of an expert.
    inputs = read(hidden_states)[torch.cat(padded)].split(sizes)
    inner = torch.cat([F.linear(*expert) for expert in zip(inputs, w1, first_biases, strict=True)])
    hidden = read(_activate(activation, inner)).split(sizes)
    results = [
        F.linear(rows, weight, bias)[:count]
        for rows, weight, bias, count in zip(hidden, w2, second_biases, counts, strict=True)
    ]
    scaled = torch.cat(results).float().mul_(weights)
    return torch.zeros(hidden_states.shape, dtype=torch.float32).index_add_(0, tokens, scaled)
