# SPDX-License-Identifier: Apache-2.0
"""Number of tries to start Ray, in a thread that may hang."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from mrl.cluster import runtime
from mrl.cluster.errors import NoCluster
from mrl.config.load import load_config
from tests.waiting import HANG_S

SHARE_S = 0.5


@pytest.mark.parametrize("num_hanging", [1, 3])
def test_a_start_that_hangs_leaves_time_for_the_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, num_hanging: int
):
    """A start of Ray that waits for a daemon goes on when that has been killed."""
    killed, calls = threading.Semaphore(0), list[str]()

    def start(**_: object) -> None:
        calls.append("init")
        if calls.count("init") <= num_hanging:
            killed.acquire(timeout=HANG_S)
            raise ConnectionError("the daemon died")

    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr(runtime, "kill_processes", lambda _: killed.release())
    monkeypatch.setattr(
        runtime, "STARTS", (SHARE_S / HANG_S, SHARE_S / HANG_S, SHARE_S / HANG_S if num_hanging == 3 else 1.0)
    )
    monkeypatch.setattr(runtime, "start_deadline", lambda _: SimpleNamespace(seconds=HANG_S))
    for name in runtime.RAY_LIMITS:
        monkeypatch.setenv(name, "1")
    config = load_config("grpo_tiny.yaml")
    if num_hanging == 3:
        with pytest.raises(
            NoCluster, match=r"tried 3 times: TimeoutError: ray.init: no answer within 0.5 s; this host has .* cores"
        ):
            runtime.start_ray(config, tmp_path)
    else:
        runtime.start_ray(config, tmp_path)
        assert calls[:3] == ["init", "shutdown", "init"]
    assert re.search(r"Ray has not started \(.*\); this host has .* cores.*; trying again", caplog.text)
