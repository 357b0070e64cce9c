# SPDX-License-Identifier: Apache-2.0
"""One policy rank's side of refits: weights out of its arena, and adapters apart from them where engines hold both."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from conversion.boxes import Slot
from mrl.policy.lora import Lora
from mrl.policy.weights import Arena
from mrl.refit.exchange import Exchange, GpuHandles
from mrl.refit.group import ExchangeGroup, GroupAddress
from mrl.refit.inputs import Part, RefitInputs


class RefitSide:
    """The exchanges of a rank. Its weights are settled whenever one of the methods is called."""

    def __init__(
        self, rank: int, lora: Lora, weights: Mapping[Slot, Tensor], arena: Arena, *, timeout_s: float
    ) -> None:
        """`weights` are the live tensors in `arena`."""
        self._rank, self._lora, self._weights, self._arena = rank, lora, weights, arena
        self._timeout_s = timeout_s
        self._exchanges: dict[Part, Exchange] = {}
        self._copies: dict[Slot, Tensor] = {}

    def prepare(self, inputs: RefitInputs, address: GroupAddress) -> GpuHandles:
        """Joins the exchange of the inputs' part, collective at `address`; returns what its GPU's workers need."""
        exchange = self._exchanges.get(inputs.part)
        if exchange is not None:
            exchange.join(None)
        device = next(iter(self._weights.values())).device
        group = ExchangeGroup(address, self._rank, device=device, timeout_s=self._timeout_s)
        if exchange is not None:
            exchange.join(group)
        else:
            weights, arena = self._weights, self._arena
            if inputs.part == "adapters":
                weights = self._copies = self._lora.copies(inputs.precision)
                # A pipeline stage may have no adapters, but an arena it has.
                held = weights or {Slot("nothing"): torch.zeros(1, device=device)}
                arena = self._adapter_arena = Arena(held, name=f"mrl-adapters-{self._rank}")
            exchange = Exchange(inputs.schedule(), self._rank, weights, arena.handle(), group=group)
            self._exchanges[inputs.part] = exchange
        return exchange.handles()

    def leave(self, attempt: int, part: Part) -> None:
        """Leaves an attempt that this rank cannot take part in."""
        self._exchanges[part].leave(attempt)

    def run(self, attempt: int, readers: Collection[int], timeout_s: float, part: Part) -> None:
        """Exchanges all rounds of an attempt. RuntimeError: adapters, but engines have not got the present weights."""
        if part == "adapters":
            if not self._lora.is_base_sent:
                self.leave(attempt, part)
                raise RuntimeError("a refit of adapters alone, but the weights below them have changed since the last")
            self._lora.copy_scaled(self._copies)
        self._exchanges[part].run(attempt, readers, timeout_s=timeout_s)
        self._lora.is_base_sent = True
