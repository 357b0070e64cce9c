# SPDX-License-Identifier: Apache-2.0
"""Auxiliary balancing losses, written out slowly from the routers' scores in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def balancing_loss(
    model: PreTrainedModel, rows: list[list[list[int]]], kind: str, *, num_rows_at_once: int = 1
) -> Tensor:
    """The auxiliary loss of every layer with experts, summed. `num_rows_at_once`: the number of data-parallel ranks."""
    by_row = [[router_scores(model, sequence) for sequence in row] for row in rows]
    topk, num_layers = int(model.config.num_experts_per_tok), len(by_row[0][0])
    losses = []
    for layer in range(num_layers):
        scores = [[sequence[layer] for sequence in row] for row in by_row]
        tokens = [token for row in scores for sequence in row for token in sequence]
        if kind == "seq_aux_loss":
            parts = [sequence for row in scores for sequence in row]
            losses.append(sum(imbalance(list(part), list(part), topk) for part in parts) / len(parts))
        elif kind == "aux_loss":
            parts = [[token for sequence in row for token in sequence] for row in scores]
            losses.append(sum(imbalance(part, part, topk) * len(part) for part in parts) / len(tokens))
        else:
            assert kind == "global_aux_loss"
            total = torch.zeros(())
            for start in range(0, len(scores), num_rows_at_once):
                now = [
                    token for row in scores[start : start + num_rows_at_once] for sequence in row for token in sequence
                ]
                so_far = [token for row in scores[: start + num_rows_at_once] for sequence in row for token in sequence]
                total = total + imbalance(so_far, now, topk) * len(now)
            losses.append(total / len(tokens))
    return torch.stack(losses).sum()


def imbalance(counted: list[Tensor], scored: list[Tensor], topk: int) -> Tensor:
    """E * sum over experts of (share of `counted` choices) * (mean score of `scored`), tokens being expert scores."""
    num_experts = len(counted[0])
    choices = [0] * num_experts
    for token in counted:
        for expert in token.topk(topk).indices.tolist():
            choices[expert] += 1
    mean_scores = torch.stack(scored).mean(dim=0)
    return sum(
        (num_experts * choices[i] / (topk * len(counted)) * mean_scores[i] for i in range(num_experts)), torch.zeros(())
    )


def router_scores(model: PreTrainedModel, sequence: list[int]) -> list[Tensor]:
    """Scores [tokens, experts] of each layer with experts, which sum to one over the experts."""
    return [scores_of(model, gate, hidden) for gate, hidden in router_inputs(model, sequence)]


def scores_of(model: PreTrainedModel, gate: nn.Module, hidden: Tensor) -> Tensor:
    """The router's scores [tokens, experts] of hidden states, which sum to one over the experts."""
    logits = hidden @ gate.get_parameter("weight").T
    if model.config.model_type != "nemotron_h":
        return logits.softmax(dim=-1)
    return logits.sigmoid() / logits.sigmoid().sum(dim=-1, keepdim=True)


def router_inputs(model: PreTrainedModel, sequence: list[int]) -> list[tuple[nn.Module, Tensor]]:
    """Each router and the hidden states [tokens, hidden] that it scores, in order of layer."""
    with recorded_router_inputs(model) as inputs:
        model(torch.tensor([sequence]))
    return inputs


@contextmanager
def recorded_router_inputs(*models: PreTrainedModel) -> Iterator[list[tuple[nn.Module, Tensor]]]:
    """Inside, each router call adds the router and the hidden states [tokens, hidden] that it scores to the list."""
    inputs: list[tuple[nn.Module, Tensor]] = []
    gates = [module for model in models for name, module in model.named_modules() if name.endswith(".gate")]
    hooks = [
        gate.register_forward_pre_hook(lambda gate, args: inputs.append((gate, args[0].flatten(0, -2))))
        for gate in gates
    ]
    yield inputs
    for hook in hooks:
        hook.remove()
