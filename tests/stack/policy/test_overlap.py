# SPDX-License-Identifier: Apache-2.0
"""overlap_grad_reduce and overlap_param_gather: they overlap and change nothing, with several chunks, CP and EP."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import models
from tests.stack.policy import overlap_ranks, policy_ranks
from tests.stack.ranks import RankPool

DDP = "policy.megatron_cfg.distributed_data_parallel_config"
OFF = [f"{DDP}.overlap_grad_reduce=false", f"{DDP}.overlap_param_gather=false"]


@pytest.mark.long("parity")
@pytest.mark.parametrize(
    ("model_type", "layout"),
    [
        ("nemotron_h", "cp2 ep2"),
        ("qwen3_moe", "pp2 vpp2 dp2 ep2"),
        ("nemotron_h", "cp2 dp2 ep2"),
    ],
)
def test_gradients_are_reduced_during_the_backward_pass_to_the_same_bits(
    ranks: RankPool, tmp_path: Path, model_type: str, layout: str
):
    folder = models.save_model(tmp_path, model_type)
    world_size = policy_ranks.world_size(layout)
    on, off = (
        ranks.run(
            overlap_ranks.events_of_step, policy_ranks.run_config(folder, layout, *overrides), world_size=world_size
        )
        for overrides in ([], OFF)
    )
    for (events, num_buckets, metrics, checksums), (plain_events, _, plain_metrics, plain_checksums) in zip(
        on, off, strict=True
    ):
        assert (metrics, checksums) == (plain_metrics, plain_checksums)
        chunks = {index for _, index in events}
        assert len(chunks) == (2 if "vpp2" in layout else 1)
        first_finish = [event for event, _ in events].index("finish")
        # Every bucket is on its way before the first is waited for; without overlap it sets off only then.
        assert sum(event == "reduce" for event, _ in events[:first_finish]) == num_buckets
        plain = [event for event, _ in plain_events]
        assert "reduce" not in plain[: plain.index("finish")] and plain.count("reduce") == num_buckets
        # One reduction at least sets off while other gradients are still being computed.
        assert (
            "backward" in [event for event, _ in events[[event for event, _ in events].index("reduce") :]]
        ) or num_buckets == 1
