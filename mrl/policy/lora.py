# SPDX-License-Identifier: Apache-2.0
"""LoRA: adapters for the linear layers of the frozen model, and what engines get of them.

Engines get weights with the adapters merged, whose base waits on the host meanwhile; or they get the adapters apart. An
adapter cuts A where columns of its layer's weight are cut, and B where rows are; a rank holds the other factor whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from conversion.adapters import INPUT, LINEAR, OUTPUT, adapted_layers, adapter_family
from conversion.boxes import Layout, Slot, SlotLayout
from conversion.families.common import HfConfig
from conversion.families.registry import family
from conversion.tensors import box_view, merge_lora, torch_dtype
from mrl.policy import parallel, specs
from mrl.policy.checkpoint_entries import LayoutEntries
from mrl.policy.host_block import copy_all, host_copies
from mrl.policy.model import keep_gradients_flowing
from mrl.policy.weights import live_tensors, name_seed

if TYPE_CHECKING:
    from mrl.config.schema.megatron import PeftConfig
    from mrl.config.schema.policy import PolicyConfig

ADAPTERS = "adapters"
"""The attribute of a model that holds its adapters, each under the name of its linear layer."""

_EXPERT = re.compile(r"(.*\.experts)\.local_experts\.(\d+)\.(.*)")

_INITS: Mapping[str, Callable[[Tensor, torch.Generator], object]] = {
    "xavier": lambda tensor, generator: nn.init.xavier_normal_(tensor, generator=generator),
    "normal": lambda tensor, generator: nn.init.normal_(tensor, 0.0, 0.2, generator=generator),
    "kaiming": lambda tensor, generator: nn.init.kaiming_uniform_(tensor, math.sqrt(5), generator=generator),
    "zero": lambda tensor, generator: nn.init.zeros_(tensor),
}


class _Factor(nn.Module):
    """A or B of an adapter, not initialised."""

    def __init__(self, layout: SlotLayout, device: torch.device, *, is_cut: bool, is_expert: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(layout.shape, dtype=torch_dtype(layout.dtype), device=device))
        self.is_cut, self.is_expert = is_cut, is_expert
        # Each rank of an expert's group has only a part of the gradient of a shared factor.
        group = parallel_state.get_expert_tensor_parallel_group() if is_expert and not is_cut else None
        self._partial_group = group if group is not None and group.size() > 1 else None
        # The gradient norm counts every rank's experts, but copies of one expert once.
        set_tensor_model_parallel_attributes(self.weight, is_cut or is_expert, 0, 1)
        if self._partial_group is not None and self._partial_group.rank() > 0:
            setattr(self.weight, "shared", True)  # noqa: B010  (Megatron's mark on a parameter)
        if is_expert:
            setattr(self.weight, "allreduce", False)  # noqa: B010  (Megatron's mark on a parameter)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self._partial_group is not None:
            weight = tensor_parallel.copy_to_tensor_model_parallel_region(weight, self._partial_group)
        return F.linear(x, weight)

    @property
    def replica_id(self) -> tuple[int, int, int]:
        """The replica id of its checkpoint entry: zeros on the rank that writes it."""
        if self.is_expert:
            rank = parallel_state.get_expert_tensor_parallel_rank()
            replica = parallel_state.get_expert_data_parallel_rank()
        else:
            rank = parallel_state.get_tensor_model_parallel_rank()
            replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        return 0, 0 if self.is_cut else rank, replica


class _Adapter(nn.Module):
    """Adapter of a linear layer: scale * B A x, to be added to the layer's own output."""

    def __init__(
        self,
        layer: str,
        settings: PeftConfig,
        factors: Mapping[str, SlotLayout],
        device: torch.device,
        *,
        sequence_parallel: bool,
    ) -> None:
        """`layer` is the full name of the linear layer; `factors` are this rank's by name."""
        super().__init__()
        kind, is_expert = LINEAR[layer.rpartition(".")[2]], _EXPERT.fullmatch(layer) is not None
        self.linear_in = _Factor(factors[layer + INPUT], device, is_cut=kind == "row", is_expert=is_expert)
        self.linear_out = _Factor(factors[layer + OUTPUT], device, is_cut=kind == "column", is_expert=is_expert)
        self.is_enabled = True
        self.scale = settings.scale
        self._dropout, self._dropout_position = settings.dropout, settings.dropout_position
        # Experts get the tokens of all their ranks, and their dispatcher sums the outputs.
        self._kind = "whole" if is_expert else kind
        self._sequence_parallel = sequence_parallel
        # Masks of values that differ between tp ranks must differ too.
        self._has_own_input = is_expert or kind == "row" or sequence_parallel
        self._has_own_output = is_expert or kind == "column" or sequence_parallel
        if sequence_parallel and not is_expert:
            for factor in (self.linear_in, self.linear_out):
                # A cut factor sees all tokens; the other factor's gradient is of this rank's tokens only.
                setattr(factor.weight, "sequence_parallel", not factor.is_cut)  # noqa: B010  (Megatron's mark on a parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the adapter's addition, in `x`'s dtype. Collective over the tp group where the linear layer is."""
        low = x.to(self.linear_in.weight.dtype)
        if self._dropout_position == "pre":
            low = self._drop(low, self._has_own_input)
        low = self.linear_in(low)
        if self._kind == "column" and self._sequence_parallel:
            low = tensor_parallel.gather_from_sequence_parallel_region(low)
        elif self._kind == "column":
            low = tensor_parallel.copy_to_tensor_model_parallel_region(low)
        elif self._kind == "row" and self._sequence_parallel:
            low = tensor_parallel.reduce_scatter_to_sequence_parallel_region(low)
        elif self._kind == "row":
            low = tensor_parallel.reduce_from_tensor_model_parallel_region(low)
        output = self.linear_out(low)
        if self._dropout_position == "post":
            output = self._drop(output, self._has_own_output)
        return (output * self.scale).to(x.dtype)

    def merged(self, base: Tensor) -> Tensor:
        """The layer's weight `base` with the adapter added."""
        return merge_lora(base, self.linear_in.weight, self.linear_out.weight, self.scale)

    def _drop(self, x: Tensor, is_own: bool) -> Tensor:
        if not self.training or not self._dropout:
            return x
        with tensor_parallel.get_cuda_rng_tracker().fork() if is_own else nullcontext():
            return F.dropout(x, self._dropout)


