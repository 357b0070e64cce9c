"""LoRA: adapters beside the linear layers of the frozen model, and the merged weights that engines get.

Base weights are never written. What an engine reads of an adapted layer is a second tensor, made anew whenever weights are settled.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from conversion.adapters import INPUT, LINEAR, OUTPUT, adapted_layers, adapter_family
from conversion.boxes import Layout, Slot, SlotLayout
from conversion.families.common import HfConfig, MegatronCoords
from conversion.families.registry import family
from conversion.tensors import box_view, torch_dtype
from mrl.policy import compat, parallel
from mrl.policy.adapter import Adapter, Factor
from mrl.policy.arena import live_tensors
from mrl.policy.frozen import keep_gradients_flowing
from mrl.policy.layout_state import CheckpointEntries

if TYPE_CHECKING:
    from mrl.config.schema.peft import PeftConfig
    from mrl.config.schema.policy import PolicyConfig

ATTRIBUTE = "adapters"
"""Of a model: its adapters, each under the name of its linear layer."""

_EXPERT = re.compile(r"(.*\.experts)\.local_experts\.(\d+)\.(.*)")


class Lora:
    """The adapters of this rank."""

    def __init__(self, layout: Layout, adapters: Mapping[Slot, Adapter], description: Mapping[str, object]) -> None:
        """`layout` has every factor by its slot in the live model; `adapters` are by the slot of the weight that they change."""
        self.layout = layout
        self.description = description
        """Which layers have adapters and how they count, as plain values: what must be the same wherever the factors are used."""
        self._adapters = adapters
        self._merged: dict[Slot, Tensor] = {}

    def merged_weights(self, tensors: Mapping[Slot, Tensor]) -> dict[Slot, Tensor]:
        """What engines read instead of these live weights: the same tensors, but for adapted ones, which get memory of their own."""
        with torch.no_grad():
            self._merged = {slot: tensors[slot].detach().clone() for slot in self._adapters}
        return self.as_read(tensors)

    def as_read(self, tensors: Mapping[Slot, Tensor]) -> dict[Slot, Tensor]:
        """The live weights, the merged ones in place of those that are adapted."""
        return {slot: self._merged.get(slot, tensor) for slot, tensor in tensors.items()}

    def merge(self, tensors: Mapping[Slot, Tensor]) -> None:
        """Makes the merged weights from `tensors`, the live ones."""
        for slot, adapter in self._adapters.items():
            adapter.merge_into(tensors[slot], self._merged[slot])

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within it, the model is the one without adapters."""
        for adapter in self._adapters.values():
            adapter.is_enabled = False
        try:
            yield
        finally:
            for adapter in self._adapters.values():
                adapter.is_enabled = True

    @contextmanager
    def without_dropout(self) -> Iterator[None]:
        """Within it, the model computes what engines do with the merged weights."""
        for adapter in self._adapters.values():
            adapter.eval()
        try:
            yield
        finally:
            for adapter in self._adapters.values():
                adapter.train()


def attach_adapters(chunks: list[MegatronModule], config: PolicyConfig, hf_config: HfConfig, *, seed: int) -> Lora | None:
    """Freezes the chunks and gives their linear layers adapters, where `megatron_cfg.peft` is enabled; comes before DDP.

    Adapters start as a function of `seed` and canonical names alone, whatever the layout.

    Raises:
        ValueError: shared experts that overlap with the routed ones would have adapters.
    """
    settings = config.megatron_cfg.peft
    if not settings.enabled:
        return None
    base = family(hf_config)
    targets = adapted_layers(base, hf_config, target_modules=settings.target_modules, exclude_modules=settings.exclude_modules)
    adapters = adapter_family(base, targets, settings.dim)
    dtype = settings.lora_dtype if settings.lora_dtype in ("float32", "bfloat16") else config.precision
    place = parallel.coordinates()
    coords = MegatronCoords(tp=place.tp, pp=place.pp, ep=place.ep, etp=place.etp)
    factors = adapters.megatron_layout(hf_config, config.megatron_cfg.parallel, coords, dtype)
    entries = CheckpointEntries(factors, adapters.torch_dist_layout(hf_config, dtype))
    layout = {Slot(f"{ATTRIBUTE}.{slot.name}", slot.chunk): content for slot, content in factors.items()}
    by_weight: dict[Slot, Adapter] = {}
    for index, chunk in enumerate(chunks):
        model = unwrap_model(chunk)
        if model.config.moe_shared_expert_overlap and any(".shared_experts." in layer for layer in targets):
            # These layers get their input gathered already, and their output is reduced elsewhere.
            raise ValueError(
                "policy.megatron_cfg.moe_shared_expert_overlap=true: shared experts with adapters cannot overlap with the routed ones; "
                "set it to false, or policy.megatron_cfg.peft.exclude_modules to ['*.shared_experts.*']"
            )
        model.requires_grad_(False)
        keep_gradients_flowing(model)
        found = _make_adapters(model, config, {slot.name: content for slot, content in factors.items() if slot.chunk == index})
        by_weight |= {Slot(weight, index): adapter for weight, adapter in _attach(model, found).items()}
        setattr(model, ATTRIBUTE, _AdapterTree(found, entries, index))
        tensors = {slot: tensor for slot, tensor in live_tensors(model, index).items() if slot in layout}
        _initialise(tensors, layout, adapters.canonical(hf_config), settings, seed)
    description = {"dim": settings.dim, "alpha": settings.alpha, "layers": list(targets)}
    return Lora(layout, by_weight, description)


