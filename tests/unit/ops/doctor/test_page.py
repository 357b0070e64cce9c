# SPDX-License-Identifier: Apache-2.0
"""Findings of the doctor about hosts with these troubles are those that docs/troubleshooting.md quotes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mrl.ops.doctor.gpus import CudaProbe, HostGpu
from mrl.ops.doctor.host import judge_machine
from mrl.ops.doctor.probe import Apex, Disk, HostFacts, Limit
from mrl.ops.doctor.software import Wanted, judge_software
from tests.unit.ops.doctor.conftest import change
from tests.unit.test_troubleshooting import assert_quoted


@pytest.mark.parametrize(
    ("part", "values", "quoted"),
    [
        ("", {"python": "3.10.1"}, "…, but mrl needs …"),
        (
            "",
            {"apex": Apex("/env/apex", False)},
            "… is not NVIDIA's Apex, but megatron-core takes it for that and fails",
        ),
        (
            "",
            {"build_tags": {"torchvision": "cpu"}},
            "… from another build than torch's (…): vllm and transformers fail to import",
        ),
        (
            "",
            {"packages": {"torch": "2.13.0", "ray": "2.60.1"}, "build_tags": {}},
            "… packages are those of …; others: …",
        ),
        (
            "",
            {"shared_memory": Disk("/dev/shm", 2**26, 2**26, True)},
            "/dev/shm: … of … GiB free…, at least … GiB are needed",
        ),
        (
            "",
            {"limits": dict.fromkeys(("nofile", "nproc", "memlock"), Limit(1024, 1024))},
            "open files: at most …; … are needed",
        ),
        ("gpus", {"probe": CudaProbe("torch.cuda.is_available() is False")}, "torch.cuda.is_available() is False"),
        ("gpus", {"probe": CudaProbe("", 2)}, "torch sees … of the … GPUs"),
        ("gpus.driver", {"cuda": (12, 4)}, "…, for CUDA up to …, but torch is built for CUDA …"),
        ("gpus.driver", {"gpus": (HostGpu("H100", 2**36, 2**35),) * 8}, "in use before the run: …"),
        ("network", {"address": "127.0.1.1"}, "the host's name stands for …; Gloo would offer that to other nodes"),
        ("network", {"socket_ifname": "bond0"}, "NCCL_SOCKET_IFNAME=… leaves none of the interfaces …"),
        (
            "network",
            {"fabric": "efa", "num_rdma_devices": 0},
            "FI_PROVIDER=efa, but there is no device in /dev/infiniband",
        ),
        ("ports", {"taken": ("PORT",)}, "taken on this host: …"),
    ],
)
def test_findings_are_as_quoted(part: str, values: dict[str, object], quoted: str, gpu_host: HostFacts, wanted: Wanted):
    facts = change(gpu_host, part, **values) if part else replace(gpu_host, **values)
    findings = [*judge_software(facts, wanted), *judge_machine(facts, is_in_cluster=True)]
    assert_quoted(quoted, "\n".join(finding.found for finding in findings if finding.status != "ok"))
