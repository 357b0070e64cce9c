# SPDX-License-Identifier: Apache-2.0
"""Adapters (LoRA) that an engine holds beside its weights: one, by which all requests are computed.

vLLM makes the room and computes with it; refits write into it, as into weights. vLLM's own loader of adapters takes no
part, as it would read each from a file.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.fused_moe.experts.trtllm_lora_moe import TrtLlmBf16LoRAExperts
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from conversion.boxes import Slot
from mrl.config.schema.generation import VllmConfig

_ID = 1
_SHUFFLED = 128
"""FlashInfer's experts have rows in multiples of this."""


def experts_are_shuffled_here() -> bool:
    """Tells whether vLLM has FlashInfer compute the experts of a model with adapters, as on Blackwell GPUs."""
    return TrtLlmBf16LoRAExperts._supports_current_device()


def check_experts(hf_config: Mapping[str, object], config: VllmConfig) -> None:
    """Raises ValueError if FlashInfer would take the experts, in whose order of weights no refit can write.

    vLLM 0.32 chooses so in `select_unquantized_moe_backend` wherever there is room for adapters, of any layer: it does
    not look at `moe_backend` then.
    """
    size, tp = hf_config.get("moe_intermediate_size"), config.tensor_parallel_size
    if not isinstance(size, int):
        return
    if config.expert_parallel_size == 1:
        size //= tp
    if size % _SHUFFLED == 0:
        raise ValueError(
            "policy.megatron_cfg.peft.merge=false: on this GPU vLLM computes the experts of a model with adapters by "
            f"FlashInfer, with their weights in an order that no refit can write ({size} of moe_intermediate_size on "
            f"each worker, a multiple of {_SHUFFLED}); set it to true"
        )


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