class Lora:
    """The adapters of this rank; none where `megatron_cfg.peft` is not enabled."""

    def __init__(
        self,
        layout: Layout,
        adapters: Mapping[Slot, _Adapter],
        description: Mapping[str, object] | None,
        *,
        merges: bool = True,
    ) -> None:
        """`layout` maps slots of the live model to factors; `adapters` maps slots of adapted weights to adapters.

        With `merges` engines get merged weights, else the adapters apart.
        """
        self._merges = merges
        self.layout = layout
        self.description = description
        """Adapted layers and their scaling as plain values, the same wherever factors are used; None = no adapters."""
        self._adapters = adapters
        self._base: list[Tensor] = []
        """Adapted weights without their adapters, in host memory."""
        self._is_base_kept = self._is_merged = False
        self.is_base_sent = False
        """True once engines have got the weights below the adapters, until others are written."""

    @torch.no_grad()
    def merge(self, tensors: Mapping[Slot, Tensor]) -> None:
        """Adds the adapters to the live weights, which engines then read; passes of the trainer need `unmerge` first.

        There is one copy of the weights on the device, because two and the engine's would not fit; the base waits on
        the host.
        """
        if self._is_merged:
            return
        live = [tensors[slot].detach() for slot in self._adapters]
        if not self._base:
            self._base = host_copies(live)
        elif not self._is_base_kept:
            copy_all(self._base, live)
        self._is_base_kept = self._is_merged = True
        for weight, adapter in zip(live, self._adapters.values(), strict=True):
            weight.copy_(adapter.merged(weight))

    @torch.no_grad()
    def unmerge(self, tensors: Mapping[Slot, Tensor]) -> None:
        """Gives the live weights the values of the base again, bit for bit."""
        if self._is_merged:
            copy_all([tensors[slot].detach() for slot in self._adapters], self._base)
        self._is_merged = False

    def place(self, tensors: Mapping[Slot, Tensor]) -> None:
        """Puts the adapters where engines read them: into the live weights, or apart from these."""
        if self._merges:
            self.merge(tensors)
        else:
            self.unmerge(tensors)

    def forget_base(self, tensors: Mapping[Slot, Tensor]) -> None:
        """Unmerges, because other values of the base are written into the live weights next."""
        self.unmerge(tensors)
        self._is_base_kept = self.is_base_sent = False

    def copies(self, dtype: str) -> dict[Slot, Tensor]:
        """Memory for copies of this rank's factors, by the slots of `adapter_family`; `copy_scaled` fills it."""
        return {
            slot: torch.empty_like(weight, dtype=torch_dtype(dtype)) for slot, (weight, _) in self._scaled().items()
        }

    @torch.no_grad()
    def copy_scaled(self, copies: Mapping[Slot, Tensor]) -> None:
        """Fills `copies` with the factors. B is multiplied by the scale, as engines have none."""
        for slot, (weight, scale) in self._scaled().items():
            copies[slot].copy_(weight * scale)

    def _scaled(self) -> dict[Slot, tuple[Tensor, float]]:
        """Live factors with their scale."""
        found = {}
        for slot, adapter in self._adapters.items():
            layer = slot.name.removesuffix(".weight")
            found[Slot(layer + INPUT, slot.chunk)] = adapter.linear_in.weight.detach(), 1.0
            found[Slot(layer + OUTPUT, slot.chunk)] = adapter.linear_out.weight.detach(), adapter.scale
        return found

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Switches the adapters off in the `with` block."""
        for adapter in self._adapters.values():
            adapter.is_enabled = False
        try:
            yield
        finally:
            for adapter in self._adapters.values():
                adapter.is_enabled = True

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Switches dropout off in the `with` block, as engines have none in the merged weights."""
        for adapter in self._adapters.values():
            adapter.eval()
        try:
            yield
        finally:
            for adapter in self._adapters.values():
                adapter.train()


