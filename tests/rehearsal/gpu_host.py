# SPDX-License-Identifier: Apache-2.0
"""A process that takes itself for any rank of a GPU run: real Megatron and Transformer Engine, without memory or peers.

Tensors of weights are on the meta device, and process groups are torch's fake ones, whose collectives return at once
and move nothing. Of Transformer Engine the Python is real; its C extension is not there, and says nothing. A process of
its own: nothing is put back.
"""

from __future__ import annotations

import enum
import importlib.metadata
import os
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.waiting import HANG_S

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer import MegatronOptimizer

    from conversion.boxes import Layout, Slot
    from conversion.families.common import HfConfig
    from mrl.config.schema.policy import PolicyConfig

# Enumerations of the C extension, which Transformer Engine compares with its own while it is imported.
ENUMERATIONS = {
    "DType": (0, "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1"),
    "NVTE_Fused_Attn_Backend": (-1, "NVTE_No_Backend NVTE_F16_arbitrary_seqlen NVTE_FP8"),
}


class _Absent(ModuleType):
    """A compiled module in whose place nothing is: its names can be imported."""

    __all__: list[str] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


def import_transformer_engine(folder: Path) -> None:
    """Imports the Python of Transformer Engine from its unpacked wheel, without libraries of CUDA."""
    sys.path.insert(0, str(folder))
    # Its own switch for hosts without them.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    compiled = _Absent("transformer_engine_torch")
    for name, (start, members) in ENUMERATIONS.items():
        setattr(compiled, name, enum.IntEnum(name, members.split(), start=start))
    # Export to ONNX, whose libraries a run does not need.
    for module in (compiled, _Absent("transformer_engine.pytorch.onnx_extensions")):
        sys.modules[module.__name__] = module
    # The package's own __init__ loads the C extension before its loader can be replaced.
    package = sys.modules["transformer_engine"] = ModuleType("transformer_engine")
    package.__path__ = [str(folder / "transformer_engine")]
    setattr(package, "__version__", importlib.metadata.version("transformer_engine"))  # noqa: B010  not a name of modules for pyright
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda framework: None
    import transformer_engine.pytorch  # noqa: F401


def become_gpu_host(transformer_engine: Path) -> None:
    """From here on torch has a GPU, and Megatron finds Transformer Engine. Before anything imports Megatron."""
    import_transformer_engine(transformer_engine)
    from mrl import env
    from mrl.policy import cpu
    from mrl.policy.megatron_import import import_megatron

    import_megatron()
    os.environ[env.MRL_DEVICE.name] = "cuda"
    # Kernels of Mamba and of gated delta nets, which none of the host's libraries has, are the only parts of a CPU host
    # that a GPU host would not have.
    for name, value in (
        cpu._cpu_for_cuda() | cpu._random_states() | cpu._mamba_kernels() | cpu._delta_kernels()
    ).items():
        _replace(name, value)
    type_on_cuda = torch.Tensor.type

    def type_of(tensor: Tensor, *args: object, **kwargs: object) -> str | Tensor:
        found = type_on_cuda(tensor, *args, **kwargs)  # pyright: ignore[reportCallIssue, reportArgumentType]
        return found.replace(".meta", "") if isinstance(found, str) else found

    start = dist.init_process_group

    def start_fake(backend: str, *, rank: int, world_size: int, **_: object) -> None:
        start("fake", store=FakeStore(), rank=rank, world_size=world_size)

    from mrl.policy import fusions

    values = {
        "torch.Tensor.type": type_of,
        "torch.cuda.is_available": lambda: True,  # mrl.gpus.require_cuda
        "torch.cuda.set_device": lambda *_: None,
        "torch.distributed.init_process_group": start_fake,
    }
    for name, value in values.items():
        _replace(name, value)
    # Kernels that a probe would call; one is Apex's.
    fusions._works = lambda key, fault_of, *, is_default: fault_of is not fusions._weight_gradient_fault
    cpu.install = lambda: None


def put_memory_on(device: str) -> None:
    """From here on the GPU's memory is that of `device`."""
    _replace("torch.cuda.current_device", lambda: device)
    _replace("mrl.policy.cpu.CPU", torch.device(device))  # of tensors that are asked for on "cuda"


def _replace(name: str, value: object) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(pkgutil.resolve_name(owner), attribute, value)


class Rank:
    """Parts one rank builds: its chunks in DDP, their rules in the conversion table, weights by slot, optimizer."""

    def __init__(self, config: PolicyConfig, hf_config: HfConfig, device: str) -> None:
        from megatron.core.utils import unwrap_model

        from mrl.policy import parallel
        from mrl.policy.model import FLAVOUR, build_model, live_layout, wrap_ddp
        from mrl.policy.optimizer import build_optimizer
        from mrl.policy.weights import rank_tensors

        assert FLAVOUR == "te"
        # A run decides what auto is.
        config = replace(config, share_prefixes=config.share_prefixes is True)
        self.coords = parallel.coordinates()
        self.layout: Layout = live_layout(config, hf_config, self.coords)
        with torch.device(device):
            self.chunks: list[DistributedDataParallel] = wrap_ddp(build_model(config, hf_config), config)
        # Raises where a name, a shape or a dtype differs from the table.
        self.tensors: Mapping[Slot, Tensor] = rank_tensors(unwrap_model(self.chunks), self.layout)
        self.optimizer: MegatronOptimizer = build_optimizer(self.chunks, config.megatron_cfg)


@contextmanager
def as_rank(config: PolicyConfig, rank: int, world_size: int) -> Iterator[None]:
    """Megatron's groups of one rank of `world_size`, inside the `with` block."""
    from mrl.policy import parallel

    parallel.initialize(
        config.megatron_cfg, rank=rank, world_size=world_size, meeting=parallel.Meeting("", 0), timeout_s=HANG_S, seed=1
    )
    try:
        yield
    finally:
        parallel.shutdown()