class _AdapterTree(nn.Module):
    """The adapters of a chunk, each under the name of its linear layer, so that Megatron's own modules stay as they are."""

    def __init__(self, adapters: Mapping[str, Adapter], entries: CheckpointEntries, chunk: int) -> None:
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
        factors = {f"{name}.weight": module for name, module in self.named_modules() if isinstance(module, Factor)}
        return {
            f"{prefix}{name}": self._entries.entry(Slot(name, self._chunk), factor.weight, _replica_id(factor))
            for name, factor in factors.items()
        }


def _make_adapters(model: nn.Module, config: PolicyConfig, factors: Mapping[str, SlotLayout]) -> dict[str, Adapter]:
    """Adapters by the full name of their layer, one for each expert, not initialised."""
    device = next(model.parameters()).device
    return {
        layer: Adapter(
            config.megatron_cfg.peft,
            (factors[layer + INPUT].shape, factors[layer + OUTPUT].shape),
            kind=LINEAR[layer.rpartition(".")[2]],
            dtype=torch_dtype(factors[layer + INPUT].dtype),
            device=device,
            is_expert=_EXPERT.fullmatch(layer) is not None,
            sequence_parallel=config.megatron_cfg.sequence_parallel,
        )
        for layer in (name.removesuffix(INPUT) for name in factors if name.endswith(INPUT))
    }


def _attach(model: nn.Module, adapters: Mapping[str, Adapter]) -> dict[str, Adapter]:
    """Lets the linear layers add what their adapters give; the adapters by the name of the weight that they change."""
    modules, by_weight = dict(model.named_modules()), {}
    by_module: dict[str, list[Adapter]] = {}
    for layer, adapter in adapters.items():
        expert = _EXPERT.fullmatch(layer)
        if expert is None or layer in modules:
            module, weight = layer, f"{layer}.weight"
        else:
            # Transformer Engine computes all experts of a rank in one module.
            module = f"{expert[1]}.{expert[3]}"
            weight = f"{module}.weight{expert[2]}"
        by_module.setdefault(module, []).append(adapter)
        by_weight[weight] = adapter
    for name, beside in by_module.items():
        _add_output(modules[name], beside)
    return by_weight


def _add_output(module: nn.Module, adapters: list[Adapter]) -> None:
    """Several adapters are those of the experts of one module, in order."""
    if compat.HAVE_TE:
        from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear

        if isinstance(module, TELayerNormColumnParallelLinear):
            # It norms its input itself; with this it gives the normed one beside its output.
            setattr(module, "return_layernorm_output", True)  # noqa: B010  (torch types attributes of modules as tensors)

    def add(module: nn.Module, inputs: tuple[Tensor, ...], result: tuple[Tensor | tuple[Tensor, Tensor], Tensor | None]) -> object:
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


def _replica_id(factor: Factor) -> tuple[int, int, int]:
    if factor.is_expert:
        rank, replica = parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_data_parallel_rank()
    else:
        rank, replica = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return 0, 0 if factor.is_cut else rank, replica


# As Megatron-Bridge has them.
_INITS: Mapping[str, Callable[[Tensor, torch.Generator], object]] = {
    "xavier": lambda tensor, generator: nn.init.xavier_normal_(tensor, generator=generator),
    "normal": lambda tensor, generator: nn.init.normal_(tensor, 0.0, 0.2, generator=generator),
    "kaiming": lambda tensor, generator: nn.init.kaiming_uniform_(tensor, math.sqrt(5), generator=generator),
    "zero": lambda tensor, generator: nn.init.zeros_(tensor),
}


def _initialise(
    tensors: Mapping[Slot, Tensor], layout: Layout, shapes: Mapping[str, tuple[int, ...]], settings: PeftConfig, seed: int
) -> None:
    """Draws each canonical factor whole, from the seed and its name, and takes this rank's part."""
    inits = {"A": _INITS[settings.lora_A_init_method], "B": _INITS[settings.lora_B_init_method]}
    for slot, tensor in tensors.items():
        for piece in layout[slot].pieces:
            whole = torch.empty(shapes[piece.name])
            key = hashlib.sha256(f"{seed}/{piece.name}".encode()).digest()[:8]
            init = inits[piece.name.removesuffix(".weight")[-1]]
            init(whole, torch.Generator().manual_seed(int.from_bytes(key, "big", signed=True)))
            box_view(tensor, piece.local).copy_(box_view(whole, piece.box))
