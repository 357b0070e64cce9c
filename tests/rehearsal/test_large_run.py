# SPDX-License-Identifier: Apache-2.0
"""Runs of 256 and 4,096 GPUs: Megatron's ranks, our tables, the plan and refit schedule agree on who holds what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from conversion.boxes import volume
from conversion.families.common import MegatronCoords
from conversion.families.registry import family
from mrl.config.schema.run import RunConfig
from mrl.plan.facts import read_model
from mrl.plan.memory import stage_states
from tests.rehearsal.large_run import EP, NODES, RANKS, TP, Row, Shard, replicas, run_config

# Bytes of main parameter and moments in float32.
OPTIMIZER_BYTES = 12

RowsOf = Callable[[str], dict[str, list[dict[str, Any]]]]


def rows_of_run(rows_by_part: RowsOf, key: str) -> list[Row]:
    found = rows_by_part(key)["large_run"]
    assert len(found) == len(RANKS[key])
    return [Row(**{**row, "shards": {name: Shard(**shard) for name, shard in row["shards"].items()}}) for row in found]


@pytest.fixture(scope="module")
def ranks(rows_by_part: RowsOf, version: str) -> list[Row]:
    return rows_of_run(rows_by_part, version)


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, RunConfig]:
    return {nodes: run_config(nodes, tmp_path_factory.mktemp("config"))[0] for nodes in NODES}


def test_ranks_stand_where_the_tables_take_them_to_stand(ranks: list[Row], configs: dict[int, RunConfig]):
    for row in ranks:
        rank, world = row.rank, row.nodes * 8
        assert MegatronCoords(*row.coords) == configs[row.nodes].policy.megatron_cfg.parallel.coords_of(rank, world)
        # Megatron's order tp-cp-dp-pp, and for experts etp-ep-dp-pp: of a stage every second rank, and every eighth.
        assert tuple(row.dense_replica) == (rank % (world // 2) // TP, world // 2 // TP)
        assert tuple(row.expert_replica) == (rank % (world // 2) // EP, world // 2 // EP)


def test_bytes_of_a_rank_are_those_of_tables_and_plan(ranks: list[Row], configs: dict[int, RunConfig]):
    for row in ranks:
        config = configs[row.nodes]
        model, parallel = read_model(config), config.policy.megatron_cfg.parallel
        table = family(model.hf_config).megatron_layout(
            model.hf_config, parallel, MegatronCoords(*row.coords), "bfloat16", "te"
        )
        sizes = {"bfloat16": 2, "float32": 4}
        assert row.weight_bytes == sum(
            volume(tuple((0, size) for size in slot.shape)) * sizes[slot.dtype] for slot in table.values()
        )
        # Padding of buckets and of tensors, in an arena that engines map as a whole.
        assert row.weight_bytes <= row.arena_bytes <= row.weight_bytes * 1.001
        planned = stage_states(config, model, row.coords[1])
        assert row.weight_bytes == planned.weights
        # The plan counts the frozen routers as trained.
        assert row.gradient_bytes == pytest.approx(planned.gradients, rel=0.005)
        assert row.main_elements * OPTIMIZER_BYTES == pytest.approx(planned.optimizer, rel=0.02)


def test_buckets_divide_by_their_ranks(ranks: list[Row]):
    for row in ranks:
        assert row.bucket_remainders and not any(row.bucket_remainders)
        assert row.main_elements == sum(shard.stop - shard.start for shard in row.shards.values())


def test_each_element_of_experts_is_updated_by_one_replica(rows_by_part: RowsOf, configs: dict[int, RunConfig]):
    rows = rows_of_run(rows_by_part, "installed")
    check_shards([row for row in rows if row.nodes == NODES[0]], "experts", configs[NODES[0]])


@pytest.mark.long("rehearsal")
def test_each_element_of_dense_weights_is_updated_by_one_replica(rows_by_part: RowsOf, configs: dict[int, RunConfig]):
    check_shards(rows_of_run(rows_by_part, "dense"), "dense", configs[NODES[0]])


def check_shards(rows: list[Row], kind: str, config: RunConfig) -> None:
    """All replicas of one rank's weights of this kind share their elements among them."""
    members = {row.rank: row for row in rows if row.rank in replicas(config.num_policy_ranks)[kind]}
    assert len(members) == len(replicas(config.num_policy_ranks)[kind])
    parts = defaultdict(list)
    for row in members.values():
        for name, shard in row.shards.items():
            if shard.is_expert == (kind == "experts") and shard.start < shard.stop:
                parts[name, shard.num_elements].append((shard.start, shard.stop))
    model = read_model(config)
    coords = MegatronCoords(*next(iter(members.values())).coords)
    table = family(model.hf_config).megatron_layout(
        model.hf_config, config.policy.megatron_cfg.parallel, coords, "bfloat16", "te"
    )
    # Routers are frozen, and their biases no optimizer's.
    trained = {
        slot.name for slot in table if "router" not in slot.name and (".experts." in slot.name) == (kind == "experts")
    }
    assert {name.removeprefix("module.") for name, _ in parts} == trained
    for (name, num_elements), found in parts.items():
        ends = [0]
        for start, stop in sorted(found):
            assert start == ends[-1], f"{name}: {found}"
            ends.append(stop)
        assert ends[-1] == num_elements, f"{name}: {found}"


def test_a_refit_asks_ranks_for_what_they_hold(ranks: list[Row]):
    assert [f"rank {row.rank} of {row.nodes} nodes: {fault}" for row in ranks for fault in row.refit] == []
    assert all(row.num_copies for row in ranks)
