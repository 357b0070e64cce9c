# SPDX-License-Identifier: Apache-2.0
"""Memory by phase: gradients and optimizer state leave when nobody trains, and training cannot tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrl.phases import PHASES
from tests.stack.policy import phase_ranks, policy_ranks
from tests.stack.policy.phase_ranks import Walk
from tests.stack.policy.policy_ranks import BF16
from tests.stack.ranks import RankPool

KL = "loss_fn.reference_policy_kl_penalty=0.05"
STAYING = "policy.generation.colocated.enabled=false"
LONG = pytest.mark.long("parity")


CASES = [
    ("one", (KL,)),
    ("tp2 sp dp2 ep2", BF16),
    pytest.param("tp2 sp dp2 ep2", (KL,), marks=LONG),
    pytest.param("pp2 dp2 ep2", BF16, marks=LONG),
    pytest.param("dp2", (*BF16, "policy.megatron_cfg.peft.enabled=true", "policy.megatron_cfg.peft.dim=4"), marks=LONG),
]


@pytest.mark.parametrize(("layout", "overrides"), CASES)
def test_training_through_the_phases_equals_training_in_place(
    ranks: RankPool, folder: Path, tmp_path: Path, layout: str, overrides: tuple[str, ...]
):
    moving, staying = (
        walk(ranks, folder, tmp_path / name, layout, *overrides, *more)
        for name, more in (("moving", ()), ("staying", (STAYING,)))
    )
    for moved, stayed in zip(moving, staying, strict=True):
        assert moved.metrics == stayed.metrics
        assert moved.checksums == stayed.checksums
        assert moved.metrics[2] == moved.metrics[1] != moved.metrics[0]
        assert moved.checksums[2] == moved.checksums[1] != moved.checksums[0]
        assert moved.saved == stayed.saved and moved.saved
        check_places(moved)
        # Nobody wants the memory if engines have GPUs of their own.
        assert set(stayed.gradient_bytes.values()) == {moved.gradient_bytes["train"]}
        assert not any(stayed.host_bytes.values())


def check_places(moved: Walk) -> None:
    state_bytes = moved.device_bytes["train"]
    assert state_bytes > 0 and moved.gradient_bytes["train"] > 0
    assert moved.gradient_bytes.keys() == PHASES.keys()
    for phase, residency in PHASES.items():
        assert (moved.gradient_bytes[phase] > 0) == (residency.gradients == "device"), phase
        # The first phases come before there are moments.
        is_on_device = residency.optimizer == "device"
        assert (moved.device_bytes[phase] > 0) == is_on_device, phase
        if phase != "load":
            assert (moved.device_bytes if is_on_device else moved.host_bytes)[phase] == state_bytes, phase


def test_the_reference_swaps_places_with_the_current_weights(ranks: RankPool, folder: Path):
    config = policy_ranks.run_config(folder, "one", KL)
    assert ranks.run(phase_ranks.swapped_reference, config, world_size=1) == [(True, True, True)]


def walk(ranks: RankPool, folder: Path, weights_dir: Path, layout: str, *overrides: str) -> list[Walk]:
    config = policy_ranks.run_config(folder, layout, *overrides)
    return ranks.run(phase_ranks.walk, config, weights_dir, world_size=policy_ranks.world_size(layout))
