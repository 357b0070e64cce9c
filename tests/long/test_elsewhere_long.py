# SPDX-License-Identifier: Apache-2.0
"""A run with lag and dynamic sampling whose attempts have other nodes, engines and ranks: it says so, loses nothing."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from pathlib import Path

import pytest

from mrl.store.checkpoints import newest_step
from mrl.store.run_files import METRIC_KEYS, METRICS, read_rows
from tests.faults import test_kill
from tests.faults.attempts import Attempt, lineage, tiny_inputs
from tests.stack.ahead.conftest import AHEAD
from tests.stack.cluster.conftest import ray_nodes
from tests.waiting import HANG_S

STEPS = 20
SETTINGS = [
    *test_kill.SETTINGS,
    *(setting for setting in AHEAD if not setting.startswith(("grpo.max_num_steps", "checkpointing."))),
    f"grpo.max_num_steps={STEPS}",
    "checkpointing.save_period=2",
    "checkpointing.metric_name=null",
    "grpo.use_dynamic_sampling=true",
    "grpo.batch_multiplier=2",  # of which a surplus is left
    "++env.own.functions.coin=tests.long.coin:coin",
    "data.default.env_name=coin",
]
NODES, RANKS, ENGINES, TP, SP = (
    "cluster.num_nodes",
    "cluster.cpu_units_per_node",
    "policy.generation.num_cpu_engines",
    "policy.megatron_cfg.tensor_model_parallel_size",
    "policy.megatron_cfg.sequence_parallel",
)
PLACES = {
    "one rank and one engine": {NODES: 1, RANKS: 1, ENGINES: 1, TP: 1, SP: "false"},
    "more ranks and engines": {NODES: 1, RANKS: 2, ENGINES: 2, TP: 2, SP: "true"},
    "more nodes, fewer engines": {NODES: 2, RANKS: 1, ENGINES: 1, TP: 1, SP: "false"},
    "fewer nodes and ranks": {NODES: 1, RANKS: 1, ENGINES: 1, TP: 1, SP: "false"},
}


@pytest.mark.long("elsewhere")
@pytest.mark.timeout(20 * HANG_S)
def test_each_attempt_is_elsewhere_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, before = tmp_path / "run", dict[str, int | str]()
    for number, (place, sizes) in enumerate(PLACES.items()):
        saved, is_last = newest_step(run) if before else 0, number == len(PLACES) - 1
        monkeypatch.setenv("MRL_KILL_AT", "" if is_last else "rollouts:20")
        settings = [
            *tiny_inputs(),
            *SETTINGS,
            f"checkpointing.checkpoint_dir={run}",
            *(f"{key}={value}" for key, value in sizes.items()),
        ]
        with (
            ray_nodes(tmp_path, monkeypatch, 2, 1) if sizes[NODES] == 2 else nullcontext(),
            Attempt(run, settings, tmp_path / f"{number}.log") as current,
        ):
            code, said = current.finish(), current.text()
        assert code == (0 if is_last else -signal.SIGKILL), f"{place}: {said[-4000:]}"
        for key, value in sizes.items():
            is_said = f"Config since the last attempt: {key}={before.get(key)} -> {value}" in said
            assert is_said == (before.get(key, value) != value), f"{place}: {key}"
        if saved:
            assert (
                f"Resuming from {run}/step_{saved} (step {saved} of {STEPS})" in said
                and "kept rollouts are used again" in said
            )
            rows, _ = read_rows(run / METRICS, METRIC_KEYS)
            (after,) = (row for row in rows if row["step"] == saved + 1)
            assert after["rollout/kept_groups"], f"{place}: nothing was kept for step {saved + 1}"
        assert number == 0 or saved, place
        before = sizes
    assert sorted(lineage(run)) == list(range(1, STEPS + 1))
