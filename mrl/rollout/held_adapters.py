# SPDX-License-Identifier: Apache-2.0
"""Adapters (LoRA) that an engine holds beside its weights: one, by which all requests are computed.

vLLM makes the room and computes with it; refits write into it, as into weights. vLLM's own loader of adapters takes no
part, as it would read each from a file.
"""

from __future__ import annotations

from torch import Tensor, nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.request import LoRARequest
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from conversion.boxes import Slot

_ID = 1


def adapter_request() -> LoRARequest:
    """The adapter as a request names it. There is no file: the adapter is there already."""
    return LoRARequest("policy", _ID, "refits")


def hold_adapter(runner: GPUModelRunner) -> None:
    """Registers the adapter, with zeros, for good. The only one, it keeps its place."""
    manager = runner.lora_manager
    manager.add_dummy_lora(adapter_request(), rank=1)
    # Makes it active, too: it moves to its place once, and is never written there again but by refits.
    manager.pin_adapter(_ID)


def adapter_tensors(model: nn.Module) -> dict[Slot, Tensor]:
    """The live factors, two-dimensional, by the names of `conversion.adapters.engine_adapter_family`."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, BaseLayerWithLoRA):
            for letter, stacked in (("a", module.lora_a_stacked), ("b", module.lora_b_stacked)):
                for index, factors in enumerate(stacked):
                    found[Slot(f"{name}.lora_{letter}.{index}")] = factors[0, 0]
    return found


def weight_name(name: str) -> str:
    """The name of a weight without vLLM's wrapper of adapted layers."""
    return name.replace(".base_layer.", ".")
