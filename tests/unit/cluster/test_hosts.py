# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from mrl.cluster.hosts import GIB, HostSampler, sample_until
from tests.waiting import HANG_S


def test_memory_is_what_the_kernel_says():
    sample = HostSampler(is_actor=False).sample()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines()}
    assert abs(sample["mem_total_gb"] - kib["MemTotal"] / 2**20) < 1e-3
    assert 0 < sample["mem_gb"] < sample["mem_total_gb"]
    assert 0 <= sample["cpu_util"] <= 100 and sample["shm_gb"] >= 0


def test_the_memory_of_children_counts():
    sampler = HostSampler(is_actor=False)
    before = sampler.sample()["rss_gb"]
    script = "import sys; text = b'x' * (200 << 20); print('ready', flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        assert sampler.sample()["rss_gb"] - before > 0.9 * (200 << 20) / GIB
    finally:
        child.communicate(timeout=HANG_S)


def test_processors_at_work_show():
    sampler = HostSampler(is_actor=False)
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        sum(range(1000))
    assert sampler.sample()["cpu_util"] > 0


class Deliveries:
    """Keeps what it gets, and when."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []

    def __call__(self, metrics: Mapping[str, float], sampled_at: float) -> None:
        self.found.append((metrics["count"], time.monotonic()))


def test_samples_are_taken_and_delivered_at_their_intervals():
    log, has_ended, taken = Deliveries(), threading.Event(), []

    def sample(timeout_s: float) -> dict[str, float]:
        taken.append(time.monotonic())
        if len(taken) == 5:
            has_ended.set()
        return {"count": float(len(taken))} if len(taken) != 2 else {}

    sample_until(has_ended, sample, log, 0.05, 0.12)
    # A node that gave nothing is left out; the last samples come at the end.
    assert [count for count, _ in log.found] == [1, 3, 4, 5]
    assert min(later - earlier for earlier, later in zip(taken, taken[1:], strict=False)) >= 0.05
    # The first delivery waits for the third sample.
    assert min(at for _, at in log.found) >= taken[2]
