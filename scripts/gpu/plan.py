# SPDX-License-Identifier: Apache-2.0
"""The checks by tier, and what they share. Imports nothing that a bare machine lacks."""

from __future__ import annotations

import importlib
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from tests.long.record import Row


class Missed(Exception):
    """A bound does not hold. The rows were measured."""

    def __init__(self, message: str, rows: list[Row]) -> None:
        super().__init__(message)
        self.rows = rows


@dataclass(frozen=True)
class Setup:
    """Size and place of a check."""

    device: str
    gigabytes: float
    """Gigabytes of weights, where a check moves weights."""
    model: Path | None = None
    """A Hugging Face folder, for checks with an engine."""


@dataclass(frozen=True)
class Check:
    """One check. Its rows go to docs/data/gpu_NAME.json."""

    name: str
    tier: Literal["a", "b"]
    """a: torch and Triton, with megatron-core and safetensors on the path; b: an installation with mrl[gpu]."""
    function: str
    """`module:function`, which takes a `Setup` and returns rows."""
    libraries: tuple[str, ...] = ()
    """Without one of these the check is left out."""

    def run(self, setup: Setup) -> list[Row]:
        """The rows.

        Raises:
            Missed: a bound does not hold.
        """
        module, _, name = self.function.partition(":")
        function: Callable[[Setup], list[Row]] = getattr(importlib.import_module(module), name)
        return function(setup)

    @property
    def missing(self) -> list[str]:
        """Libraries that this Python lacks."""
        return [name for name in self.libraries if importlib.util.find_spec(name) is None]


CHECKS = (
    Check("ipc", "a", "scripts.gpu.refit_checks:ipc", ("pytest",)),
    Check("kernels", "a", "scripts.gpu.refit_checks:kernels"),
    Check("moving", "a", "scripts.gpu.refit_checks:moving"),
    Check("refit", "a", "scripts.gpu.refit_checks:refit"),
    Check("policy", "a", "scripts.gpu.policy_checks:gradients", ("megatron", "safetensors", "einops")),
    Check("walk", "a", "scripts.gpu.policy_checks:walk", ("megatron", "safetensors", "einops")),
    Check("mamba", "a", "scripts.gpu.policy_checks:mamba", ("mamba_ssm", "causal_conv1d", "einops")),
    Check("doctor", "b", "scripts.gpu.engine_checks:doctor", ("vllm", "ray", "megatron")),
    Check("sleep", "b", "scripts.gpu.engine_checks:sleep", ("vllm",)),
    Check("fp8", "b", "scripts.gpu.engine_checks:fp8", ("vllm", "ray", "megatron")),
    Check(
        "train",
        "b",
        "scripts.gpu.policy_checks:train",
        ("megatron", "safetensors", "transformer_engine", "mamba_ssm", "causal_conv1d"),
    ),
    Check("prefix", "b", "scripts.gpu.prefix_checks:prefix", ("megatron", "safetensors", "pydantic")),
)
"""The docstring of its function, and docs/gpu_status.md, say what a check shows."""


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """These environment variables, inside the `with` block."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def gpu_columns() -> Row:
    """Columns of a row about the GPU and the software."""
    return {"GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none", "torch": torch.__version__}


def seconds(device: str, function: Callable[[], object], *, repeats: int = 5) -> float:
    """Median seconds of a call, everything that it queues included; the first call is left out."""
    return statistics.median([elapsed(device, function) for _ in range(repeats + 1)][1:])


def elapsed(device: str, function: Callable[[], object]) -> float:
    """Seconds of one call, everything that it queues included."""
    _wait(device)
    start = time.perf_counter()
    function()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