def attach_adapters(chunks: list[MegatronModule], config: PolicyConfig, hf_config: HfConfig, *, seed: int) -> Lora:
    """Freezes the chunks and gives their linear layers adapters, where `megatron_cfg.peft` is enabled. Call before DDP.

    Initial adapters depend on `seed` and canonical names only, not on the layout.
    """
    settings = config.megatron_cfg.peft
    if not settings.enabled:
        return Lora({}, {}, None)
    base = family(hf_config)
    targets = adapted_layers(
        base, hf_config, target_modules=settings.target_modules, exclude_modules=settings.exclude_modules
    )
    adapters = adapter_family(base, targets, settings.dim)
    dtype = settings.lora_dtype if settings.lora_dtype in ("float32", "bfloat16") else config.precision
    factors = adapters.megatron_layout(hf_config, config.megatron_cfg.parallel, parallel.coordinates(), dtype)
    entries = LayoutEntries(factors, adapters.torch_dist_layout(hf_config, dtype))
    layout = {Slot(f"{ADAPTERS}.{slot.name}", slot.chunk): content for slot, content in factors.items()}
    canonical = adapters.canonical(hf_config)
    by_weight: dict[Slot, _Adapter] = {}
    for index, chunk in enumerate(chunks):
        model = unwrap_model(chunk)
        if model.config.moe_shared_expert_overlap and any(".shared_experts." in layer for layer in targets):
            raise ValueError(
                "policy.megatron_cfg.moe_shared_expert_overlap=true: shared experts with adapters cannot overlap "
                "with the routed ones; set it to false, or policy.megatron_cfg.peft.exclude_modules to "
                "['*.shared_experts.*']"
            )
        model.requires_grad_(False)
        keep_gradients_flowing(model)
        own = {slot.name: content for slot, content in factors.items() if slot.chunk == index}
        device, is_parallel = next(model.parameters()).device, config.megatron_cfg.sequence_parallel
        layers = [name.removesuffix(INPUT) for name in own if name.endswith(INPUT)]
        found = {layer: _Adapter(layer, settings, own, device, sequence_parallel=is_parallel) for layer in layers}
        by_weight |= {Slot(weight, index): adapter for weight, adapter in _attach(model, found).items()}
        setattr(model, ADAPTERS, _AdapterTree(found, entries, index))
        for slot, tensor in live_tensors(model, index).items():
            for piece in layout[slot].pieces if slot in layout else ():
                whole = torch.empty(canonical[piece.name])
                is_a = piece.name.removesuffix(".weight").endswith("A")
                init = _INITS[settings.lora_A_init_method if is_a else settings.lora_B_init_method]
                init(whole, torch.Generator().manual_seed(name_seed(seed, piece.name)))
                with torch.no_grad():
                    box_view(tensor, piece.local).copy_(box_view(whole, piece.box))
    description = {"dim": settings.dim, "alpha": settings.alpha, "layers": list(targets)}
    return Lora(layout, by_weight, description, merges=settings.merge)


