# SPDX-License-Identifier: Apache-2.0
"""Weights, gradients and optimizer of a rank: elements by pipeline stage from conversion tables, and bytes of each."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from conversion.cuts import AxisRank, Experts
from conversion.families.common import MegatronParallel, Model, Rule
from mrl.plan.activations import BF16, FP32

# The rule's name of the layer that a model with a head keeps and does not use (`mrl.policy.output.attach_reward_head`).
_OUTPUT = "output_layer.weight"
# torch rounds each pinned tensor up to a power of two: by 1 / ln 2 on average, if sizes are spread evenly between two
# powers.
PINNED_ROUNDING = 1 / math.log(2)


class Elements(NamedTuple):
    """Elements that a rank holds, by the group over which their optimizer state is spread."""

    dense: int = 0
    experts: int = 0
    buffers: int = 0
    frozen: int = 0
    """Elements of weights without gradient, such as MTP layers that are not trained, and the output layer of a model
    with a head.
    """
    ends: int = 0
    """Part of `dense`: elements before and after the layers, of which Adam has two moments also beside Muon."""

    def plus(self, other: Elements) -> Elements:
        return Elements(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


@dataclass(frozen=True)
class StateRules:
    """Bytes per element of each state, and the number of ranks that share the optimizer state."""

    dense_shards: int
    expert_shards: int
    weight_bytes: int = BF16
    gradient_bytes: int = FP32
    main_bytes: int = FP32
    moment_bytes: int = 2 * FP32
    is_precision_aware: bool = True
    offloaded: float = 0.0
    """Share of the elements that the host updates."""
    is_trained: bool = True
    """False: only adapters are trained, whose states are small against the weights and not counted."""


@dataclass(frozen=True)
class States:
    """Bytes of one rank."""

    weights: float
    gradients: float
    optimizer: float
    gradient_copy: float
    """Float32 shard of gradients, from the optimizer step to the next zero_grad."""
    host_optimizer: float
    """Bytes of elements that the host updates: moments, and copies of the main parameters and gradients in pinned
    memory.
    """
    pinned: float = 0.0
    """Part of `host_optimizer` that torch pins, rounded up by `PINNED_ROUNDING` on average."""
    reference: float = 0.0
    """Bytes that a reference model copies: all weights, or buffers alone where the weights are frozen under
    adapters.
    """
    base: float = 0.0
    """Bytes of weights with adapters, whose base waits on the host while the adapters are merged
    (`mrl.policy.lora.Lora.merge`).
    """

    @property
    def allocated(self) -> float:
        """The bytes allocated after an optimizer step."""
        return self.weights + self.gradients + self.optimizer + self.gradient_copy


def state_bytes(elements: Elements, rules: StateRules) -> States:
    """Bytes of the states of a rank.

    Offloading leaves main parameters on the GPU: 8 of 12 bytes move, as the runs of Megatron-Bridge's skill
    cpu-offloading show.
    """
    held = elements.dense + elements.experts
    trained = held if rules.is_trained else 0
    shard = (elements.dense / rules.dense_shards + elements.experts / rules.expert_shards) if rules.is_trained else 0.0
    has_main = rules.weight_bytes < FP32
    ends = elements.ends / rules.dense_shards * rules.is_trained
    moments = shard * rules.moment_bytes + ends * (2 * FP32 - rules.moment_bytes)
    copies = rules.gradient_bytes < FP32 and not rules.is_precision_aware
    return States(
        weights=(held + elements.frozen) * rules.weight_bytes + elements.buffers * FP32,
        gradients=trained * rules.gradient_bytes,
        optimizer=(shard * rules.main_bytes if has_main else 0) + moments * (1 - rules.offloaded),
        gradient_copy=shard * FP32 if copies else 0,
        host_optimizer=rules.offloaded * (moments + shard * 2 * FP32),
        pinned=rules.offloaded * shard * 2 * FP32,
        reference=(held + elements.frozen) * rules.weight_bytes * rules.is_trained + elements.buffers * FP32,
    )


class ModelElements:
    """Elements of each layer of a model under parallel sizes, from the rules of its family."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._of_layer = cache(self._layer)

    def stage(
        self, parallel: MegatronParallel, pp_rank: int, *, trains_mtp: bool = False, has_head: bool = False
    ) -> Elements:
        """Elements of a pipeline stage on each of its ranks; all hold the same number. A reward head is not counted."""
        sizes = (parallel.tp, parallel.ep, parallel.etp)
        total = Elements()
        for chunk in range(parallel.vpp):
            for index in parallel.layers_of(pp_rank, len(self._model.layers), chunk):
                total = total.plus(self._of_layer(index, *sizes))
        if pp_rank == 0:
            total = total.plus(_ends(_count(self._model.first, *sizes)))
        if pp_rank == parallel.pp - 1:
            tied = (self._model.tied_output,) if self._model.tied_output and parallel.pp > 1 else ()
            unused = [rule for rule in self._model.last if has_head and rule.megatron == _OUTPUT]
            used = [rule for rule in (*self._model.last, *tied) if rule not in unused]
            total = total.plus(_ends(_count(used, *sizes))).plus(_frozen(_count(unused, *sizes)))
            mtp = _count(self._model.mtp, *sizes)
            total = total.plus(mtp if trains_mtp else _frozen(mtp))
        return total

    def _layer(self, index: int, tp: int, ep: int, etp: int) -> Elements:
        return _count(self._model.layers[index], tp, ep, etp)


def _ends(elements: Elements) -> Elements:
    return elements._replace(ends=elements.dense)


def _frozen(elements: Elements) -> Elements:
    return Elements(buffers=elements.buffers, frozen=elements.dense + elements.experts)


def _count(rules: Iterable[Rule], tp: int, ep: int, etp: int) -> Elements:
    dense = experts = buffers = 0
    for rule in rules:
        if not rule.megatron:
            continue
        if isinstance(rule.cut, Experts):
            start, stop = AxisRank(ep, 0, "expert_model_parallel_size").part(rule.cut.num_experts, "experts")
            experts += (stop - start) * math.prod(
                rule.cut.cut.megatron(AxisRank(etp, 0, "expert_tensor_parallel_size")).shape
            )
        elif rule.dtype is not None:
            buffers += math.prod(rule.cut.megatron(AxisRank(tp, 0)).shape)
        else:
            dense += math.prod(rule.cut.megatron(AxisRank(tp, 0)).shape)
    return Elements(dense, experts, buffers)
