# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from mrl.cluster import hosts
from mrl.cluster.hosts import GIB, HostSampler, sample_until
from tests.waiting import HANG_S, Clock, wait_until


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
    wait_until(lambda: sum(range(100_000)) and sampler.sample()["cpu_util"] > 0, "processor at work")


def test_samples_are_taken_and_delivered_at_their_intervals(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hosts, "time", clock := Clock())
    start, taken, delivered = clock.now, list[float](), list[tuple[float, float, float]]()

    class Ending(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            clock.sleep(0.0 if self.is_set() else timeout or 0.0)
            return self.is_set()

    has_ended = Ending()

    def sample(timeout_s: float) -> dict[str, float]:
        taken.append(clock.now - start)
        if len(taken) == 5:
            has_ended.set()
        return {"count": float(len(taken))} if len(taken) != 2 else {}

    def log(metrics: Mapping[str, float], sampled_at: float) -> None:
        delivered.append((metrics["count"], sampled_at - clock.time() + clock.now - start, clock.now - start))

    sample_until(has_ended, sample, log, 5.0, 12.0)
    assert taken == [5.0, 10.0, 15.0, 20.0, 25.0]
    # A node that gave nothing is left out. The first delivery waits for the third sample; the last samples come at the
    # end.
    assert delivered == [(1.0, 5.0, 15.0), (3.0, 15.0, 15.0), (4.0, 20.0, 25.0), (5.0, 25.0, 25.0)]
