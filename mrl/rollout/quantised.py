# SPDX-License-Identifier: Apache-2.0
"""Layers whose weights vLLM quantises as it loads them, and its own code that does so, for refits."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from conversion.boxes import Slot
from mrl.refit.staging import Quantiser

_ONLINE = "vllm.model_executor.layers.quantization.online.fp8"
_KERNELS = {"fp8_linear", "kernel"}
"""Attributes of vLLM's methods that hold the kernel of a linear layer, which packs weights."""
_AFTER_THE_RECORD = "bias"
"""Parameter that vLLM's linear layers get after it has recorded what they load."""
_DONE = "_already_called_process_weights_after_loading"


def quantisers(models: Sequence[nn.Module]) -> list[Quantiser]:
    """The layers that vLLM has quantised online, in the order in which it built them."""
    if _ONLINE not in sys.modules:
        return []  # vLLM imports it with the first such layer; it asks for kernels that not every build has
    from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
    from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase

    return [
        _quantiser(prefix, layer, names)
        for model in models
        for names in [dict(model.named_parameters())]
        for prefix, layer in model.named_modules()
        if isinstance(getattr(layer, "quant_method", None), (OnlineLinearBase, OnlineMoEMethodBase))
    ]


def _quantiser(prefix: str, layer: nn.Module, names: Mapping[str, object]) -> Quantiser:
    live = dict(layer.named_parameters(recurse=False))
    # As vLLM recorded them before it read a file.
    as_loaded = get_layerwise_info(layer).restore_metadata[0]
    loaded = {name: tensor for name, tensor in as_loaded.items() if live[name].dtype != tensor.dtype}
    # A parameter that it shares has its name elsewhere; a bias is loaded as it is.
    own = [
        name
        for name in live
        if f"{prefix}.{name}" in names and (name in loaded or name not in (*as_loaded, _AFTER_THE_RECORD))
    ]
    made = [Slot(f"{prefix}.{name}") for name in own]

    def make(weights: Mapping[Slot, Tensor]) -> dict[Slot, Tensor]:
        given = {name: weights[Slot(f"{prefix}.{name}")] for name in loaded}
        kept = {name: live[name] for name in live if name not in own}
        parameters = processed(layer, given, kept)
        return {Slot(f"{prefix}.{name}"): parameters[name] for name in own}

    return Quantiser({Slot(f"{prefix}.{name}"): tensor for name, tensor in loaded.items()}, made, make)


def processed(layer: nn.Module, weights: Mapping[str, Tensor], kept: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Parameters that vLLM makes of a layer's weights: quantised, and laid out for its kernel.

    A shadow of the layer goes through vLLM's own processing, which changes its kernel, too. The layer, whose addresses
    CUDA graphs hold, stays as it is.
    """
    shadow, method = copy.copy(layer), copy.copy(layer.quant_method)
    own = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in weights.items()}
    vars(shadow).update(_parameters={**kept, **own}, _buffers=dict(layer._buffers), _modules=dict(layer._modules))
    vars(shadow).pop(_DONE, None)
    vars(shadow)["quant_method"] = method
    for name in _KERNELS & vars(method).keys():
        vars(method)[name] = copy.copy(vars(method)[name])
    process: Callable[[nn.Module], None] = getattr(method, "process_weights_after_loading")  # noqa: B009  (of vLLM's methods)
    process(shadow)
    return {name: parameter.data for name, parameter in shadow.named_parameters(recurse=False)}