class _AdapterTree(nn.Module):
    """A chunk's adapters, each under the name of its linear layer, so that Megatron's own modules stay as they are."""

    def __init__(self, adapters: Mapping[str, _Adapter], entries: LayoutEntries, chunk: int) -> None:
        super().__init__()
        self._entries, self._chunk = entries, chunk
        for layer, adapter in adapters.items():
            node: nn.Module = self
            for name in layer.split("."):
                if name not in node._modules:
                    node.add_module(name, nn.Module())
                node = node.get_submodule(name)
            node.add_module("adapter", adapter)

    def sharded_state_dict(self, prefix: str, sharded_offsets: object, metadata: object) -> ShardedStateDict:
        """Entries of a Megatron checkpoint; called by the model's method of this name."""
        factors = {f"{name}.weight": module for name, module in self.named_modules() if isinstance(module, _Factor)}
        return {
            f"{prefix}{name}": self._entries.entry(Slot(name, self._chunk), factor.weight, factor.replica_id)
            for name, factor in factors.items()
        }


def _attach(model: nn.Module, adapters: Mapping[str, _Adapter]) -> dict[str, _Adapter]:
    modules, by_weight = dict(model.named_modules()), {}
    by_module: dict[str, list[_Adapter]] = {}
    for layer, adapter in adapters.items():
        expert = _EXPERT.fullmatch(layer)
        if expert is None or layer in modules:
            module, weight = layer, f"{layer}.weight"
        else:
            module = f"{expert[1]}.{expert[3]}"
            weight = f"{module}.weight{expert[2]}"
        by_module.setdefault(module, []).append(adapter)
        by_weight[weight] = adapter
    for name, beside in by_module.items():
        _add_output(modules[name], beside)
    return by_weight


def _add_output(module: nn.Module, adapters: list[_Adapter]) -> None:
    if specs.HAVE_TE:
        from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear

        if isinstance(module, TELayerNormColumnParallelLinear):
            # The layer norms its input itself; this makes it return the normed input with its output.
            setattr(module, "return_layernorm_output", True)  # noqa: B010  (torch types attributes of modules as tensors)

    def add(
        module: nn.Module, inputs: tuple[Tensor, ...], result: tuple[Tensor | tuple[Tensor, Tensor], Tensor | None]
    ) -> object:
        output, bias = result
        x = inputs[0]
        if isinstance(output, tuple):
            output, x = output
        if not adapters[0].is_enabled:
            return output, bias
        parts = [x] if len(inputs) == 1 else torch.split(x, list(map(int, inputs[1])))
        changes = [adapter(part) for adapter, part in zip(adapters, parts, strict=True)]
        return output + (changes[0] if len(changes) == 1 else torch.cat(changes)), bias

    module.register_forward_hook(add)
