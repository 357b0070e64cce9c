# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5's text models without torchvision, which vLLM's file imports for images, and CPU hosts do not have."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from unittest.mock import patch

from torch import nn
from transformers.utils import is_torchvision_available
from vllm.model_executor.models.registry import _LazyRegisteredModel, _ModelInfo

_FILE = "vllm.model_executor.models.qwen3_5"
_IMAGES = "torchvision.transforms.v2.functional"


def _lacks_images(model: _LazyRegisteredModel) -> bool:
    return model.module_name == _FILE and importlib.util.find_spec("torchvision") is None


def load_text_model(
    original: Callable[[_LazyRegisteredModel], type[nn.Module]],
) -> Callable[[_LazyRegisteredModel], type[nn.Module]]:
    """vLLM's import of a model's class; that of Qwen3.5 finds empty modules in torchvision's place meanwhile."""

    def load_model_cls(self: _LazyRegisteredModel) -> type[nn.Module]:
        if _FILE in sys.modules or not _lacks_images(self):
            return original(self)
        # transformers remembers the answer: torchvision is missing.
        is_torchvision_available()
        parts = _IMAGES.split(".")
        names = [".".join(parts[: length + 1]) for length in range(len(parts))]
        with patch.dict(sys.modules):
            before = set(sys.modules) | set(names)
            sys.modules.update({name: ModuleType(name) for name in names})
            found = original(self)
            imported = {name: module for name, module in sys.modules.items() if name not in before}
        sys.modules.update(imported)
        return found

    return load_model_cls


def inspect_text_model(
    original: Callable[[_LazyRegisteredModel], _ModelInfo],
) -> Callable[[_LazyRegisteredModel], _ModelInfo]:
    """vLLM's questions to a model's class; those to Qwen3.5's are asked here, not in a process without stand-ins."""

    def inspect_model_cls(self: _LazyRegisteredModel) -> _ModelInfo:
        return _ModelInfo.from_model_cls(self.load_model_cls()) if _lacks_images(self) else original(self)

    return inspect_model_cls
