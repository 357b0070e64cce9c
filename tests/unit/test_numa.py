# SPDX-License-Identifier: Apache-2.0
"""Processes are bound to the NUMA node of their GPU, as sysfs says it, and to nothing where it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mrl import numa
from mrl.numa import NumaNode, bind, gpu_nodes, node_of_device, parse_cpus
from tests.sources import ROOT
from tests.waiting import HANG_S


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two sockets with a GPU each, and a GPU that the firmware has given no node."""
    for number, cpus in enumerate(("0-1,4\n", "2-3,5-6\n")):
        (tmp_path / f"devices/system/node/node{number}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{number}/cpulist").write_text(cpus)
    for bus_id, node in (("0000:3b:00.0", 0), ("0000:d8:00.0", 1), ("0001:5e:00.0", -1)):
        (tmp_path / "bus/pci/devices" / bus_id).mkdir(parents=True)
        (tmp_path / "bus/pci/devices" / bus_id / "numa_node").write_text(f"{node}\n")
    return tmp_path


def test_a_device_is_on_the_node_that_sysfs_says(sysfs: Path):
    assert node_of_device("00000000:3B:00.0", sysfs) == NumaNode(0, frozenset({0, 1, 4}))
    assert node_of_device("00000000:D8:00.0", sysfs) == NumaNode(1, frozenset({2, 3, 5, 6}))
    assert node_of_device("00000001:5E:00.0", sysfs) is None, "the firmware does not say"
    assert node_of_device("00000000:FF:00.0", sysfs) is None, "no such device"
    assert parse_cpus("") == frozenset() and parse_cpus("7\n") == {7}
    (sysfs / "devices/system/node/node1/cpulist").unlink()
    (sysfs / "devices/system/node/node1").rmdir()
    assert node_of_device("00000000:3B:00.0", sysfs) is None, "one node: there is nothing to choose"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("", [0, 1]), ("1,0", [1, 0]), ("GPU-b, GPU-a", [1, 0]), ("0", [None, None])],
    ids=["all", "turned", "uuid", "few"],
)
def test_gpus_are_counted_as_cuda_counts_them(
    sysfs: Path, monkeypatch: pytest.MonkeyPatch, visible: str, expected: list[int | None]
):
    """Stands in for NVML, which counts all GPUs of the host."""
    ids = {0: "00000000:3B:00.0", 1: "00000000:D8:00.0", "GPU-a": "00000000:3B:00.0", "GPU-b": "00000000:D8:00.0"}
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        NVMLError=OSError,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda name: name,
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=ids[handle].encode()),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [node and node.number for node in gpu_nodes([0, 1], sysfs)] == expected


BIND = """
import json, os, threading
from mrl.numa import NumaNode, bind
idle = threading.Event()
thread = threading.Thread(target=idle.wait)
thread.start()
mine = sorted(os.sched_getaffinity(0))
nodes = [NumaNode(0, frozenset(mine[:1])), NumaNode(1, frozenset(mine[1:]))]
said = [bind([None]), bind([nodes[0], None]), bind([NumaNode(9, frozenset({10**4}))])]
before = sorted(os.sched_getaffinity(thread.native_id))
said.append(bind(nodes))
both = sorted(os.sched_getaffinity(0))
said.append(bind(nodes[:1]))
after = [sorted(os.sched_getaffinity(pid)) for pid in (0, thread.native_id)]
print(json.dumps([mine, before, both, *after, said]))
idle.set()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a process with one CPU has nothing to choose")
def test_a_process_and_its_threads_stay_on_their_node():
    done = subprocess.run([sys.executable, "-c", BIND], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    mine, before, both, bound, of_thread, said = json.loads(done.stdout)
    assert before == both == mine and bound == of_thread == mine[:1]
    assert [text.partition(":")[0] for text in said] == [
        "not bound to a NUMA node", "not bound to a NUMA node", "not bound to NUMA node 9",
        "bound to NUMA node 0 and 1",
        "bound to NUMA node 0",
    ]  # fmt: skip


def test_the_kernel_takes_the_memory_policy():
    """Asks the kernel itself, get_mempolicy(2); containers may forbid both calls."""
    code = """
import ctypes, platform
from mrl.numa import _prefer
said = _prefer(0)
mode, mask = ctypes.c_int(-1), ctypes.c_ulong(0)
number = {"x86_64": 239, "aarch64": 236}[platform.machine()]
failed = ctypes.CDLL(None).syscall(number, ctypes.byref(mode), ctypes.byref(mask), 65, None, 0)
print(said == "and its memory", failed, mode.value, mask.value)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() in (["True", "0", "1", "1"], ["False", "-1", "-1", "0"], ["False", "0", "0", "0"]), (
        done.stdout
    )


def test_no_gpu_no_binding(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_nodes([0, 1]) == [None, None] and bind([None]).startswith("not bound")
    assert numa.SYSFS == Path("/sys")
