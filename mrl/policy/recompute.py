"""Activation recomputation: what it asks of Megatron's config, and full recomputation of the hybrid stack, which Megatron's lacks.

Megatron-core 0.16.1's MambaStack silently ignores recompute_granularity="full"; later versions have it (see `mrl.policy.compat`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor, nn

from mrl.policy import compat

if TYPE_CHECKING:
    from mrl.config.schema.megatron import MegatronConfig


def recompute_arguments(config: MegatronConfig) -> dict[str, Any]:
    """Arguments of TransformerConfig. Full recomputation keeps the input of every layer, and no other activation."""
    if not config.activation_checkpointing:
        return {}
    if config.recompute_granularity == "full":
        return dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    return dict(recompute_granularity="selective", recompute_modules=config.recompute_modules)


def recomputed(spec: ModuleSpec) -> ModuleSpec:
    """The spec of a hybrid stack, with its layers recomputed in the backward pass."""
    return replace(spec, module=RecomputedStack)


class RecomputedStack(compat.MambaStack):
    """Megatron's stack of Mamba, attention, MLP and MoE layers, which keeps the inputs of groups of `recompute_num_layers` layers only.

    It trains; Megatron's inference and fp8 have no part in it.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        inference_context: None = None,
        rotary_pos_emb: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the stage's layers, [tokens, 1, hidden]; the random states of a group's first pass hold in its second."""
        assert inference_context is None and not self.config.fp8
        hidden_states = hidden_states if self.pre_process else self.input_tensor
        whole = dict(
            attention_mask=attention_mask, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params, padding_mask=padding_mask
        )
        group_size = self.config.recompute_num_layers
        for start in range(0, len(self.layers), group_size):
            run = partial(_run_layers, list(self.layers)[start : start + group_size], whole)
            if torch.is_grad_enabled():
                hidden_states = tensor_parallel.checkpoint(run, self.config.distribute_saved_activations, hidden_states)
            else:
                hidden_states = run(hidden_states)
        if self.post_process and self.post_layer_norm:
            hidden_states = self.final_norm(hidden_states)
        # Schedules free the memory of what they have sent, which must not be a view.
        return make_viewless_tensor(inp=hidden_states, requires_grad=hidden_states.requires_grad, keep_graph=True)


def _run_layers(layers: list[nn.Module], whole: dict[str, Any], hidden_states: Tensor) -> Tensor:
    for layer in layers:
        if isinstance(layer, TransformerLayer):
            hidden_states, _ = layer(hidden_states=hidden_states, **whole)
        else:
            mamba = {name: whole[name] for name in ("attention_mask", "packed_seq_params")}
            hidden_states = layer(hidden_states=hidden_states, **mamba)
    return hidden_states
