"""Refits of a dedicated engine by the run's own driver: it has a unit of its own, sits in the exchange, and may die."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import ray

from conversion.boxes import Slot
from mrl.cluster.session import placed_units, start_models
from mrl.config.load import load_config
from tests.stack.loop.conftest import SMALL, write_inputs

DEADLINE_S = 120.0


def scale_weights(policy) -> None:
    """Other weights, the same on every replica."""
    for tensor in policy._tensors.values():
        tensor.data.mul_(1.25)


@pytest.mark.timeout(280)
def test_a_dedicated_engine_is_refitted_and_comes_back(tmp_path: Path):
    overrides = [
        *write_inputs(tmp_path, num_rows=8),
        *SMALL,
        "cluster.cpu_units_per_node=2",
        "policy.generation.colocated.enabled=false",
        "policy.refit_buffer_size_gb=0.0005",  # several rounds
    ]
    config = load_config("grpo_tiny.yaml", overrides)
    with placed_units(config) as placement:
        policies, engines, refit = start_models(config, placement, pad_token_id=256, log_folder=tmp_path / "logs")
        assert [engine.units for engine in placement.engines] == [(2,)]
        assert refit.schedule.num_rounds > 1 and refit.schedule.link_bytes()["unit"] == 0
        zero = refit.zero()
        assert zero.weight_version == 1 and zero.verified_bytes == refit.schedule.copied_bytes(2)

        def digest() -> dict[Slot, int]:
            return cast(dict[int, list[dict[Slot, int]]], engines.call("live_digest", deadline_s=DEADLINE_S))[0][0]

        loaded = digest()
        policies.apply(scale_weights, deadline_s=DEADLINE_S)
        report = refit.run()
        changed = digest()
        assert report.verified_bytes + report.padding_bytes == zero.verified_bytes + zero.padding_bytes
        # Only tensors of zeros look as before.
        assert sum(changed[slot] != loaded[slot] for slot in loaded) > len(loaded) // 2

        # A new engine holds what vLLM has loaded again, in a group that its predecessor has left.
        ray.kill(engines.actors[0])
        refit.run()
        assert engines.num_restarts == 1
        assert digest() == changed
