# SPDX-License-Identifier: Apache-2.0
"""Imports megatron-core without the optional libraries that a policy rank waits for and never calls."""

from __future__ import annotations

import importlib
import sys
import types
from unittest.mock import patch

import torch

from mrl.gpus import on_gpu, require_cuda

# Megatron defines the Triton kernels of its own inference while it imports these.
WITH_KERNELS = ("megatron.core", "megatron.core.ssm.mamba_mixer")


class _Unused(types.ModuleType):
    """Stand-in for a module that is not installed. Functions can be decorated with its names, and are never called."""

    def __init__(self, name: str, **values: object) -> None:
        super().__init__(name)
        vars(self).update(values)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return as_it_is


def as_it_is(function: object = None, *_: object, **__: object) -> object:
    """A decorator, with or without arguments, that changes nothing."""
    return function if callable(function) else as_it_is


def import_megatron(device_index: int = 0) -> None:
    """Imports megatron.core, once per process, on this GPU if any. Call it before anything else imports Megatron parts.

    Transformer Engine opens a context on the current GPU while it is imported, where flash-attn is installed: a few
    hundred megabytes.

    Megatron 0.16.1 imports wandb, for its inference contexts, and all of torch._inductor, because it decorates small
    fusions with `torch.compile`: 4 of the 6 CPU seconds of its import. No rank uses wandb. Hosts without CUDA neither
    compile nor run Triton kernels.
    """
    if "megatron.core" in sys.modules:
        return
    if on_gpu():
        require_cuda()
        torch.cuda.set_device(device_index)
    compiler = torch.compile
    instead: dict[str, types.ModuleType | None] = {"wandb": None}
    if not on_gpu():
        compiler = as_it_is
        language = _Unused("triton.language")
        instead |= {"triton": _Unused("triton", __version__="0", language=language), "triton.language": language}
    instead = {name: module for name, module in instead.items() if name not in sys.modules}
    with patch.object(torch, "compile", compiler):
        sys.modules.update(instead)  # type: ignore[arg-type]  # None refuses the import of that name
        try:
            for name in WITH_KERNELS:
                importlib.import_module(name)
        finally:
            for name in instead:
                del sys.modules[name]
