# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels that the installation of a GPU host may lack, what runs instead, and how to get them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from mrl.gpus import on_gpu

INSTALL = (
    "PYTHON=.venv/bin/python bash scripts/install_gpu.sh kernels, which needs nvcc of CUDA 13 (apt install "
    "cuda-toolkit-13-0 from NVIDIA's repository); or the image (docs/containers.md)"
)


@dataclass(frozen=True)
class Kernels:
    """A library of compiled kernels. It is built on the host where no wheel fits, which takes nvcc."""

    package: str
    module: str
    instead: str
    """Effect on a run without it."""
    only_for: str = ""
    """Letter of the layers that need it (`ModelSizes.layers`); "" = all models."""


KERNELS = (
    Kernels(
        "transformer-engine-torch",
        "transformer_engine",
        "attention and layers are torch's, and experts run one after another",
    ),
    Kernels("mamba-ssm", "mamba_ssm", "Mamba layers train in plain torch, many times slower", "M"),
    Kernels("causal-conv1d", "causal_conv1d", "Mamba layers train in plain torch, many times slower", "M"),
)


def is_installed(module: str) -> bool:
    """True if Python finds a module, without importing it."""
    return module in sys.modules or importlib.util.find_spec(module) is not None


def missing_kernels(layers: Collection[str] | None = None) -> list[Kernels]:
    """Kernels that this environment lacks for a model of these layers; None: for any model."""
    needed = [kernels for kernels in KERNELS if not kernels.only_for or layers is None or kernels.only_for in layers]
    return [kernels for kernels in needed if not is_installed(kernels.module)]


def describe_missing(missing: Sequence[Kernels]) -> str:
    """Names missing kernels, what runs instead, and the way to get them, or ""."""
    if not missing:
        return ""
    lines = [f"{kernels.package} is not installed: {kernels.instead}" for kernels in missing]
    return f"{'; '.join(lines)}; to get {'it' if len(missing) == 1 else 'them'}: {INSTALL}"


def find_muon_fault() -> str:
    """Reason why this installation cannot train with Muon; "" if it can."""
    if not is_installed("emerging_optimizers"):
        lacks = "NVIDIA's package emerging-optimizers is not installed"
    elif (found := version("megatron-core")).startswith("0.16."):
        lacks = f"megatron-core {found} names its arguments otherwise"
    else:
        return ""
    return (
        f"{lacks}: Muon needs it, and megatron-core 0.19 (Python 3.12 or 3.13); pip install emerging-optimizers on all "
        "nodes, or set optimizer=adam"
    )


def are_used(module: str, *, is_imported: bool) -> bool:
    """Decides whether this process computes with a library's kernels: on a GPU, wherever it is installed.

    `is_imported` tells whether Megatron could import it. RuntimeError: it is installed and cannot be imported, so that
    a run would be slow without a word.
    """
    if not on_gpu():
        return False
    if is_installed(module) and not is_imported:
        way_out = f"`python -c 'import {module}'` says why; repair or uninstall it"
        raise RuntimeError(f"{module} is installed, but cannot be imported: {way_out}")
    return is_imported
