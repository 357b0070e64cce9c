# SPDX-License-Identifier: Apache-2.0
"""The model of a refit's time, by a case worked out by hand, and what a plan counts of a schedule."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.plan.facts import read_model
from mrl.plan.hardware import Gpu
from mrl.plan.times import CALL, LAUNCH, WAIT, refit_times
from mrl.plan.traffic import RefitTraffic, plan_refit
from tests.sources import ROOT

GPU = Gpu("round", memory_gib=80.0, bandwidth=3e12, peak=1e15, link=400e9, network=50e9)


def test_a_refit_of_four_rounds_by_hand():
    refit = RefitTraffic(
        {"gpu": 0, "node": 0, "network": 0}, 4, {"gpu": 0, "node": 8 * 10**9, "network": 2 * 10**9}, most_messages=10
    )
    found = refit_times(refit, GPU, engine_weights=6e9, num_calls=300, network=(0.8, 0.4))
    low = {name: part.low for name, part in found.parts.items()}
    # 2 GB at 40 GB/s; 8 GB at 0.82 of 400 GB/s; 3 x 10 GB and 3 x 6 GB at 0.8 of 3 TB/s.
    assert low["network"] == pytest.approx(0.05)
    assert low["node"] == pytest.approx(8 / 328)
    assert (low["packing"], low["pull and verify"]) == pytest.approx((0.0125, 0.0075))
    # Two kernels a message and one a round, two waits a round; three of each in the engine.
    assert low["exchange host"] == pytest.approx(24 * LAUNCH.low + 8 * WAIT.low)
    assert low["pull host"] == pytest.approx(12 * LAUNCH.low + 12 * WAIT.low)
    assert low["driver"] == pytest.approx(300 * CALL.low)
    sent = low["network"] + low["node"] + low["packing"] + low["exchange host"]
    pulled = low["pull and verify"] + low["pull host"]
    assert found.serial.low == pytest.approx(sent + pulled + low["driver"])
    assert found.overlapped.low == pytest.approx(sent + pulled / 4 + low["driver"])
    assert found.serial.high > found.overlapped.high > found.overlapped.low


def test_the_busiest_gpu_has_at_least_the_mean_of_each_link(tmp_path: Path):
    shutil.copy(ROOT / "scripts/bench/models/nemotron3_nano_30b_a3b.config.json", tmp_path / "config.json")
    config = load_config("grpo_nanov3.yaml", [f"policy.model_name={tmp_path}", "cluster.num_nodes=4"])
    refit = plan_refit(config, read_model(config))
    for link, total in refit.link_bytes.items():
        assert total / config.num_slots <= refit.busiest[link] < 2 * total / config.num_slots
    assert refit.most_messages > refit.num_rounds
