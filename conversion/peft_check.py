# SPDX-License-Identifier: Apache-2.0
"""Check of exported adapters by the library PEFT, which loads them into a model without weights. Imported only where
PEFT is installed.
"""

from __future__ import annotations

import importlib.metadata
import math
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor
from torch.nn import Parameter
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from conversion.files.hf_folder import write_json
from conversion.texts import listed

# Of sums of squares in float32.
_TOLERANCE = 1e-3
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def check_applied(folder: Path, hf_config: Mapping[str, object], changes: Iterable[tuple[str, Tensor]]) -> None:
    """Raises ValueError unless PEFT changes the weights of a model as `changes` do: name and change of each, by
    canonical name.

    PEFT passes over some adapters without a word, and takes some for others. It and transformers hold the experts of a
    layer in one tensor, so what is compared is the sum of squares of all changes of a kind of weight in a layer.
    """
    expected, found = defaultdict[str, float](float), defaultdict[str, float](float)
    for name, change in changes:
        expected[_place(name.removesuffix(".weight"))] += _squares(change)
    version = importlib.metadata.version("peft")
    try:
        adapted = PeftModel.from_pretrained(_without_weights(hf_config), folder, torch_device="cpu")
        for name, module in adapted.named_modules():
            if isinstance(module, LoraLayer):
                change = module.get_delta_weight  # pyright: ignore[reportAttributeAccessIssue]  its subclasses have it
                for adapter in module.active_adapters:
                    found[_place(name)] += _squares(change(adapter))
    except (ValueError, RuntimeError, TypeError, KeyError, NotImplementedError) as error:
        raise _refusal(f"PEFT {version} does not load them: {error}") from error
    wrong = [
        place
        for place in sorted(expected | found)
        if not math.isclose(found[place], expected[place], rel_tol=_TOLERANCE)
    ]
    if wrong:
        raise _refusal(f"PEFT {version} passes over them, or takes them for others, in {listed(wrong)}")


def _without_weights(hf_config: Mapping[str, object]) -> PreTrainedModel:
    """The model of transformers with parameters that take no memory. Not on the meta device, to which PEFT would move
    adapters.
    """
    with tempfile.TemporaryDirectory() as folder:
        # auto_map names code that a folder brings along. Of a file, transformers also reads infinite numbers as it
        # writes them.
        write_json(Path(folder, "config.json"), {key: value for key, value in hf_config.items() if key != "auto_map"})
        config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, Parameter(torch.zeros(()).expand(parameter.shape), requires_grad=False))
    return model


def _refusal(reason: str) -> ValueError:
    return ValueError(
        f"the adapters of this checkpoint cannot be used with PEFT: {reason}. mcore-to-hf writes the model with "
        "them merged. For adapters alone, train with policy.megatron_cfg.peft.exclude_modules of these layers"
    )


def _place(name: str) -> str:
    layer = _LAYER.search(name)
    last = "experts" if ".experts" in name else name.rpartition(".")[2]
    return f"layers.{layer[1]}: {last}" if layer else name


def _squares(change: Tensor) -> float:
    return float(change.detach().double().square().sum())
